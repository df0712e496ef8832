"""Paths of the repository, for the tests of the repository."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SDK = ROOT / "sdk" / "spotfit"
PROVISIONERS = ROOT / "provisioners" / "spotfit_provisioners"
LOCALSIM = ROOT / "localsim" / "spotfit_localsim"
PACKAGES = (SDK, PROVISIONERS, LOCALSIM)
UNIT = ROOT / "tests" / "unit"
BENCHMARKS = ROOT / "benchmarks"

_TOP_LEVEL_FOLDERS = (
    ".ci",
    "benchmarks",
    "docs",
    "examples",
    "infra",
    "localsim",
    "provisioners",
    "sdk",
    "tests",
    "worker_image",
)


def source_files() -> list[Path]:
    """Every module of the three packages."""
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


def markdown_files() -> list[Path]:
    """Every Markdown file of the repository."""
    return sorted(path for path in text_files() if path.suffix == ".md")


def text_files() -> Iterator[Path]:
    """Every text file of the repository."""
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in _TOP_LEVEL_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def count_body_lines(path: Path) -> int:
    """Lines inside functions, without docstrings and `...`."""
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return len({line for node in functions for part in node.body for line in _line_range(part)})


def _line_range(part: ast.stmt) -> range:
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
        return range(0)
    return range(part.lineno, (part.end_lineno or part.lineno) + 1)
