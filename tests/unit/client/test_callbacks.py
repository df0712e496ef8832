"""Callbacks named by the environment: made once each, and told apart from those that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import cloudpickle
import pytest

from spotfit.client.callbacks import named_callbacks, surrounding
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.model.callbacks import UserCallback

HERE = __name__


class Listener(UserCallback):
    """Can be made."""


class Demanding(UserCallback):
    """Cannot be made without arguments."""

    def __init__(self, page: str) -> None:
        self.page = page


class Stranger:
    """No callback."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("SPOTFIT_CALLBACKS", raising=False)
    monkeypatch.delenv("RAY_TRAIN_CALLBACKS", raising=False)
    return monkeypatch


def test_nobody_is_named_by_default(names: pytest.MonkeyPatch) -> None:
    assert named_callbacks() == []


@pytest.mark.parametrize("variable", ["SPOTFIT_CALLBACKS", "RAY_TRAIN_CALLBACKS"])
def test_each_class_that_is_named_is_made_in_its_order(
    names: pytest.MonkeyPatch, variable: str
) -> None:
    names.setenv(variable, f"{HERE}.Listener, spotfit.model.callbacks.UserCallback")
    first, second = named_callbacks()
    assert isinstance(first, Listener)
    assert type(second) is UserCallback


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such.module.Class", "ModuleNotFoundError"),
        (f"{HERE}.Nobody", "AttributeError"),
        ("Listener", "ValueError"),
        (f"{HERE}.Stranger", "no subclass of spotfit.UserCallback"),
        (f"{HERE}.named_callbacks", "no subclass of spotfit.UserCallback"),
        (f"{HERE}.Demanding", "TypeError"),
    ],
)
def test_one_that_cannot_be_had_is_told_with_the_reason(
    names: pytest.MonkeyPatch, path: str, why: str
) -> None:
    names.setenv("SPOTFIT_CALLBACKS", path)
    with pytest.raises(ConfigError, match=why) as refused:
        named_callbacks()
    assert path in refused.value.what
    assert not isinstance(refused.value, ConfigErrors)


def test_all_that_cannot_be_had_are_told_at_once(names: pytest.MonkeyPatch) -> None:
    names.setenv("SPOTFIT_CALLBACKS", f"{HERE}.Nobody,{HERE}.Listener,{HERE}.Stranger")
    with pytest.raises(ConfigErrors) as refused:
        named_callbacks()
    assert len(refused.value.errors) == 2


class Around(UserCallback):
    """Writes down when its context is entered and left."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name = name
        self.diary = diary

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        self.diary.append(f"into {self.name}")
        yield
        self.diary.append(f"out of {self.name}")


def test_the_backend_s_context_is_the_outermost_and_callbacks_come_in_their_order() -> None:
    diary: list[str] = []
    around = surrounding(
        Around("backend", diary).train_func_context, [Around("a", diary), Around("b", diary)]
    )
    with around():
        diary.append("training")
    into, out = ["into backend", "into a", "into b"], ["out of b", "out of a", "out of backend"]
    assert diary == [*into, "training", *out]


def test_contexts_are_left_when_training_raises() -> None:
    left = []

    class Patient(UserCallback):
        @contextmanager
        def train_func_context(self) -> Iterator[None]:
            try:
                yield
            finally:
                left.append(self)

    with (
        pytest.raises(ZeroDivisionError),
        surrounding(nullcontext, [Patient(), Patient()])(),
    ):
        _ = 1 / 0
    assert len(left) == 2


def test_who_only_listens_surrounds_nothing_and_who_only_surrounds_does_not_listen() -> None:
    assert surrounding(nullcontext, [Listener()]) is nullcontext
    assert not Around("a", []).listens()
    assert Around("a", []).surrounds()
    assert not Listener().surrounds()


def test_nested_contexts_travel() -> None:
    around = surrounding(Around("a", []).train_func_context, [Around("b", [])])
    with cloudpickle.loads(cloudpickle.dumps(around))():
        pass
