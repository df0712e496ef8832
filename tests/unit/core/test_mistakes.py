"""Mistakes are collected, and told at once."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError
from spotfit.core.mistakes import Mistakes


def refuse(what: str) -> None:
    raise ConfigError(what)


def test_without_a_mistake_nothing_is_raised_and_checks_give_what_they_find() -> None:
    mistakes = Mistakes()
    assert mistakes.check(lambda: 7) == 7
    mistakes.raise_all()


def test_a_single_mistake_comes_as_itself() -> None:
    mistakes = Mistakes()
    assert mistakes.check(lambda: refuse("name")) is None
    with pytest.raises(ConfigError, match=r"^name$") as told:
        mistakes.raise_all()
    assert not isinstance(told.value, ConfigErrors)


def test_several_come_together_those_that_came_as_one_among_them() -> None:
    mistakes = Mistakes()
    mistakes.check(lambda: refuse("name"))
    mistakes.add(ConfigErrors([ConfigError("path"), SpotfitError("bucket")]))
    with pytest.raises(ConfigErrors) as told:
        mistakes.raise_all()
    assert [one.what for one in told.value.errors] == ["name", "path", "bucket"]


def test_what_is_no_mistake_of_the_caller_is_not_held_back() -> None:
    with pytest.raises(ZeroDivisionError):
        Mistakes().check(lambda: 1 / 0)
