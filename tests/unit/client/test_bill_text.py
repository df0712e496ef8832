"""A cost is shown with its maximum; an unknown price never as 0, and no amount looks like 0."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.client.bill_text import (
    format_bill,
    format_cost,
    format_machine_hours,
    format_offer_price,
    format_price_range,
    format_short_cost,
    is_bill_shown,
    list_offer_lines,
)
from spotfit.model.bill import Bill
from spotfit.model.offer import Market, Offer, Price
from tests.unit.client.bills import LOCAL, ON_DEMAND, SPOT, UNPRICED, a_bill


def test_the_bill_is_one_line() -> None:
    bill = a_bill(boot_s=2621.0, repeated_s=655.0, idle_s=1310.0)
    assert format_bill(bill) == (
        "$12.40 (at most $12.55); on demand $41.10, saved 70 %; 18.2 machine-hours; "
        "boot 4 %, repeated 1 %, idle 2 %"
    )


def test_a_bill_that_may_grow_is_marked() -> None:
    assert format_cost(a_bill(is_final=False)) == "$12.40 (at most $12.55) so far"


def test_a_maximum_that_equals_the_certain_cost_is_omitted() -> None:
    assert format_cost(a_bill(replace(SPOT, max_usd=4.1504))) == "$4.15"


def test_machines_that_were_only_rented_on_demand_are_not_compared() -> None:
    assert format_bill(a_bill(ON_DEMAND)) == "$8.25; 2.0 machine-hours"


def test_spot_machines_that_were_dearer_saved_nothing() -> None:
    assert "; on demand $2.00, which is cheaper; " in format_bill(
        a_bill(replace(SPOT, on_demand_usd=2.0))
    )


def test_an_unknown_price_is_no_amount() -> None:
    bill = a_bill(UNPRICED, boot_s=1800.0)
    assert (
        format_bill(bill) == "5.0 machine-hours of unknown price (slurm/h100/on_demand); boot 10 %"
    )
    assert "$" not in format_bill(bill)
    assert list_offer_lines(bill) == ["slurm/h100/on_demand: 5.0 machine-hours, price unknown"]


def test_the_maximum_of_an_unknown_cost_is_not_that_of_the_known_one() -> None:
    bounded = replace(UNPRICED, max_usd=99.0)
    assert format_cost(a_bill(SPOT, bounded)).startswith("$4.15 (at most $4.30) and 5.0 machine-")


def test_machines_whose_offer_is_unknown_are_in_the_bill() -> None:
    assert format_bill(a_bill(LOCAL)) == "1 machine-minute of unknown price (unknown offer)"


def test_known_and_unknown_prices_are_separate() -> None:
    assert format_bill(a_bill(SPOT, UNPRICED)) == (
        "$4.15 (at most $4.30) and 5.0 machine-hours of unknown price (slurm/h100/on_demand); "
        "21.2 machine-hours"
    )


def test_each_offer_has_a_line() -> None:
    assert list_offer_lines(a_bill(is_final=False)) == [
        "aws_batch/us-east-1/q/spot: 16.2 machine-hours, $4.15 (at most $4.30); on demand $32.85",
        "aws_batch/us-east-1/on_demand: 2.0 machine-hours, $8.25",
    ]


def test_without_machines_there_is_no_text() -> None:
    assert format_bill(Bill()) == ""
    assert not is_bill_shown(Bill(), "aws_batch")


def test_machines_of_this_computer_are_shown_only_with_a_price() -> None:
    assert not is_bill_shown(a_bill(LOCAL), "local")
    assert is_bill_shown(a_bill(LOCAL), "slurm")
    assert is_bill_shown(a_bill(replace(LOCAL, usd=0.01, max_usd=0.01)), "local")


def test_a_machine_whose_start_is_uncertain_has_a_maximum() -> None:
    started = replace(SPOT, machine_s=0.0, usd=0.0, max_machine_s=40.0, max_usd=0.003)
    assert format_cost(a_bill(started)) == "at most $0.003"
    assert format_short_cost(a_bill(started)) == "<$0.003"
    assert "; at most 40 machine-seconds" in format_bill(a_bill(started))
    assert is_bill_shown(a_bill(started), "aws_batch")


def test_a_price_of_0_is_shown_as_0() -> None:
    free = replace(ON_DEMAND, usd=0.0, max_usd=0.0, on_demand_usd=0.0)
    assert format_bill(a_bill(free)) == "$0; 2.0 machine-hours"
    assert format_short_cost(a_bill(free)) == "$0"


@pytest.mark.parametrize(
    ("machine_s", "text"),
    [
        (12.4, "12 machine-seconds"),
        (60.0, "1 machine-minute"),
        (3540.0, "59 machine-minutes"),
        (3600.0, "1.0 machine-hours"),
        (4.5e6, "1,250.0 machine-hours"),
    ],
)
def test_short_machine_times_do_not_look_like_zero(machine_s: float, text: str) -> None:
    assert format_machine_hours(machine_s, 5e6) == text


def an_offer(market: Market, usd_per_hour: float | None) -> Offer:
    price = usd_per_hour and Price(usd_per_hour=usd_per_hour, source="given", as_of_s=0.0)
    return Offer(name=f"a/{market.value}", provisioner="a", market=market, price=price or None)


def test_prices_of_offers_are_a_range_for_each_market() -> None:
    spot = [an_offer(Market.SPOT, usd) for usd in (3.2, None, 2.1)]
    assert format_price_range(spot) == "spot $2.10 to $3.20 an hour"
    both = [*spot, an_offer(Market.ON_DEMAND, 12.24)]
    assert format_price_range(both) == "spot $2.10 to $3.20 an hour, on demand $12.24 an hour"
    assert format_price_range([an_offer(Market.SPOT, None)]) == ""


def test_an_offer_is_shown_with_its_price() -> None:
    assert format_offer_price(an_offer(Market.SPOT, 0.004)) == "a/spot, $0.004 an hour"
    assert format_offer_price(an_offer(Market.SPOT, None)) == "a/spot, price unknown"
