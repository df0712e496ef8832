"""Equal code has equal fingerprints, in every process and at every line."""

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
    module_object: Any = types.ModuleType("made")
    code = compile(text.format(limit=limit, width=width), "made.py", "exec")
    exec(code, module_object.__dict__)  # noqa: S102 - our own text, as an import would
    return module_object


@pytest.mark.parametrize("path", [["Net"], ["Net", "forward"], ["outer"], []])
def test_moved_code_has_the_same_fingerprint(path: list[str]) -> None:
    one, two = module(), module("\n\n# moved\n" + CODE)
    for name in path:
        one, two = getattr(one, name), getattr(two, name)
    assert fingerprint_definition(one) == fingerprint_definition(two)


@pytest.mark.parametrize("path", [["Net", "forward"], ["outer"], []])
def test_fingerprint_depends_on_used_constants(path: list[str]) -> None:
    one, two = module(), module(limit=3)
    for name in path:
        one, two = getattr(one, name), getattr(two, name)
    assert fingerprint_definition(one) != fingerprint_definition(two)


def test_fingerprint_depends_on_class_attributes() -> None:
    assert fingerprint_definition(module().Net) != fingerprint_definition(module(width=3).Net)


def test_fingerprint_does_not_depend_on_mutable_state() -> None:
    one, two = module(), module()
    two.COUNTER.append(1)
    two.Net.layers.append(1)
    assert fingerprint_definition(one) == fingerprint_definition(two)
    assert fingerprint_definition(one.Net) == fingerprint_definition(two.Net)


def test_combined_fingerprint_does_not_depend_on_the_order() -> None:
    assert (
        combine_fingerprints(["a", "b"])
        == combine_fingerprints(["b", "a"])
        != combine_fingerprints(["a", "c"])
    )


def test_unbound_closure_variable_is_supported() -> None:
    def with_closure(*, is_bound: bool) -> Any:
        if is_bound:
            value = 1
        return lambda: value

    assert fingerprint_function(with_closure(is_bound=False)) == fingerprint_function(
        with_closure(is_bound=False)
    )
    assert fingerprint_function(with_closure(is_bound=False)) != fingerprint_function(
        with_closure(is_bound=True)
    )


SCRIPT = """
from spotfit.code.fingerprint import fingerprint_definition
def fn(x):
    return x in {"apple", "pear", "plum", "quince"}
print(fingerprint_definition(fn))
"""


def test_fingerprint_is_equal_in_every_process() -> None:
    """The order of a set differs from process to process."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
