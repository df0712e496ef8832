"""Examples have a docstring and compile. tests/live executes them."""

import ast
from pathlib import Path

import pytest

from tests.house.tree import ROOT, relative_path

EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=relative_path)
def test_an_example_has_a_docstring(example: Path) -> None:
    assert ast.get_docstring(ast.parse(example.read_text(), filename=relative_path(example)))
