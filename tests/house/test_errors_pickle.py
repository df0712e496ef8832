"""Every error class survives pickling with its attributes, because errors cross processes."""

import inspect
import pickle
import re
from collections.abc import Callable

import pytest

from spotfit.core import errors
from spotfit.core.errors import SpotfitError
from spotfit.model.topology import PreemptionInfo

KINDS = sorted(
    (
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, SpotfitError)
    ),
    key=lambda kind: kind.__name__,
)

CUSTOM_CONSTRUCTORS: dict[str, Callable[[], SpotfitError]] = {
    "ConfigErrors": lambda: errors.ConfigErrors([errors.ConfigError("one"), SpotfitError("two")]),
    "ControllerError": lambda: errors.ControllerError(ValueError("a callback")),
    "HangError": lambda: errors.HangError("rank 1 hung", {1: KeyError("loss")}),
    "PreemptionError": lambda: errors.PreemptionError(
        PreemptionInfo(77, {"node": [0, 1]}), drain_timed_out=True
    ),
    "WorkerGroupError": lambda: errors.WorkerGroupError("rank 1 failed", {1: KeyError("loss")}),
}


def make_error(kind: type[SpotfitError]) -> SpotfitError:
    if kind.__name__ in CUSTOM_CONSTRUCTORS:
        return CUSTOM_CONSTRUCTORS[kind.__name__]()
    return kind("what happened and why", do="the remedy", rank=3, limit_bytes=8)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_a_pickle(kind: type[SpotfitError]) -> None:
    error = make_error(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.args == error.args
    assert describe(again) == describe(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_class_is_documented_in_the_class_tree(kind: type[SpotfitError]) -> None:
    assert kind.__doc__
    assert "__doc__" in vars(kind), "the class has no docstring"
    tree = errors.__doc__ or ""
    assert re.search(rf"\b{kind.__name__}\b", tree), (
        "it is missing in the class tree of the module docstring"
    )


def describe(error: SpotfitError) -> dict[str, str]:
    """The attributes of an error; nested exceptions by their repr, as they have no equality."""
    return {name: repr(attribute) for name, attribute in vars(error).items()}
