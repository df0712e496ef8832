"""`Estimate`: percentiles, the guarantee within deadline and budget, and the text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from spotfit.client.estimate import (
    Estimate,
    EstimateLimits,
    FeederEstimate,
    OfferEstimate,
    distribution,
    format_confirmation,
    format_usd,
)
from spotfit.model.offer import Market, Offer, Price

HOUR_S = 3600.0
NOW_MS = 1_700_000_000_000


def an_offer(market: Market = Market.SPOT, usd: float | None = 1.0, **fields: Any) -> OfferEstimate:
    price = None
    if usd is not None:
        as_of_s = NOW_MS / 1000 - 2 * HOUR_S
        price = Price(usd_per_hour=usd, source="EC2 spot price history", as_of_s=as_of_s)
    defaults = {"zone": "zone-a", "region": "east", "machine_type": "g5.xlarge"}
    offer = Offer(
        name=f"x/{market}", provisioner="x", market=market, price=price, **{**defaults, **fields}
    )
    return OfferEstimate(offer=offer, machines=2, expected_usd=usd, on_demand_usd=None)


def an_estimate(*, limits: dict[str, Any] | None = None, **fields: Any) -> Estimate:
    defaults: dict[str, Any] = {
        "workers": 8,
        "min_workers": 8,
        "earliest_deadline_s": 40.1 * HOUR_S,
        "worst_case_usd": 61.0,
        "costs_usd": (18.0, 23.0, 40.0),
        "finish_s": distribution([40 * HOUR_S, 50 * HOUR_S]),
        "deadline_share": 0.996,
        "offers": (an_offer(), an_offer(Market.ON_DEMAND, 3.0, zone="", options={"queue": "q"})),
        "recordings": ("zone-1", "zone-2"),
        "replays": 3,
        "unfinished_share": 0.0,
        "as_of_ms": NOW_MS,
    }
    given: dict[str, Any] = {
        "training_time_s": 40 * HOUR_S,
        "deadline_s": 60 * HOUR_S,
        "changeover_s": 600.0,
        "restart_s": 120.0,
        "uses_on_demand": True,
    }
    given |= limits or {}
    return Estimate(limits=EstimateLimits(**given), **{**defaults, **fields})


def test_percentiles_are_values_that_share_of_the_replays_does_not_exceed() -> None:
    shown = distribution([float(n) for n in range(100, 0, -1)])
    assert (shown.p5, shown.median, shown.p95, shown.highest) == (5, 50, 95, 100)
    assert shown.mean == 50.5
    single = distribution([7.0])
    assert {single.p5, single.median, single.p95, single.mean, single.highest} == {7.0}


def test_a_training_that_may_not_finish_has_no_finite_mean() -> None:
    shown = distribution([1.0, 2.0, math.inf])
    assert (shown.mean, shown.median) == (math.inf, 2.0)


@pytest.mark.parametrize(
    ("limits", "fields", "is_guaranteed"),
    [
        ({}, {}, True),
        ({"deadline_s": 40.1 * HOUR_S}, {}, True),
        ({"deadline_s": 40.0 * HOUR_S}, {}, False),
        ({"deadline_s": None}, {}, False),
        ({}, {"earliest_deadline_s": None}, False),
        ({"budget_usd": 61.0}, {}, True),
        ({"budget_usd": 60.9}, {}, False),
        ({"budget_usd": 99.0}, {"worst_case_usd": None}, False),
        ({}, {"worst_case_usd": None}, True),
        ({}, {"rejections": ("No.",)}, False),
    ],
)
def test_a_deadline_is_guaranteed_in_time_and_within_the_budget(
    limits: dict[str, Any], fields: dict[str, Any], is_guaranteed: bool
) -> None:
    assert an_estimate(limits=limits, **fields).is_guaranteed is is_guaranteed


@pytest.mark.parametrize(
    ("limits", "fields", "sentence"),
    [
        ({}, {}, "The deadline can be guaranteed: worst case $61.00, expected $27.00, $40.00 or "),
        ({"budget_usd": 40}, {}, "The deadline cannot be guaranteed for $40.00: worst case $61.00"),
        ({"deadline_s": HOUR_S}, {}, "The deadline in 60.0 min cannot be guaranteed: worst"),
        ({"fallback": "never"}, {"earliest_deadline_s": None}, 'with fallback="never": worst'),
        (
            {"fallback": "never"},
            {"earliest_deadline_s": None, "offers": (an_offer(Market.ON_DEMAND),)},
            'no spot machines. The deadline cannot be guaranteed with fallback="never": worst',
        ),
        ({}, {"rejections": ("No.",)}, "The deadline in 60.0 h cannot be guaranteed: worst"),
        (
            {},
            {"earliest_deadline_s": None},
            "offers of known price that can be rented: worst",
        ),
        (
            {"deadline_s": None, "uses_on_demand": False},
            {},
            "Without a deadline the run waits for spot machines: worst",
        ),
        ({"deadline_s": None}, {}, "on-demand machines are used while spot is refused: worst"),
        ({}, {"offers": (an_offer(Market.ON_DEMAND),)}, "The run rents no spot machines. The"),
        ({}, {"costs_usd": ()}, "The deadline can be guaranteed: the cost is unknown."),
    ],
)
def test_the_guarantee_is_stated_with_its_cost(
    limits: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    assert sentence in str(an_estimate(limits=limits, **fields))


def test_the_reasons_for_which_fit_rejects_the_limits_replace_the_share_of_the_budget() -> None:
    shown = str(an_estimate(limits={"budget_usd": 99.0}, rejections=("One.", "Two."))).split("\n")
    assert "fit() rejects these limits: One." in shown
    assert "fit() rejects these limits: Two." in shown
    assert not any("suffices" in line for line in shown)
    assert "fit() rejects" not in str(an_estimate())


def test_an_offer_that_cannot_be_rented_is_in_the_table_for_comparison() -> None:
    twin = replace(an_offer(Market.ON_DEMAND, 3.0), is_rentable=False, on_demand_usd=9.0)
    rows = [one for one in str(an_estimate(offers=(an_offer(), twin))).split("\n") if "g5." in one]
    assert rows[1].split()[-2:] == ["-", "$9.00"]


def test_spot_offers_for_comparison_only_are_not_rented() -> None:
    spot = replace(an_offer(), is_rentable=False)
    shown = str(an_estimate(offers=(spot, an_offer(Market.ON_DEMAND))))
    assert "The run rents no spot machines" in shown
    assert "recorded markets of other machines" not in shown


def test_shares_are_not_rounded_up_to_certainty() -> None:
    text = str(an_estimate(limits={"budget_usd": 25.0}))
    assert "The deadline is kept in 99 % of the replays." in text
    assert "The budget of $25.00 suffices in 66 % of the replays." in text


def test_replays_that_do_not_finish_are_counted() -> None:
    costs = (1.0, 2.0, math.inf)
    text = str(an_estimate(costs_usd=costs, unfinished_share=1 / 3))
    assert "33 % of the replays are not finished in ten times the training time." in text
    assert "expected unlimited" in text
    assert "not finished" not in str(an_estimate())


def test_the_earliest_deadline_is_rounded_up() -> None:
    assert "is in 40.2 h, if on-demand" in str(an_estimate(earliest_deadline_s=40.11 * HOUR_S))
    assert "is in 61.0 min, if on-demand" in str(an_estimate(earliest_deadline_s=3601.0))


def test_the_table_has_place_price_source_and_age_of_every_offer() -> None:
    rows = [line.split() for line in str(an_estimate()).splitlines() if "g5.xlarge" in line]
    source = ["EC2", "spot", "price", "history,", "2.0", "h", "ago"]
    assert rows == [
        ["spot", "zone-a", "2", "g5.xlarge", "$1.00", *source, "$1.00", "unknown"],
        ["on_demand", "east", "q", "2", "g5.xlarge", "$3.00", *source, "$3.00", "unknown"],
    ]
    unknown = str(an_estimate(offers=(an_offer(usd=None),)))
    assert ["unknown", "-", "unknown", "unknown"] in [
        line.split()[4:] for line in unknown.splitlines() if "g5.xlarge" in line
    ]


def test_a_new_price_has_no_age() -> None:
    offer = Offer(
        name="x",
        provisioner="x",
        market=Market.SPOT,
        price=Price(usd_per_hour=1.0, source="given", as_of_s=NOW_MS / 1000),
    )
    one = OfferEstimate(offer=offer, machines=1, expected_usd=1.0, on_demand_usd=None)
    assert "given   $1.00" in str(an_estimate(offers=(one,)))


def test_the_histogram_counts_every_finite_cost() -> None:
    text = str(an_estimate(costs_usd=(10.0, 11.0, 90.0, math.inf), replays=4))
    bars = [line.split() for line in text.splitlines() if " to $" in line]
    assert len(bars) == 8
    assert [bar[-1] for bar in bars] == ["2", "0", "0", "0", "0", "0", "0", "1"]
    assert len(bars[0][3]) == 2 * len(bars[-1][3]), "bars are proportional to the counts"


@pytest.mark.parametrize("costs", [(), (5.0, 5.001), (math.inf,)])
def test_equal_or_unknown_costs_have_no_histogram(costs: tuple[float, ...]) -> None:
    assert "replays:" not in str(an_estimate(costs_usd=costs))


def test_the_recordings_are_named_where_spot_machines_are_used() -> None:
    sentence = "2 recorded markets of other machines, prices those listed above: zone-1, zone-2."
    assert sentence in str(an_estimate())
    assert sentence not in str(an_estimate(offers=(an_offer(Market.ON_DEMAND),)))


def test_the_confirmation_has_three_lines() -> None:
    assert format_confirmation(an_estimate()) == [
        "8 workers, 40.0 h of training, deadline in 60.0 h",
        "Cost: worst case $61.00, expected $27.00, $40.00 or less in 95 % of the replays.",
        "The deadline can be guaranteed.",
    ]


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0.324, "$0.32"), (999.99, "$999.99"), (12345.6, "$12,346"), (None, "unknown")],
)
def test_amounts_have_cents_below_a_thousand_dollars(usd: float | None, text: str) -> None:
    assert format_usd(usd) == text


@pytest.mark.parametrize(
    ("machines", "usd", "text"),
    [
        (
            (1, 4),
            0.25,
            "Feeders: 1 to 4 machines at $0.25 per hour, in the cost with $2.50 (expected) and "
            "$10.17 (worst case).",
        ),
        ((2, 2), None, "Feeders: 2 machines, whose price is unknown."),
    ],
)
def test_feeders_are_shown_with_their_share_of_the_cost(
    machines: tuple[int, int], usd: float | None, text: str
) -> None:
    feeders = FeederEstimate(
        min_machines=machines[0],
        max_machines=machines[1],
        usd_per_hour=usd,
        expected_usd=2.5,
        highest_usd=10.17,
    )
    assert text in str(an_estimate(feeders=feeders)).split("\n")
    assert "Feeders" not in str(an_estimate())
