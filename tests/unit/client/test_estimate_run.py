"""Estimates from listed prices and replays: arithmetic, inputs, unknown prices, confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from spotfit.client import cost_plan
from spotfit.client.cost_limits import OfferPlan
from spotfit.client.estimate import Estimate, EstimateLimits
from spotfit.client.estimate_run import (
    ASSUMED_RESTART_S,
    compute_estimate,
    confirm_cost,
    estimate_limits,
    estimate_request,
)
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError, RunCancelledError
from spotfit.host import plugins
from spotfit.model.config import ScalingConfig
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.replay import ReplayedGroup, ReplayedJob, ReplayOutcome
from spotfit.model.spec import FeederSpec, RunTiming
from spotfit.provision.api import Traits
from spotfit.provision.offers import OfferListing
from tests.unit.client.harness import ClientHarness
from tests.unit.control.fake_provisioner import FakeProvisioner

HOUR_S = 3600.0
MACHINE_HOURS = 2 * (10 + 1 / 6)


class RecordingMarkets:
    """Markets whose spot machines are always available, or never with a deadline."""

    names = ("zone-1",)
    remarks = ("other.json is not used.",)

    def __init__(self, *, has_spot: bool = True) -> None:
        self.has_spot = has_spot
        self.jobs: list[ReplayedJob] = []

    def replay(self, job: ReplayedJob, *, max_decisions: int) -> Sequence[ReplayOutcome]:
        assert max_decisions > 0
        self.jobs.append(job)
        markets = {offer.market for offer in job.offers}
        market = Market.SPOT if self.has_spot and Market.SPOT in markets else Market.ON_DEMAND
        usd = min(one.usd_per_hour for one in job.offers if one.market is market)
        finish_s = job.work_s + job.changeover_s
        is_late = job.deadline_s is not None and finish_s > job.deadline_s
        return [
            ReplayOutcome(
                recording="zone-1",
                usd=usd * finish_s / HOUR_S,
                finish_s=finish_s,
                is_late=is_late,
            )
        ]


def an_offer(market: Market, usd: float | None, zone: str = "", **fields: Any) -> Offer:
    price = None if usd is None else Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    return Offer(
        name=f"{zone}{market}", provisioner="x", market=market, zone=zone, price=price, **fields
    )


SPOT = an_offer(Market.SPOT, 1.0, "a")
ON_DEMAND = an_offer(Market.ON_DEMAND, 3.0)


def estimate(
    *offers: Offer,
    markets: RecordingMarkets | None = None,
    workers: tuple[int, int] = (2, 2),
    feeders: FeederSpec | None = None,
    **limits: Any,
) -> Estimate:
    given: dict[str, Any] = {
        "training_time_s": 10 * HOUR_S,
        "changeover_s": 600.0,
        "restart_s": 60.0,
        "uses_on_demand": "deadline_s" in limits,
    }
    plans = [OfferPlan(offer, 2) for offer in offers]
    return compute_estimate(
        plans,
        EstimateLimits(**given | limits),
        markets or RecordingMarkets(),
        min_workers=workers[0],
        max_workers=workers[1],
        feeders=feeders,
    )


def test_a_constant_market_costs_what_its_machines_cost() -> None:
    found = estimate(SPOT, ON_DEMAND, deadline_s=20 * HOUR_S)
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(1.0 * MACHINE_HOURS)
    assert found.finish_s.mean == pytest.approx(10 * HOUR_S + 600)
    assert found.worst_case_usd == pytest.approx(3.0 * MACHINE_HOURS)
    assert found.earliest_deadline_s == pytest.approx(10 * HOUR_S + 600)
    assert (found.is_guaranteed, found.deadline_share) == (True, 1.0)
    assert found.remarks == ("other.json is not used.",)


FEEDERS = FeederSpec(min_nodes=1, max_nodes=4, usd_per_hour=0.25)


def test_feeders_are_part_of_the_cost() -> None:
    found = estimate(SPOT, ON_DEMAND, deadline_s=20 * HOUR_S, feeders=FEEDERS, budget_usd=65.0)
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(1.0 * MACHINE_HOURS + 0.25 * 10)
    highest_usd = 4 * 0.25 * (10 + 1 / 6)
    assert found.worst_case_usd == pytest.approx(3.0 * MACHINE_HOURS + highest_usd)
    assert not found.is_guaranteed, "the workers alone cost less than the budget"
    assert found.feeders is not None
    assert (found.feeders.min_machines, found.feeders.max_machines) == (1, 4)
    assert found.feeders.expected_usd == pytest.approx(2.5)
    assert found.feeders.highest_usd == pytest.approx(highest_usd)
    assert found.offers[0].expected_usd == pytest.approx(1.0 * MACHINE_HOURS)


def test_an_unknown_price_of_feeders_makes_the_cost_with_them_unknown() -> None:
    unpriced = FeederSpec(min_nodes=0, max_nodes=4)
    found = estimate(SPOT, feeders=unpriced)
    assert found.worst_case_usd is None
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(1.0 * MACHINE_HOURS)
    assert estimate(SPOT, feeders=FeederSpec(min_nodes=1, max_nodes=4)).usd is None


def test_a_run_without_machines_for_feeders_has_no_estimate_of_them() -> None:
    assert estimate(SPOT, feeders=FeederSpec(processes_per_worker=4)).feeders is None


def test_without_a_deadline_only_spot_machines_are_replayed() -> None:
    found = estimate(SPOT, ON_DEMAND)
    assert found.worst_case_usd == pytest.approx(1.0 * MACHINE_HOURS)
    assert (found.is_guaranteed, found.deadline_share) == (False, None)
    assert found.earliest_deadline_s is not None


def test_without_fallback_no_deadline_is_guaranteed() -> None:
    found = estimate(
        SPOT, ON_DEMAND, deadline_s=20 * HOUR_S, uses_on_demand=False, fallback="never"
    )
    assert (found.earliest_deadline_s, found.is_guaranteed) == (None, False)
    assert found.worst_case_usd == pytest.approx(1.0 * MACHINE_HOURS)


def test_on_demand_machines_may_be_used_without_a_deadline() -> None:
    markets = RecordingMarkets()
    found = estimate(SPOT, ON_DEMAND, markets=markets, uses_on_demand=True)
    assert found.worst_case_usd == pytest.approx(3.0 * MACHINE_HOURS)
    assert [one.market for one in markets.jobs[0].offers] == [Market.SPOT, Market.ON_DEMAND]


def test_elastic_groups_are_replayed_as_such() -> None:
    markets = RecordingMarkets()
    estimate(SPOT, ON_DEMAND, markets=markets, workers=(0, 4), deadline_s=20 * HOUR_S)
    loss_s = RunTiming().lease_timeout_s + 60.0
    group = ReplayedGroup(min_workers=1, max_workers=4, loss_pause_s=loss_s, growth_pause_s=60.0)
    assert {job.group for job in markets.jobs} == {group}


def test_offers_need_different_numbers_of_machines() -> None:
    markets = RecordingMarkets()
    limits = EstimateLimits(
        training_time_s=10 * HOUR_S, changeover_s=600.0, restart_s=60.0, uses_on_demand=False
    )
    big = an_offer(Market.SPOT, 1.5, "big")
    plans = [OfferPlan(SPOT, 4), OfferPlan(big, 2)]
    found = compute_estimate(plans, limits, markets, min_workers=4, max_workers=4)
    replayed = [(one.machines, one.usd_per_hour) for one in markets.jobs[0].offers]
    assert replayed == [(4, 4.0), (2, 3.0)]
    assert [one.machines for one in found.offers] == [4, 2]
    assert [one.expected_usd for one in found.offers] == [
        pytest.approx(usd * (10 + 1 / 6)) for usd in (4.0, 3.0)
    ]


def test_on_demand_machines_alone_need_no_deadline() -> None:
    found = estimate(ON_DEMAND, an_offer(Market.ON_DEMAND, 2.0))
    assert found.worst_case_usd == pytest.approx(2.0 * MACHINE_HOURS)


def test_a_replay_may_cost_more_than_on_demand_machines_all_the_time() -> None:
    class DearMarkets(RecordingMarkets):
        def replay(self, job: ReplayedJob, *, max_decisions: int) -> Sequence[ReplayOutcome]:
            return [ReplayOutcome(recording="a", usd=1e3, finish_s=1.0, is_late=False)]

    found = estimate(
        SPOT, ON_DEMAND, markets=DearMarkets(), deadline_s=20 * HOUR_S, budget_usd=999.0
    )
    assert (found.worst_case_usd, found.is_guaranteed, found.budget_share) == (1e3, False, 0.0)


def test_each_offer_is_also_replayed_alone() -> None:
    dear = an_offer(Market.SPOT, 2.0, "b", region="west", machine_type="big")
    twin = an_offer(Market.ON_DEMAND, 5.0, region="west", machine_type="big")
    found = estimate(SPOT, dear, ON_DEMAND, twin, deadline_s=20 * HOUR_S)
    assert [one.expected_usd for one in found.offers] == [
        pytest.approx(usd * MACHINE_HOURS) for usd in (1.0, 2.0, 3.0, 5.0)
    ]
    assert [one.on_demand_usd for one in found.offers] == [
        pytest.approx(usd * MACHINE_HOURS) for usd in (3.0, 5.0, 3.0, 5.0)
    ]


def test_an_offer_alone_falls_back_to_the_cheapest_on_demand_offer() -> None:
    twin = an_offer(Market.ON_DEMAND, 5.0)
    markets = RecordingMarkets(has_spot=False)
    found = estimate(SPOT, twin, ON_DEMAND, markets=markets, deadline_s=20 * HOUR_S)
    assert found.offers[0].expected_usd == pytest.approx(3.0 * MACHINE_HOURS)


def test_offers_without_a_price_are_not_used_beside_others() -> None:
    unknown = an_offer(Market.SPOT, None, "b")
    found = estimate(SPOT, unknown, ON_DEMAND, deadline_s=20 * HOUR_S)
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(1.0 * MACHINE_HOURS)
    assert found.offers[1].expected_usd is None
    assert found.remarks[-1] == "Offers whose price is unknown are not used: bspot."


@pytest.mark.parametrize("spot", [1.0, None])
def test_unknown_prices_make_the_cost_unknown_but_not_the_times(spot: float | None) -> None:
    offers = an_offer(Market.SPOT, spot), an_offer(Market.ON_DEMAND, None)
    markets = RecordingMarkets()
    found = estimate(*offers, markets=markets, deadline_s=20 * HOUR_S)
    assert (found.usd, found.worst_case_usd) == (None, None)
    assert found.offers[0].expected_usd is None
    assert (found.earliest_deadline_s, found.is_guaranteed) == (None, False)
    assert found.finish_s.mean == pytest.approx(10 * HOUR_S + 600)
    assert "The cost is unknown" in found.remarks[-1]
    replayed = [one.usd_per_hour for one in markets.jobs[0].offers]
    assert replayed[1] == 3 * replayed[0]


def test_a_run_with_fallback_does_not_use_spot_offers_without_a_price() -> None:
    markets = RecordingMarkets()
    found = estimate(
        an_offer(Market.SPOT, None), ON_DEMAND, markets=markets, deadline_s=20 * HOUR_S
    )
    assert [one.market for one in markets.jobs[0].offers] == [Market.ON_DEMAND]
    assert found.worst_case_usd == pytest.approx(3.0 * MACHINE_HOURS)
    assert found.is_guaranteed


def test_other_offers_are_compared_but_neither_rented_nor_a_guarantee() -> None:
    markets = RecordingMarkets()
    limits = EstimateLimits(
        training_time_s=10 * HOUR_S,
        deadline_s=20 * HOUR_S,
        changeover_s=600.0,
        restart_s=60.0,
        uses_on_demand=True,
    )
    found = compute_estimate(
        [OfferPlan(SPOT, 2)],
        limits,
        markets,
        min_workers=2,
        max_workers=2,
        others=[OfferPlan(ON_DEMAND, 2)],
    )
    assert {one.market for job in markets.jobs for one in job.offers} == {Market.SPOT}
    assert (found.earliest_deadline_s, found.is_guaranteed) == (None, False)
    assert found.worst_case_usd == pytest.approx(1.0 * MACHINE_HOURS)
    spot, other = found.offers
    assert (spot.is_rentable, other.is_rentable, other.expected_usd) == (True, False, None)
    assert spot.on_demand_usd == other.on_demand_usd == pytest.approx(3.0 * MACHINE_HOURS)


# --- Inputs ---------------------------------------------------------------------------------------


TRAITS = Traits()


def test_limits_are_those_of_the_run() -> None:
    run = RunConfig(training_time_s="40h", deadline="60h", budget_usd=5, fallback="never")
    assert estimate_limits(run, TRAITS) == EstimateLimits(
        training_time_s=40 * HOUR_S,
        deadline_s=60 * HOUR_S,
        budget_usd=5.0,
        changeover_s=TRAITS.start_time_s + 60,
        restart_s=ASSUMED_RESTART_S,
        uses_on_demand=False,
        fallback="never",
    )


@pytest.mark.parametrize("changeover", [300, "5m", timedelta(minutes=5)])
def test_the_changeover_time_can_be_given(changeover: Any) -> None:
    run = RunConfig(training_time_s="40h")
    assert estimate_limits(run, TRAITS, changeover).changeover_s == 300.0


@pytest.mark.parametrize("changeover", ["soon", 0, timedelta(0), float("inf")])
def test_an_invalid_changeover_time_is_refused(changeover: Any) -> None:
    with pytest.raises(ConfigError, match="changeover="):
        estimate_limits(RunConfig(training_time_s="40h"), TRAITS, changeover)


def test_the_duration_of_a_restart_can_be_given() -> None:
    run = RunConfig(training_time_s="40h")
    assert estimate_limits(run, TRAITS, restart="30s").restart_s == 30.0
    with pytest.raises(ConfigError, match="restart='0s' must be greater than 0"):
        estimate_limits(run, TRAITS, restart="0s")


def test_a_missing_training_time_is_an_error() -> None:
    with pytest.raises(ConfigError, match="The training time is unknown"):
        estimate_limits(RunConfig(deadline="3h"), TRAITS)


@pytest.fixture
def markets(monkeypatch: pytest.MonkeyPatch) -> RecordingMarkets:
    """The markets that the entry point returns for any folder."""
    found = RecordingMarkets()
    monkeypatch.setattr(plugins, "load", lambda _group, _name: lambda _folder: found)
    listing = OfferListing((SPOT, ON_DEMAND), ("A remark.",))
    monkeypatch.setattr(cost_plan, "query_offers", lambda _provisioner, _request: listing)
    return found


def test_the_machines_are_those_that_the_backend_plans(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, markets: RecordingMarkets
) -> None:
    harness = ClientHarness(tmp_path, monkeypatch)
    request = harness.request(scaling=ScalingConfig(num_workers=(2, 4)))
    found = estimate_request(request, {"training_time_s": "10h", "deadline": None})
    assert (found.min_workers, found.workers, found.offers[0].machines) == (2, 4, 4)
    assert markets.jobs[0].offers[0].machines == 4
    assert str(found).startswith("2 to 4 workers, 10.0 h of training")
    assert found.remarks[0] == "A remark."
    assert found.remarks[-1].startswith("Machines that leave or join the elastic group interrupt")
    assert not harness.cloud.submitted_tokens


class SpotOnlyCloud(FakeProvisioner):
    """A cloud that lists on-demand machines for comparison."""

    def plan(self, request: GroupRequest) -> GroupPlan:
        if request.offer is not None and request.offer.market is not Market.SPOT:
            raise ConfigError("On-demand machines cannot be rented.", do="Rent spot machines.")
        return super().plan(request)


def test_offers_that_cannot_be_rented_are_left_out_and_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, markets: RecordingMarkets
) -> None:
    harness = ClientHarness(tmp_path, monkeypatch)
    harness.cloud = SpotOnlyCloud()
    found = estimate_request(harness.request(), {"training_time_s": "10h", "deadline": "20h"})
    assert [one.market for one in markets.jobs[0].offers] == [Market.SPOT]
    assert [(one.machines, one.is_rentable) for one in found.offers] == [(2, True), (2, False)]
    assert "On-demand machines cannot be rented." in found.remarks
    (reason,) = found.rejections
    assert "needs the price of on-demand machines, to which the run falls back" in reason
    assert not found.is_guaranteed


def test_a_backend_without_rentable_offers_is_an_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, markets: RecordingMarkets
) -> None:
    harness = ClientHarness(tmp_path, monkeypatch)
    harness.cloud = SpotOnlyCloud()
    listing = OfferListing((ON_DEMAND,))
    monkeypatch.setattr(cost_plan, "query_offers", lambda _provisioner, _request: listing)
    with pytest.raises(ConfigError, match=r"no offers .* On-demand machines cannot be rented\."):
        estimate_request(harness.request(), {"training_time_s": "10h"})
    assert not markets.jobs


@pytest.mark.parametrize(
    ("settings", "used"),
    [({}, [Market.ON_DEMAND]), ({"deadline": "20h"}, [Market.SPOT, Market.ON_DEMAND])],
)
def test_without_limits_the_backend_chooses_the_market(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    markets: RecordingMarkets,
    settings: dict[str, Any],
    used: list[Market],
) -> None:
    harness = ClientHarness(tmp_path, monkeypatch)
    harness.cloud = FakeProvisioner(spot=False)
    estimate_request(harness.request(), {"training_time_s": "10h", **settings})
    assert [one.market for one in markets.jobs[0].offers] == used


# --- Confirmation ---------------------------------------------------------------------------------


def confirm(
    harness: ClientHarness,
    limit_usd: Any,
    answer: str = "",
    *,
    is_terminal: bool = True,
    budget_usd: float | None = None,
) -> list[str]:
    """Return the questions that were asked."""
    questions: list[str] = []

    def prompt(question: str) -> str:
        questions.append(question)
        return answer

    request = harness.request(run=RunConfig(training_time_s="10h", budget_usd=budget_usd))
    confirm_cost(request, limit_usd, is_terminal=lambda: is_terminal, prompt=prompt)
    return questions


@pytest.fixture
def harness(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, markets: RecordingMarkets
) -> ClientHarness:
    return ClientHarness(tmp_path, monkeypatch)


@pytest.mark.parametrize("answer", ["y", " YES "])
def test_a_run_above_the_limit_is_confirmed_in_the_terminal(
    harness: ClientHarness, answer: str
) -> None:
    (question,) = confirm(harness, 20.0, answer)
    assert "worst case $20.33" in question
    assert question.endswith("\nRent the machines? [y/N] ")


@pytest.mark.parametrize("answer", ["", "n", "maybe"])
def test_a_declined_run_raises_before_anything_is_rented(
    harness: ClientHarness, answer: str
) -> None:
    with pytest.raises(RunCancelledError, match="nothing was rented"):
        confirm(harness, 20.0, answer)
    assert not harness.cloud.submitted_tokens


def test_below_the_limit_or_without_a_terminal_nothing_is_confirmed(
    harness: ClientHarness,
) -> None:
    assert confirm(harness, 20.37) == []
    assert confirm(harness, 10, budget_usd=9.0) == []
    assert confirm(harness, 0, is_terminal=False) == []


def test_an_unknown_cost_is_confirmed(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = OfferListing((an_offer(Market.SPOT, None),))
    monkeypatch.setattr(cost_plan, "query_offers", lambda _provisioner, _request: listing)
    (question,) = confirm(harness, 1e9, "y")
    assert "the cost is unknown" in question


@pytest.mark.parametrize("limit_usd", ["100", True, -1, float("nan")])
def test_an_invalid_limit_is_refused(harness: ClientHarness, limit_usd: Any) -> None:
    with pytest.raises(ConfigError, match="confirm must be a number of US dollars"):
        confirm(harness, limit_usd, is_terminal=False)
