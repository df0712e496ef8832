"""Options of a backend, as text or as data: what cannot be meant is told, all of it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.provision.profile import check_minimums, non_default_options, parse_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    provisioner: ClassVar[str] = "rented"

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
    ("given", "options"),
    [
        ({}, Rented()),
        ({"queue": "7"}, Rented(queue="7")),
        ({"zones": "a, b,"}, Rented(zones=("a", "b"))),
        ({"zones": ["a"], "most": "3"}, Rented(zones=("a",), most=3)),
        ({"boot_s": "1.5", "spot": "false"}, Rented(boot_s=1.5, spot=False)),
        ({"labels": '{"team": "nlp"}'}, Rented(labels={"team": "nlp"})),
        ({"tier": "big", "most": None}, Rented(tier="big")),
    ],
)
def test_words_become_what_their_fields_hold(given: dict[str, Any], options: Rented) -> None:
    assert parse_options(Rented, given) == options


def test_every_mistake_is_told_at_once_and_the_nearest_name_with_it() -> None:
    with pytest.raises(ConfigErrors) as told:
        parse_options(Rented, {"queu": "x", "most": "many", "tier": "huge"})
    assert len(told.value.errors) == 3
    for part in ("Did you mean 'queue'", "Rented(most='many')", "Rented(tier='huge')"):
        assert part in str(told.value)


def test_what_the_options_themselves_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="boot_s is below zero"):
        parse_options(Rented, {"boot_s": -1})


def test_only_what_differs_from_the_defaults_is_kept_and_reads_back() -> None:
    options = Rented(zones=("a",), boot_s=1.0)
    assert non_default_options(options) == {"zones": ("a",), "boot_s": 1.0}
    assert parse_options(Rented, non_default_options(options)) == options
    assert non_default_options(Rented()) == {}


def test_fields_below_their_minimums_are_reported_together_with_values_and_defaults() -> None:
    with pytest.raises(ConfigErrors) as failed:
        check_minimums(Rented(most=0), most=1, above_zero=["boot_s"], spot=2)
    assert [str(error) for error in failed.value.errors] == [
        "Rented(most=0) must be at least 1.\n  What to do: Use a value that is at least 1, or "
        "omit most: the default is None.",
        "Rented(spot=True) must be at least 2.\n  What to do: Use a value that is at least 2, or "
        "omit spot: the default is True.",
    ]


@pytest.mark.parametrize("boot_s", [0.0, float("nan")])
def test_a_field_that_is_not_above_zero_is_refused(boot_s: float) -> None:
    with pytest.raises(ConfigError, match=r"Rented\(boot_s=.*\) must be greater than 0"):
        check_minimums(Rented(boot_s=boot_s), above_zero=["boot_s"])


def test_an_unset_field_has_no_minimum() -> None:
    check_minimums(Rented(most=None), most=1)
