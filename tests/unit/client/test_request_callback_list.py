"""Callbacks from SPOTFIT_CALLBACKS, and nested contexts around the training function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import cloudpickle
import pytest

from spotfit.client.request import load_callbacks_from_env, nest_train_contexts
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.model.user_callback import UserCallback

MODULE = __name__


class Listener(UserCallback):
    """A valid callback."""


class Demanding(UserCallback):
    """Cannot be made without arguments."""

    def __init__(self, page: str) -> None:
        self.page = page


class NotACallback:
    """Not a callback."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("SPOTFIT_CALLBACKS", raising=False)
    monkeypatch.delenv("RAY_TRAIN_CALLBACKS", raising=False)
    return monkeypatch


def test_no_callbacks_by_default(names: pytest.MonkeyPatch) -> None:
    assert load_callbacks_from_env() == []


@pytest.mark.parametrize("variable", ["SPOTFIT_CALLBACKS", "RAY_TRAIN_CALLBACKS"])
def test_each_named_class_is_instantiated_in_order(
    names: pytest.MonkeyPatch, variable: str
) -> None:
    names.setenv(variable, f"{MODULE}.Listener, spotfit.model.user_callback.UserCallback")
    first, second = load_callbacks_from_env()
    assert isinstance(first, Listener)
    assert type(second) is UserCallback


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such.module.Class", "ModuleNotFoundError"),
        (f"{MODULE}.Missing", "AttributeError"),
        ("Listener", "ValueError"),
        (f"{MODULE}.NotACallback", "not a subclass of spotfit.UserCallback"),
        (f"{MODULE}.load_callbacks_from_env", "not a subclass of spotfit.UserCallback"),
        (f"{MODULE}.Demanding", "TypeError"),
    ],
)
def test_an_invalid_callback_is_reported_with_the_reason(
    names: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    names.setenv("SPOTFIT_CALLBACKS", path)
    with pytest.raises(ConfigError, match=reason) as refused:
        load_callbacks_from_env()
    assert path in refused.value.message
    assert not isinstance(refused.value, ConfigErrors)


def test_all_invalid_callbacks_are_reported_together(names: pytest.MonkeyPatch) -> None:
    names.setenv("SPOTFIT_CALLBACKS", f"{MODULE}.Missing,{MODULE}.Listener,{MODULE}.NotACallback")
    with pytest.raises(ConfigErrors) as refused:
        load_callbacks_from_env()
    assert len(refused.value.errors) == 2


class Around(UserCallback):
    """Records when its context is entered and exited."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        self.events.append(f"into {self.name}")
        yield
        self.events.append(f"out of {self.name}")


def test_the_backend_context_is_outermost_and_callbacks_follow_in_order() -> None:
    events: list[str] = []
    around = nest_train_contexts(
        Around("backend", events).train_func_context, [Around("a", events), Around("b", events)]
    )
    with around():
        events.append("training")
    into, out = ["into backend", "into a", "into b"], ["out of b", "out of a", "out of backend"]
    assert events == [*into, "training", *out]


def test_contexts_are_exited_when_training_raises() -> None:
    left = []

    class ExitRecordingCallback(UserCallback):
        @contextmanager
        def train_func_context(self) -> Iterator[None]:
            try:
                yield
            finally:
                left.append(self)

    with (
        pytest.raises(ZeroDivisionError),
        nest_train_contexts(nullcontext, [ExitRecordingCallback(), ExitRecordingCallback()])(),
    ):
        _ = 1 / 0
    assert len(left) == 2


def test_event_methods_and_contexts_are_detected_separately() -> None:
    assert nest_train_contexts(nullcontext, [Listener()]) is nullcontext
    assert not Around("a", []).has_event_methods()
    assert Around("a", []).has_train_func_context()
    assert not Listener().has_train_func_context()


def test_nested_contexts_can_be_pickled() -> None:
    around = nest_train_contexts(Around("a", []).train_func_context, [Around("b", [])])
    with cloudpickle.loads(cloudpickle.dumps(around))():
        pass
