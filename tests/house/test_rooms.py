"""Who may import whom: the contracts hold, and each of them bites."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import LOCALSIM, PROVISIONERS, ROOT, SDK, short

ROOMS = sorted(path.parent for path in SDK.glob("*/__init__.py"))
FACADES = {"torch"}
TREES = ("sdk", "provisioners", "localsim")


def test_every_import_goes_down() -> None:
    verdict = lint_imports(ROOT)
    assert verdict.returncode == 0, verdict.stdout


@pytest.mark.parametrize(
    ("contract", "where", "line"),
    [
        ("layers", "sdk/spotfit/core/errors.py", "import spotfit.model"),
        ("layers", "sdk/spotfit/worker/__init__.py", "import spotfit.agent"),
        ("layers", "sdk/spotfit/utils/__init__.py", ""),
        ("cycles", "sdk/spotfit/model/one.py", "import spotfit.model.two"),
        ("pure", "sdk/spotfit/policy/__init__.py", "import time"),
        ("pure", "sdk/spotfit/policy/__init__.py", "import spotfit.host"),
        ("dialects", "sdk/spotfit/agent/__init__.py", "import torch"),
        ("dialects", "sdk/spotfit/agent/__init__.py", "import spotfit.frameworks"),
        ("drivers", "sdk/spotfit/ledger/__init__.py", "import boto3"),
        ("plugins", "sdk/spotfit/client/__init__.py", "import spotfit_localsim"),
        ("clouds", "provisioners/spotfit_provisioners/__init__.py", "import spotfit.ledger"),
    ],
)
def test_a_wall_that_is_broken_is_reported(
    tmp_path: Path, contract: str, where: str, line: str
) -> None:
    house = copy_of_the_house(tmp_path)
    (house / "sdk/spotfit/model/two.py").write_text("import spotfit.model.one\n")
    (house / where).parent.mkdir(exist_ok=True)
    with (house / where).open("a") as source:
        source.write(f"\n{line}\n")
    verdict = lint_imports(house, contract=contract)
    assert verdict.returncode == 1, f"{line!r} in {where} went unnoticed\n{verdict.stdout}"
    assert "BROKEN" in verdict.stdout, verdict.stdout + verdict.stderr


@pytest.mark.parametrize(
    "room",
    [*(room for room in ROOMS if room.name not in FACADES), PROVISIONERS, LOCALSIM],
    ids=lambda room: room.name,
)
def test_a_room_says_what_it_is_and_what_it_may_not_know(room: Path) -> None:
    tree = ast.parse((room / "__init__.py").read_text())
    said = ast.get_docstring(tree)
    assert said, f"{short(room)}/__init__.py says nothing"
    assert len(re.split(r"\n\s*\n", said)) == 2, "one sentence what it is, one what it may not know"
    assert len(tree.body) == 1, f"{short(room)}/__init__.py holds more than its two sentences"


def copy_of_the_house(tmp_path: Path) -> Path:
    for tree in TREES:
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(house: Path, *, contract: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the checker on the packages of `house`, wherever spotfit is installed from."""
    tool = Path(sys.executable).with_name("lint-imports")
    only = ["--contract", contract] if contract else []
    path = os.pathsep.join(str(house / tree) for tree in TREES)
    return subprocess.run(
        [tool, "--no-logo", "--no-cache", *only],
        cwd=house,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
