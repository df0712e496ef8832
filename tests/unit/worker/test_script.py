"""Scripts are executed as `python` executes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import WorkerDiedError
from spotfit.worker.script import run_script


@pytest.fixture(autouse=True)
def _process_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def run(text: str, *arguments: str, script: str = "train.py") -> None:
    path = Path(script)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    config: dict[str, Any] = {"script": script, "arguments": list(arguments), "is_module": False}
    run_script(config)


def test_the_script_is_main_and_has_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    run("import sys; print(__name__, __file__, sys.argv)", "--lr", "0.1")
    path = Path("train.py").resolve()
    assert capsys.readouterr().out == f"__main__ {path} ['{path}', '--lr', '0.1']\n"


def test_imports_find_the_folder_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    Path("code").mkdir()
    Path("code/neighbor_of_script.py").write_text("VALUE = 7")
    run("import neighbor_of_script; print(neighbor_of_script.VALUE)", script="code/train.py")
    assert capsys.readouterr().out == "7\n"


def test_a_module_is_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("package_of_script").mkdir()
    Path("package_of_script/__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(".")
    run_script({"script": "package_of_script", "arguments": ["a"], "is_module": True})
    assert capsys.readouterr().out == "__main__ ['a']\n"


@pytest.mark.parametrize("end", ["exit()", "exit(0)", "raise SystemExit"])
def test_an_exit_with_status_0_is_a_success(end: str) -> None:
    run(end)


@pytest.mark.parametrize(("end", "text"), [("3", "status 3"), ("'bad'", "the message 'bad'")])
def test_another_exit_is_an_error(end: str, text: str) -> None:
    with pytest.raises(WorkerDiedError, match=rf"'train\.py' has exited with {text}"):
        run(f"import sys; sys.exit({end})")


def test_exceptions_of_the_script_propagate() -> None:
    with pytest.raises(KeyError):
        run("{}['missing']")
