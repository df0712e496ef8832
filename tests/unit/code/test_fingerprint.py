"""Fingerprints: equal code has equal ones, in every process and wherever its lines stand."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest

from spotfit.code.fingerprint import (
    combine_fingerprints,
    fingerprint_definition,
    fingerprint_function,
)

CODE = """
LIMIT = {limit}
COUNTER = []

class Net:
    width = {width}
    layers = []

    def forward(self, x):
        return x in {{"apple", "pear", "plum"}} and x < LIMIT

def outer():
    def inner():
        return LIMIT
    return inner
"""


def module(text: str = CODE, *, limit: Any = 1, width: Any = 2) -> Any:
    made: Any = types.ModuleType("made")
    code = compile(text.format(limit=limit, width=width), "made.py", "exec")
    exec(code, made.__dict__)  # noqa: S102 - our own text, as an import would
    return made


@pytest.mark.parametrize("path", [["Net"], ["Net", "forward"], ["outer"], []])
def test_the_same_code_in_other_lines_is_the_same(path: list[str]) -> None:
    one, two = module(), module("\n\n# moved\n" + CODE)
    for name in path:
        one, two = getattr(one, name), getattr(two, name)
    assert fingerprint_definition(one) == fingerprint_definition(two)


@pytest.mark.parametrize("path", [["Net", "forward"], ["outer"], []])
def test_constants_that_code_uses_belong_to_it(path: list[str]) -> None:
    one, two = module(), module(limit=3)
    for name in path:
        one, two = getattr(one, name), getattr(two, name)
    assert fingerprint_definition(one) != fingerprint_definition(two)


def test_so_do_those_of_a_class() -> None:
    assert fingerprint_definition(module().Net) != fingerprint_definition(module(width=3).Net)


def test_what_changes_while_a_script_runs_does_not() -> None:
    one, two = module(), module()
    two.COUNTER.append(1)
    two.Net.layers.append(1)
    assert fingerprint_definition(one) == fingerprint_definition(two)
    assert fingerprint_definition(one.Net) == fingerprint_definition(two.Net)


def test_parts_are_digested_in_any_order() -> None:
    assert (
        combine_fingerprints(["a", "b"])
        == combine_fingerprints(["b", "a"])
        != combine_fingerprints(["a", "c"])
    )


def test_a_name_that_was_never_bound_is_no_trouble() -> None:
    def with_hole(*, filled: bool) -> Any:
        if filled:
            hole = 1
        return lambda: hole

    assert fingerprint_function(with_hole(filled=False)) == fingerprint_function(
        with_hole(filled=False)
    )
    assert fingerprint_function(with_hole(filled=False)) != fingerprint_function(
        with_hole(filled=True)
    )


SCRIPT = """
from spotfit.code.fingerprint import fingerprint_definition
def fn(x):
    return x in {"apple", "pear", "plum", "quince"}
print(fingerprint_definition(fn))
"""


def test_they_are_the_same_in_every_process() -> None:
    """The order of a set differs from process to process."""
    told = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
