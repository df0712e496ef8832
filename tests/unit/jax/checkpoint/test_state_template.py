"""A state that a restart could not restore is rejected, with the name of the leaf."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from spotfit.core.errors import ConfigError  # noqa: E402
from spotfit.jax.checkpoint import state_template  # noqa: E402
from spotfit.jax.checkpoint.array_tree import ArraySpec, ArrayTree  # noqa: E402
from spotfit.jax.checkpoint.state_template import StateTemplate, why_not_restorable  # noqa: E402
from tests.unit.jax.checkpoint.trees import make_tree, sharding  # noqa: E402

INT = jnp.zeros(3, "int32")


@pytest.mark.parametrize(
    ("initial", "state", "problem"),
    [
        (INT, jnp.zeros(3), r"float32\[3\], but was int32\[3\]"),
        (INT, jnp.zeros(3, "int16"), r"int16\[3\], but was int32\[3\]"),
        (INT, jnp.zeros((3, 1), "int32"), r"int32\[3,1\], but was int32\[3\]"),
        (INT, 3, r"a int, but was int32\[3\]"),
        (0, INT, r"int32\[3\], but was a int"),
        ("text", INT, r"int32\[3\], but was a str"),
        (jnp.asarray(0), 0.5, r"a float, but was int32\[\]"),
        (jnp.asarray(0), 2**40, r"a int, but was int32\[\]"),
        (np.zeros(3), np.zeros(3, "float16"), r"float16\[3\], but was float64\[3\]"),
        (jax.random.key(0), jnp.zeros(2, "uint32"), r"uint32\[2\], but was a random key of"),
    ],
)
def test_a_leaf_that_would_change_is_rejected(initial: Any, state: Any, problem: str) -> None:
    template = StateTemplate({"a": 1, "b": [initial]})
    with pytest.raises(ConfigError, match=rf"state\.b\.0 is {problem}"):
        template.check({"a": 1, "b": [state]})


@pytest.mark.parametrize(
    ("initial", "state"),
    [
        (0, jnp.asarray(5)),
        (0, 2.5),
        (0.0, np.float64(2.5)),
        (jnp.zeros(()), 5),
        (jnp.zeros((), "bfloat16"), 0.1),
        # What an update makes of arrays of numpy.
        (np.zeros(3), jnp.zeros(3)),
        (np.int64(0), jnp.asarray(1)),
        (INT, np.zeros(3, "int32")),
        (INT, jax.device_put(np.zeros(3, "int32"), sharding())),
    ],
)
def test_a_leaf_that_can_be_restored_is_accepted(initial: Any, state: Any) -> None:
    StateTemplate([initial]).check([state])


def test_descriptions_are_compared() -> None:
    template = StateTemplate([jax.ShapeDtypeStruct((3,), "int32", sharding=sharding())])
    template.check([INT])
    with pytest.raises(ConfigError, match=r"state\.0 is float32\[3\]"):
        template.check([jnp.zeros(3)])


def test_an_unchanged_state_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[Any] = []

    def describe(tree: Any) -> ArrayTree:
        described.append(tree)
        return ArrayTree(tree)

    monkeypatch.setattr(state_template, "ArrayTree", describe)
    template = StateTemplate({"tree": make_tree(1.0), "step": 0})
    for n in range(4):
        template.check({"tree": make_tree(n + 2.0), "step": jnp.asarray(n)})
    assert len(described) == 2, "the initial state, and the first with an array as the step"


def test_numbers_with_a_fraction_are_not_restored_as_integers() -> None:
    saved = ArraySpec((3,), np.dtype("float32"))
    integers = ArraySpec((3,), np.dtype("int32"))
    assert why_not_restorable(integers, saved) == "int32[3], was float32[3]"
    assert why_not_restorable(saved, integers) == ""
