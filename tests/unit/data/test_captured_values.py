"""Digests of functions with the values that they have captured."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotfit.data.captured_values import digest_captured
from spotfit.data.user_functions import user_function

CAPTURES: dict[str, tuple[Any, Any]] = {
    "array": (np.array([2]), np.array([3])),
    "array of objects": (np.array([[2], None], object), np.array([[3], None], object)),
    "set": ({"a", "b", "c"}, {"a", "b", "d"}),
    "function": (lambda x: x * 2, lambda x: x * 3),
    "partial": (functools.partial(np.multiply, 2), functools.partial(np.multiply, 3)),
    "cached function": (functools.cache(lambda x: x * 2), functools.cache(lambda x: x * 3)),
}


class Factor:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.lock = threading.Lock()

    def apply(self, x: Any) -> Any:
        return x * self.factor


class SlottedFactor:
    __slots__ = ("factor",)

    def __init__(self, factor: int) -> None:
        self.factor = factor


def iter_nothing() -> Iterator[int]:
    yield from ()


def closure_over(value: Any) -> Callable[[Any], Any]:
    return lambda row: (row, value)


def digest(function: Any, **options: Any) -> str:
    result = digest_captured([user_function("map", function, options)])
    assert result is not None
    return result


@pytest.mark.parametrize("kind", CAPTURES)
def test_a_digest_covers_the_values_of_a_closure(kind: str) -> None:
    first, second = CAPTURES[kind]
    assert digest(closure_over(first)) == digest(closure_over(first))
    assert digest(closure_over(first)) != digest(closure_over(second))


@pytest.mark.parametrize("kind", [Factor, SlottedFactor])
def test_a_digest_covers_the_attributes_of_an_object(kind: Any) -> None:
    assert digest(closure_over(kind(2))) == digest(closure_over(kind(2)))
    assert digest(closure_over(kind(2))) != digest(closure_over(kind(3)))


def test_a_digest_covers_the_object_of_a_method() -> None:
    assert digest(Factor(2).apply) != digest(Factor(3).apply)


def test_a_digest_covers_arguments_but_not_the_size_of_the_pool() -> None:
    def scale(row: Any, weights: Any) -> Any:
        return row, weights

    first = digest(scale, fn_args=[np.array([2])])
    assert first == digest(scale, fn_args=[np.array([2])], concurrency=3)
    assert first != digest(scale, fn_args=[np.array([3])])


def test_recursive_functions_have_a_digest() -> None:
    def depth(row: Any) -> int:
        return 1 + depth(row[0]) if row else 0

    assert digest(depth) == digest(depth)


def test_a_value_that_cannot_be_pickled_has_no_digest() -> None:
    assert digest_captured([closure_over(iter_nothing())]) is None


SCRIPT = """
from spotfit.data.captured_values import digest_captured

TABLE = {"factor": 2, "names": {"a", "b", "c", "d"}}

class Scale:
    def scale(self, x):
        return helper(x)

def helper(x):
    return x * 2

def apply(row):
    return Scale().scale(row) * TABLE["factor"]

print(digest_captured([apply]))
"""


@pytest.fixture
def digest_of_script(tmp_path: Path) -> Callable[[str], str]:
    def run(script: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(script)
        command = [sys.executable, "-B", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return run


def test_a_digest_is_equal_in_every_process(digest_of_script: Callable[[str], str]) -> None:
    first = digest_of_script(SCRIPT)
    assert len(first) == 64
    assert digest_of_script(f"# The lines have other numbers.\n{SCRIPT}") == first


@pytest.mark.parametrize("change", ['"factor": 3', "x * 3"])
def test_a_digest_covers_global_values_and_functions_of_a_script(
    digest_of_script: Callable[[str], str], change: str
) -> None:
    changed = SCRIPT.replace(change.replace("3", "2"), change)
    assert changed != SCRIPT
    assert digest_of_script(changed) != digest_of_script(SCRIPT)


@pytest.mark.parametrize("change", ["WEIGHTS = [3]", "x * 3"])
def test_a_digest_covers_modules_of_the_project(
    digest_of_script: Callable[[str], str], tmp_path: Path, change: str
) -> None:
    script = """
import project
from spotfit.data.captured_values import digest_captured
print(digest_captured([lambda row: project.scale(row)]))
"""
    module = "WEIGHTS = [2]\ndef scale(x):\n    return x * 2 + WEIGHTS[0]\n"
    (tmp_path / "project.py").write_text(module)
    first = digest_of_script(script)
    (tmp_path / "project.py").write_text(module.replace(change.replace("3", "2"), change))
    assert digest_of_script(script) != first
