"""`ErrorCollector` reports all errors together."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest

from spotfit.core.errors import ConfigError, ConfigErrors, ConfigTypeError, SpotfitError
from spotfit.core.input_checks import (
    DEPRECATED,
    LOG_LEVELS,
    ErrorCollector,
    did_you_mean,
    is_dataframe,
    parse_log_level,
    reject_deprecated_arguments,
    suggest_keywords,
)


def refuse(what: str) -> None:
    raise ConfigError(what)


def test_without_errors_results_are_returned() -> None:
    errors = ErrorCollector()
    assert errors.check(lambda: 7) == 7
    errors.raise_all()


def test_a_single_error_is_raised_unwrapped() -> None:
    errors = ErrorCollector()
    assert errors.check(lambda: refuse("name")) is None
    with pytest.raises(ConfigError, match=r"^name$") as raised:
        errors.raise_all()
    assert not isinstance(raised.value, ConfigErrors)


def test_several_errors_are_flattened_and_raised_together() -> None:
    errors = ErrorCollector()
    errors.check(lambda: refuse("name"))
    errors.add(ConfigErrors([ConfigError("path"), SpotfitError("bucket")]))
    with pytest.raises(ConfigErrors) as raised:
        errors.raise_all()
    assert [error.message for error in raised.value.errors] == ["name", "path", "bucket"]


def test_other_exceptions_propagate() -> None:
    with pytest.raises(ZeroDivisionError):
        ErrorCollector().check(lambda: 1 / 0)


INSTEAD = {"stop": "return when it is done", "verbose": "set a log level"}


def test_all_passed_arguments_are_named_with_replacements() -> None:
    with pytest.raises(DeprecationWarning) as raised:
        reject_deprecated_arguments("RunConfig", {"stop": None, "verbose": 1}, replacements=INSTEAD)
    assert str(raised.value) == (
        "RunConfig(stop=..., verbose=...) is no longer supported. "
        "stop: return when it is done; verbose: set a log level."
    )


def test_unset_arguments_are_accepted() -> None:
    reject_deprecated_arguments(
        "RunConfig", {"stop": DEPRECATED, "verbose": DEPRECATED}, replacements=INSTEAD
    )
    reject_deprecated_arguments(
        "RunConfig", {"stop": "".join(["DEPRE", "CATED"])}, replacements=INSTEAD
    )
    reject_deprecated_arguments("Trainer", {"stop": None}, replacements=INSTEAD, unset=None)


def test_an_object_that_equals_everything_counts_as_passed() -> None:
    class Table:
        def __eq__(self, other: object) -> Any:
            raise ValueError("ambiguous")

        __hash__ = object.__hash__

    with pytest.raises(DeprecationWarning):
        reject_deprecated_arguments("RunConfig", {"stop": Table()}, replacements=INSTEAD)


def test_levels_equal_those_of_logging() -> None:
    for name, number in LOG_LEVELS.items():
        assert getattr(logging, name) == number


def test_names_are_case_insensitive() -> None:
    assert (parse_log_level("debug"), parse_log_level("Warn")) == ("DEBUG", "WARN")


@pytest.mark.parametrize("name", ["LOUD", "", 20, None])
def test_unknown_names_are_refused_with_all_known_names(name: object) -> None:
    with pytest.raises(ConfigError, match="Invalid log_level") as raised:
        parse_log_level(name)
    assert "CRITICAL, DEBUG" in raised.value.do


def test_a_name_that_begins_with_the_word_is_suggested() -> None:
    """`pip install 'spotfit[aws]'` suggests that the provisioner has that name, too."""
    hint = did_you_mean("aws", ["local", "aws_batch", "gcp_batch"])
    assert hint == "Did you mean 'aws_batch'? Known: aws_batch, gcp_batch, local."


def test_a_similar_name_is_suggested() -> None:
    hint = did_you_mean("lokal", ["local", "kubernetes"])
    assert hint == "Did you mean 'local'? Known: kubernetes, local."


def test_without_a_similar_name_all_names_are_listed() -> None:
    assert did_you_mean("zzz", ["local", "aws"]) == "Known: aws, local."


def test_without_known_names_the_hint_is_empty() -> None:
    assert did_you_mean("local", []) == ""


@suggest_keywords
@dataclass
class Settings:
    """Two settings."""

    num_workers: int = 1
    name: str = ""


def test_an_unknown_keyword_gets_a_suggestion() -> None:
    with pytest.raises(ConfigTypeError, match=r"Settings\(num_worker=...\): there is no") as caught:
        Settings(num_worker=2)  # type: ignore[call-arg]
    assert caught.value.do == "Did you mean 'num_workers'? Known: name, num_workers."
    assert Settings(2, name="a") == Settings(num_workers=2, name="a")


def test_a_removed_keyword_is_not_suggested() -> None:
    @suggest_keywords
    @dataclass
    class Renamed:
        name: str = ""
        verbose: Any = DEPRECATED

    with pytest.raises(ConfigTypeError) as caught:
        Renamed(verbos=2)  # type: ignore[call-arg]
    assert caught.value.do == "Known: name."
    assert Renamed(verbose=1).verbose == 1


def test_a_class_with_suggestions_keeps_its_signature_and_errors() -> None:
    assert list(inspect.signature(Settings).parameters) == ["num_workers", "name"]
    assert Settings.__init__.__qualname__ == "Settings.__init__"
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments"):
        Settings(1, "a", 3)  # type: ignore[call-arg]


def test_a_derived_class_is_named_in_the_suggestion() -> None:
    class Derived(Settings):
        def __init__(self, extra: int, **settings: Any) -> None:
            super().__init__(**settings)
            self.extra = extra

    assert Derived(1, num_workers=3).num_workers == 3
    with pytest.raises(ConfigTypeError, match=r"Derived\(nam=...\)"):
        Derived(1, nam="a")


def test_a_dataframe_is_one_of_pandas() -> None:
    assert is_dataframe(pd.DataFrame())
    assert not is_dataframe(type("DataFrame", (), {})())
