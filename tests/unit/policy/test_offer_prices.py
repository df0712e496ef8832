"""Prices in force, and their changes."""

from __future__ import annotations

from spotfit.model.events import PricesChanged
from spotfit.model.spec import FeederSpec
from spotfit.policy.offer_prices import current_offers, price_changes
from tests.unit.policy.offered_run import ON_DEMAND, SPOT, OfferedRun, an_offer

RAISED = an_offer("spot", 2.0)


def usd(run: OfferedRun) -> dict[str, float | None]:
    return {
        one.name: one.price.usd_per_hour if one.price is not None else None
        for one in current_offers(run.view)
    }


def test_prices_of_the_spec_are_in_force_until_others_are_recorded() -> None:
    run = OfferedRun()
    assert usd(run) == {"spot": 1.0, "on-demand": 4.0}
    run.add(1, PricesChanged(offers=(RAISED,)))
    assert usd(run) == {"spot": 2.0, "on-demand": 4.0}


def test_only_changed_prices_are_recorded() -> None:
    run = OfferedRun()
    state = run.state(1, listed_offers=(RAISED, ON_DEMAND))
    assert price_changes(run.view, state) == PricesChanged(offers=(RAISED,))


def test_equal_prices_are_not_recorded_again() -> None:
    run = OfferedRun()
    assert price_changes(run.view, run.state(1, listed_offers=(SPOT, ON_DEMAND))) is None
    assert price_changes(run.view, run.state(1)) is None


def test_changes_are_those_since_the_last_record() -> None:
    run = OfferedRun()
    run.add(1, PricesChanged(offers=(RAISED,)))
    assert price_changes(run.view, run.state(2, listed_offers=(RAISED,))) is None
    back = price_changes(run.view, run.state(2, listed_offers=(SPOT,)))
    assert back == PricesChanged(offers=(SPOT,))


def test_a_price_that_could_not_be_read_is_unchanged() -> None:
    run = OfferedRun()
    assert price_changes(run.view, run.state(1, listed_offers=(an_offer("spot", None),))) is None


def test_a_price_that_was_unknown_is_recorded() -> None:
    run = OfferedRun(an_offer("spot", None), ON_DEMAND)
    changed = price_changes(run.view, run.state(1, listed_offers=(RAISED,)))
    assert changed == PricesChanged(offers=(RAISED,))


def test_offers_that_the_run_may_not_rent_are_ignored() -> None:
    run = OfferedRun()
    assert price_changes(run.view, run.state(1, listed_offers=(an_offer("new", 1.0),))) is None


def test_offers_of_feeders_have_prices_that_change() -> None:
    cpu = an_offer("cpu#feeders", 0.1)
    run = OfferedRun(feeders=FeederSpec(max_nodes=1, offers=(cpu,)))
    assert usd(run) == {"spot": 1.0, "on-demand": 4.0, "cpu#feeders": 0.1}
    dearer = an_offer("cpu#feeders", 0.2)
    changed = price_changes(run.view, run.state(1, listed_offers=(SPOT, dearer)))
    assert changed == PricesChanged(offers=(dearer,))
