"""Levels of a log are Python's."""

from __future__ import annotations

import logging

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.levels import LEVELS, parse_level


def test_they_are_those_of_python() -> None:
    for name, number in LEVELS.items():
        assert getattr(logging, name) == number


def test_a_name_is_known_in_any_case() -> None:
    assert (parse_level("debug"), parse_level("Warn")) == ("DEBUG", "WARN")


@pytest.mark.parametrize("name", ["LOUD", "", 20, None])
def test_other_names_are_refused_with_those_there_are(name: object) -> None:
    with pytest.raises(ConfigError, match="Invalid log_level") as told:
        parse_level(name)
    assert "CRITICAL, DEBUG" in told.value.do
