"""Callbacks named by the environment: made once each, and told apart from those that cannot be."""

from __future__ import annotations

import pytest

from spotfit.client.callbacks import named_callbacks
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
