"""Cadence: what `every` may be, and what is kept of how groups ended."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors, ConfigTypeError
from spotfit.model.cadence import (
    BRACKETS_S,
    MAX_OVERHEAD,
    Cadence,
    Costs,
    Endings,
    bracket,
    parse_cadence,
)


@pytest.mark.parametrize(
    ("every", "meant"),
    [
        ("auto", Cadence(auto=True)),
        (" Auto ", Cadence(auto=True)),
        ("10m", Cadence(every_s=600.0)),
        ("1.5 h", Cadence(every_s=5400.0)),
        (500, Cadence(every_steps=500)),
        ("500 steps", Cadence(every_steps=500)),
        ("1 step", Cadence(every_steps=1)),
        ("epoch", Cadence(epochs=True)),
        ("at_notice", Cadence()),
        (["auto", "epoch"], Cadence(auto=True, epochs=True)),
        (("10m", 500, "epoch"), Cadence(every_s=600.0, every_steps=500, epochs=True)),
    ],
)
def test_what_every_may_be(every: Any, meant: Cadence) -> None:
    assert parse_cadence(every) == meant


def test_the_overhead_is_3_and_a_half_per_cent_unless_the_user_says_otherwise() -> None:
    assert parse_cadence("auto").max_overhead == MAX_OVERHEAD == 0.035
    assert parse_cadence("auto", max_overhead=0.1).max_overhead == 0.1


@pytest.mark.parametrize(
    ("every", "told"),
    [
        ("auot", "Did you mean 'auto'"),
        ("10 parsecs", "no duration"),
        ("0s", "no time at all"),
        ("500", "without quotes for steps"),
        (0, "never"),
        (-3, "never"),
        ([], "empty"),
        ("", "says no time"),
        ("-5m", "says no time"),
        (["auto", "10m"], "by itself"),
        (["10m", "5m"], "a time twice"),
    ],
)
def test_what_it_may_not_be_is_told_with_the_remedy(every: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        parse_cadence(every)
    assert error.value.do


@pytest.mark.parametrize("every", [None, 2.5, True, {"steps": 5}])
def test_what_is_neither_steps_nor_text_is_of_the_wrong_kind(every: Any) -> None:
    with pytest.raises(ConfigTypeError, match="neither"):
        parse_cadence(every)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan"), "3%", True])
def test_an_overhead_is_a_share(share: Any) -> None:
    with pytest.raises(ConfigError, match="share between 0 and 1"):
        parse_cadence("auto", max_overhead=share)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigErrors) as errors:
        parse_cadence(["auot", 0, "7"], max_overhead=3.5)
    assert len(errors.value.errors) == 4


def test_a_save_costs_its_stall_and_what_steps_lose_meanwhile() -> None:
    assert Costs(stall_s=0.5, slowdown=0.3, commit_s=20.0).each_s == 6.5


def test_ages_are_told_apart_at_the_brackets_edges() -> None:
    assert [bracket(edge) for edge in (0.0, *BRACKETS_S)] == [0, 1, 2, 3, 4]
    assert bracket(599.9) == 0


def test_a_life_was_watched_in_every_bracket_it_passed() -> None:
    endings = Endings().with_end(2000.0, saved=False)
    assert endings.lived_s == (600.0, 1200.0, 200.0, 0.0, 0.0)
    assert endings.ended == (0, 0, 1, 0, 0)
    assert (endings.all_ended, endings.announced) == (1, 0)


def test_a_group_that_goes_on_was_watched_and_has_not_ended() -> None:
    endings = Endings().with_end(60.0, saved=True).watched(40.0)
    assert endings.lived_s[0] == 100.0
    assert (endings.all_ended, endings.announced) == (1, 1)
