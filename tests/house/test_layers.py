"""The import contracts hold, and each of them detects a violation."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import LOCALSIM, PROVISIONERS, ROOT, SDK, relative_path

SDK_PACKAGES = sorted(path.parent for path in SDK.glob("*/__init__.py"))
PACKAGES_WITH_EXPORTS = {
    "data",
    "deepspeed",
    "horovod",
    "huggingface",
    "jax",
    "lightgbm",
    "lightning",
    "prediction",
    "sklearn",
    "tensorflow",
    "torch",
    "xgboost",
}
TREES = ("sdk", "provisioners", "localsim")


def test_all_import_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("contract", "where", "line"),
    [
        ("layers", "sdk/spotfit/core/errors.py", "import spotfit.model"),
        ("layers", "sdk/spotfit/worker/__init__.py", "import spotfit.agent"),
        ("layers", "sdk/spotfit/utils/__init__.py", ""),
        ("cycles", "sdk/spotfit/model/one.py", "import spotfit.model.two"),
        ("pure", "sdk/spotfit/policy/__init__.py", "import time"),
        ("pure", "sdk/spotfit/policy/__init__.py", "import spotfit.host"),
        ("frameworks", "sdk/spotfit/agent/__init__.py", "import torch"),
        ("frameworks", "sdk/spotfit/agent/__init__.py", "import spotfit.frameworks"),
        ("drivers", "sdk/spotfit/ledger/__init__.py", "import boto3"),
        ("plugins", "sdk/spotfit/client/__init__.py", "import spotfit_localsim"),
        ("clouds", "provisioners/spotfit_provisioners/__init__.py", "import spotfit.ledger"),
    ],
)
def test_a_violated_contract_is_reported(
    tmp_path: Path, contract: str, where: str, line: str
) -> None:
    tree = copy_sources(tmp_path)
    (tree / "sdk/spotfit/model/two.py").write_text("import spotfit.model.one\n")
    (tree / where).parent.mkdir(exist_ok=True)
    with (tree / where).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint_imports(tree, contract=contract)
    assert result.returncode == 1, f"{line!r} in {where} was not detected\n{result.stdout}"
    assert "BROKEN" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize(
    "package",
    [
        *(one for one in SDK_PACKAGES if one.name not in PACKAGES_WITH_EXPORTS),
        PROVISIONERS,
        LOCALSIM,
    ],
    ids=lambda package: package.name,
)
def test_a_package_docstring_states_responsibility_and_limits(package: Path) -> None:
    module = ast.parse((package / "__init__.py").read_text())
    docstring = ast.get_docstring(module)
    assert docstring, f"{relative_path(package)}/__init__.py has no docstring"
    assert len(re.split(r"\n\s*\n", docstring)) == 2, (
        "the docstring needs two paragraphs: responsibility and limits"
    )
    assert len(module.body) == 1, f"{relative_path(package)}/__init__.py contains code"


def copy_sources(tmp_path: Path) -> Path:
    for tree in TREES:
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(root: Path, *, contract: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages below `root`, wherever spotfit is installed from."""
    tool = Path(sys.executable).with_name("lint-imports")
    only = ["--contract", contract] if contract else []
    path = os.pathsep.join(str(root / tree) for tree in TREES)
    return subprocess.run(
        [tool, "--no-logo", "--no-cache", *only],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
