"""Parsing of a backend's options from text or data; all invalid options are reported together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.provision.profile import check_minimums, non_default_options, parse_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleOptions:
    provisioner: ClassVar[str] = "example"

    queue: str = ""
    zones: tuple[str, ...] = ()
    most: int | None = None
    boot_s: float = 30.0
    spot: bool = True
    tier: Literal["small", "big"] = "small"
    labels: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.boot_s < 0:
            raise ConfigError("boot_s is below zero.")


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, ExampleOptions()),
        ({"queue": "7"}, ExampleOptions(queue="7")),
        ({"zones": "a, b,"}, ExampleOptions(zones=("a", "b"))),
        ({"zones": ["a"], "most": "3"}, ExampleOptions(zones=("a",), most=3)),
        ({"boot_s": "1.5", "spot": "false"}, ExampleOptions(boot_s=1.5, spot=False)),
        ({"labels": '{"team": "nlp"}'}, ExampleOptions(labels={"team": "nlp"})),
        ({"tier": "big", "most": None}, ExampleOptions(tier="big")),
    ],
)
def test_text_is_converted_to_the_type_of_its_field(
    values: dict[str, Any], options: ExampleOptions
) -> None:
    assert parse_options(ExampleOptions, values) == options


def test_all_invalid_options_are_reported_with_the_nearest_name() -> None:
    with pytest.raises(ConfigErrors) as raised:
        parse_options(ExampleOptions, {"queu": "x", "most": "many", "tier": "huge"})
    assert len(raised.value.errors) == 3
    for part in (
        "Did you mean 'queue'",
        "ExampleOptions(most='many')",
        "ExampleOptions(tier='huge')",
    ):
        assert part in str(raised.value)


def test_validation_of_the_options_class_applies() -> None:
    with pytest.raises(ConfigError, match="boot_s is below zero"):
        parse_options(ExampleOptions, {"boot_s": -1})


def test_non_default_options_round_trip() -> None:
    options = ExampleOptions(zones=("a",), boot_s=1.0)
    assert non_default_options(options) == {"zones": ("a",), "boot_s": 1.0}
    assert parse_options(ExampleOptions, non_default_options(options)) == options
    assert non_default_options(ExampleOptions()) == {}


def test_fields_below_their_minimums_are_reported_together_with_values_and_defaults() -> None:
    with pytest.raises(ConfigErrors) as raised:
        check_minimums(ExampleOptions(most=0), most=1, above_zero=["boot_s"], spot=2)
    assert [str(error) for error in raised.value.errors] == [
        "ExampleOptions(most=0) must be at least 1.\n  What to do: Use a value that is at least "
        "1, or omit most: the default is None.",
        "ExampleOptions(spot=True) must be at least 2.\n  What to do: Use a value that is at least "
        "2, or omit spot: the default is True.",
    ]


@pytest.mark.parametrize("boot_s", [0.0, float("nan")])
def test_a_field_that_is_not_above_zero_is_refused(boot_s: float) -> None:
    with pytest.raises(ConfigError, match=r"ExampleOptions\(boot_s=.*\) must be greater than 0"):
        check_minimums(ExampleOptions(boot_s=boot_s), above_zero=["boot_s"])


def test_an_unset_field_has_no_minimum() -> None:
    check_minimums(ExampleOptions(most=None), most=1)
