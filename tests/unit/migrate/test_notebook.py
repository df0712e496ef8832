"""Migration of notebooks: cells, lines of IPython, and the format of the file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.migrate.notebook import rewrite_notebook


def make_notebook(*codes: str | list[str], **metadata: Any) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "execution_count": 1, "outputs": ["é"], "source": code}
        for code in codes
    ]
    text = {"cell_type": "markdown", "source": ["import ray.train\n"]}
    return {"cells": [text, *cells], "metadata": metadata, "nbformat": 4}


def encode(notebook: Any) -> bytes:
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def codes_of(text: bytes) -> list[Any]:
    return [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def test_cells_share_the_imports_of_earlier_cells() -> None:
    old = make_notebook(
        ["# setup\n", "import ray.train\n", "ray.init()"], "", "def f():\n    ray.train.report({})"
    )
    moved = rewrite_notebook(encode(old))
    old["cells"][1]["source"] = ["# setup\n", "import spotfit"]
    old["cells"][3]["source"] = "def f():\n    spotfit.report({})"
    assert moved.text == encode(old), "nothing else changes, nor the type of a source"
    assert rewrite_notebook(moved.text).text == moved.text


def test_lines_of_ipython_are_kept() -> None:
    codes = [
        "%pip install ray\nif 1:\n    !ls",
        "%%bash\nimport ray.train",
        "x = (3\n%4)\nimport ray.train\ns = '''\n%d'''",
    ]
    moved = rewrite_notebook(encode(make_notebook(*codes)))
    assert codes_of(moved.text) == [*codes[:2], codes[2].replace("ray.train", "spotfit")]


def test_notes_name_the_cell_and_its_line() -> None:
    old = make_notebook("import ray.tune", "\nray.tune.Tuner('x')\nray.tune.run(3)")
    moved = rewrite_notebook(encode(old))
    assert moved.text == encode(old)
    assert [(note.location, note.what) for note in moved.manual_notes] == [
        ("code cell 2, line 2", "ray.tune.Tuner"),
        ("code cell 2, line 3", "ray.tune.run"),
    ]


@pytest.mark.parametrize("layout", [{"indent": 4}, {"indent": None}, {"indent": 2}])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_format_of_the_file_is_kept(layout: dict[str, Any], ascii_only: bool) -> None:
    old = json.dumps(make_notebook("import ray.train"), ensure_ascii=ascii_only, **layout)
    new = json.dumps(make_notebook("import spotfit"), ensure_ascii=ascii_only, **layout)
    assert rewrite_notebook(old.encode()).text == new.encode()


def test_a_notebook_of_another_language_is_unchanged() -> None:
    old = encode(make_notebook("import(ray.train", kernelspec={"language": "R"}))
    assert rewrite_notebook(old).text == old


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"import ray", "not a Jupyter notebook"),
        (b"[]", "not a Jupyter notebook"),
        (encode(make_notebook("def (:")), "The code of nb.ipynb is not valid Python"),
    ],
)
def test_an_unreadable_notebook_is_reported(body: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rewrite_notebook(body, name="nb.ipynb")
