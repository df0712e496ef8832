"""The record of machine-hours: bounds, prices, fits, waste, and what a journal may lack."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.codec import decoder, encode
from spotfit.core.ids import Token
from spotfit.model.bill import Bill
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    PricesChanged,
    RoundClosed,
    RoundOpened,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.group import GroupHandle, GroupPlan
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec, FeederSpec, RunTiming
from spotfit.model.topology import SnapshotId
from spotfit.model.usage import RELEASE_LIMIT_S, Usage, bill_of
from spotfit.model.view import JournalView, View, fold
from spotfit.testing.builders import (
    TOKEN,
    a_member,
    a_request,
    a_round,
    a_spec,
    an_agent_id,
    an_entry,
)

T0_MS = 1_000_000_000_000
OTHER = Token("t-2")
NO_MARGIN = RunTiming(heartbeat_timeout_s=0.0, lease_timeout_s=0.0)


def ms(at_s: float) -> int:
    return T0_MS + round(at_s * 1000)


def exactly(at_s: float) -> tuple[int, int]:
    return ms(at_s), ms(at_s)


def between(first_s: float, last_s: float) -> tuple[int, int]:
    return ms(first_s), ms(last_s)


def an_offer(name: str = "spot", usd: float | None = 3.6, **fields: Any) -> Offer:
    price = None if usd is None else Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    usual: dict[str, Any] = {"provisioner": "local", "market": Market.SPOT, "price": price}
    return Offer(name=name, **{**usual, **fields})


ON_DEMAND = an_offer("on-demand", 10.8, market=Market.ON_DEMAND)


class Run:
    """A journal of a fit with one group, written at seconds after T0."""

    def __init__(self, *offers: Offer, nodes: int = 1) -> None:
        self.view: JournalView = JournalView()
        self.add(0, started(*offers))
        self.request(TOKEN, at_s=0, nodes=nodes)

    def add(self, at_s: float, *events: JournalEvent) -> None:
        for event in events:
            self.view = fold(self.view, an_entry(event, written_at_ms=ms(at_s)))

    def request(self, token: Token, *, at_s: float, nodes: int = 1, offer: str = "") -> None:
        plan = GroupPlan(token=token, provisioner="local", num_nodes=nodes, slots_per_node=1)
        handle = GroupHandle(token=token, provisioner="local", name="g", offer=offer)
        self.add(
            at_s,
            GroupPlanned(request=a_request(token, nodes), plan=plan),
            GroupSubmitted(token=token, handle=handle),
        )

    def observe(self, at_s: float, *, token: Token = TOKEN, node: int = 0, **times: Any) -> None:
        self.add(at_s, MachinesObserved(times={token: (MachineTimes(node=node, **times),)}))

    def bill(self, at_s: float) -> Bill:
        return bill_of(self.view, ms(at_s))

    def bounds(self, at_s: float = 1e6) -> tuple[float, float]:
        bill = self.bill(at_s)
        return bill.machine_s, sum(one.max_machine_s for one in bill.offers)

    @property
    def usage(self) -> Usage:
        return self.view.usage


def started(*offers: Offer) -> FitStarted:
    return FitStarted(spec=a_spec(cost=CostSpec(offers=offers), timing=NO_MARGIN))


def released(**times: Any) -> GroupsReleased:
    of_group = (MachineTimes(node=0, **times),) if times else ()
    return GroupsReleased(token=TOKEN, times={TOKEN: of_group} if of_group else {})


def a_loss(**fields: Any) -> NodeLost:
    return NodeLost(token=TOKEN, node=0, agent=an_agent_id(0), reason="gone", **fields)


def test_machines_for_feeders_have_the_price_of_their_offer() -> None:
    cpu = an_offer("cpu#feeders", 0.36, provisioner="with_feeders")
    run = Run()
    feeders = FeederSpec(offers=(cpu,))
    run.view = JournalView()
    cost = CostSpec(offers=(an_offer(), ON_DEMAND))
    run.add(0, FitStarted(spec=a_spec(cost=cost, feeders=feeders, timing=NO_MARGIN)))
    run.request(TOKEN, at_s=0, offer="spot")
    run.request(OTHER, at_s=0, offer="cpu#feeders")
    for token in (TOKEN, OTHER):
        run.observe(10, token=token, started_ms=exactly(0), ended_ms=exactly(1000))
    usd = {one.offer: one.usd for one in run.bill(2000).offers}
    assert usd == {"spot": pytest.approx(1.0), "cpu#feeders": pytest.approx(0.1)}


def test_feeders_of_unknown_offer_have_a_maximum_beside_machines_of_unknown_price() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(0), ended_ms=exactly(1000))
    feeders = FeederSpec(max_nodes=1, usd_per_hour=0.36)
    cost = CostSpec(offers=(an_offer(), ON_DEMAND))
    run.add(1000, FitStarted(spec=a_spec(cost=cost, feeders=feeders, timing=NO_MARGIN)))
    request = replace(a_request(OTHER, 1), role="feed")
    plan = GroupPlan(token=OTHER, provisioner="local", num_nodes=1, slots_per_node=1)
    handle = GroupHandle(token=OTHER, provisioner="local", name="f")
    run.add(
        1000, GroupPlanned(request=request, plan=plan), GroupSubmitted(token=OTHER, handle=handle)
    )
    run.observe(1010, token=OTHER, started_ms=exactly(1000))
    running = run.bill(2000)
    run.observe(2010, token=OTHER, ended_ms=exactly(2000))
    for bill in (running, run.bill(3000)):
        amounts = {one.offer: (one.usd, one.max_usd) for one in bill.offers}
        assert amounts == {"": (None, None), "#feeders": (None, pytest.approx(0.1))}


# --- bounds ---------------------------------------------------------------------------------------


def test_times_of_the_provider_are_billed_exactly() -> None:
    run = Run(an_offer())
    run.observe(60, started_ms=exactly(50))
    run.add(200, released(ended_ms=exactly(150)), FitEnded(outcome="finished"))
    bill = run.bill(1000)
    assert run.bounds() == (100.0, 100.0)
    assert bill.usd == bill.max_usd == pytest.approx(0.1)
    assert bill.is_final


def test_times_between_observations_bound_the_bill() -> None:
    run = Run()
    run.observe(60, started_ms=between(50, 60))
    run.add(200, released(ended_ms=between(140, 150)))
    assert run.bounds() == (80.0, 100.0)


def test_a_start_is_not_before_the_request_nor_before_it_was_seen_waiting() -> None:
    run = Run()
    run.request(OTHER, at_s=10)
    run.observe(60, token=OTHER, started_ms=(0, ms(60)))
    run.observe(100, token=OTHER, ended_ms=exactly(100))
    assert run.bounds() == (40.0, 90.0)


def test_a_running_machine_is_certain_until_its_round_proves_it_and_ends_now_at_most() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    assert run.bounds(50) == (0.0, 40.0)
    run.add(30, RoundOpened(round=a_round()))
    assert run.bounds(50) == (20.0, 40.0)
    run.add(40, a_commit(round_age_s=10.0))
    assert run.bounds(50) == (30.0, 40.0)
    run.add(45, RoundClosed(round_number=1, cause=FailureCause.NETWORK, reason=""))
    assert run.bounds(50) == (30.0, 40.0)


def a_commit(**fields: Any) -> CheckpointCommitted:
    usual: dict[str, Any] = {"name": "c", "report_index": 0, "metrics": {}, "ranks": (0,)}
    return CheckpointCommitted(**{**usual, "round": 1, **fields})


def test_a_proof_is_older_than_its_entry_by_the_time_until_silence_is_noticed() -> None:
    run = Run()
    timing = RunTiming(heartbeat_timeout_s=10.0, lease_timeout_s=20.0)
    run.add(0, FitEnded(outcome="failed"), FitStarted(spec=a_spec(timing=timing)))
    run.request(OTHER, at_s=0)
    run.observe(10, token=OTHER, started_ms=exactly(10))
    run.add(100, RoundOpened(round=a_round(members=[a_member(0, token=OTHER)])))
    assert run.bounds(100) == (60.0, 90.0)


def test_a_machine_that_was_not_observed_to_run_is_not_billed_while_its_group_is_held() -> None:
    assert Run().bounds(3600) == (0.0, 0.0)


def test_unknown_ends_are_bounded_after_the_release() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    run.add(50, released(), FitEnded(outcome="finished"))
    assert run.bounds(60) == (0.0, 50.0)
    assert not run.bill(60).is_final
    assert run.bounds(1000) == (0.0, 40.0 + RELEASE_LIMIT_S)
    assert run.bill(1000).is_final


def test_an_end_that_is_observed_after_the_release_settles_the_group() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    run.add(50, released(), FitEnded(outcome="finished"))
    run.observe(60, ended_ms=exactly(52))
    assert run.usage.groups == {}
    assert run.bounds(60) == (42.0, 42.0)
    assert run.bill(60).is_final


def test_a_second_record_of_the_same_end_is_ignored() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    run.add(50, released())
    for _ in range(2):
        run.observe(60, ended_ms=exactly(52))
    assert run.bounds() == (42.0, 42.0)


def test_a_machine_that_no_process_has_observed_may_have_run_until_its_release() -> None:
    run = Run()
    run.add(50, released(waiting_ms=ms(30)))
    assert run.bounds(60) == (0.0, 30.0)
    run.observe(60, is_unbilled=True)
    assert run.bounds(60) == (0.0, 0.0)


def test_a_machine_that_ran_between_two_observations_is_recorded_with_both_times() -> None:
    run = Run()
    run.add(50, a_loss(times=MachineTimes(node=0, started_ms=exactly(20), ended_ms=exactly(30))))
    assert run.bounds() == (10.0, 10.0)


def test_a_lost_machine_that_still_runs_is_billed_until_it_ends() -> None:
    run = Run(nodes=2)
    run.observe(10, started_ms=exactly(10))
    run.add(20, a_loss())
    assert run.bounds(100) == (0.0, 90.0)
    run.observe(100, ended_ms=exactly(25))
    assert run.bounds(100) == (15.0, 15.0)


def test_a_refused_group_costs_nothing() -> None:
    run = Run()
    run.add(10, GroupRefused(token=TOKEN, reason="full"))
    assert run.bounds() == (0.0, 0.0)
    assert run.usage.groups == {}


def test_times_of_wrong_clocks_are_never_negative() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(500))
    run.add(20, released(ended_ms=exactly(400)), FitEnded(outcome="failed"))
    assert run.bounds() == (0.0, 0.0)
    assert min(run.bill(0).boot_s, run.bill(0).idle_s, run.bill(0).repeated_s) == 0.0


# --- machines that their backend restarts ---------------------------------------------------------


def test_each_attempt_of_a_machine_is_billed() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    run.add(40, a_loss(machine_returned=True, times=MachineTimes(node=0, ended_ms=exactly(30))))
    run.observe(60, started_ms=exactly(50))
    run.add(100, released(ended_ms=exactly(90)))
    assert run.bounds() == (60.0, 60.0)


def test_the_start_of_another_attempt_bounds_the_end_of_the_one_before() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    run.observe(60, started_ms=exactly(50))
    run.add(100, released(ended_ms=exactly(90)))
    assert run.bounds() == (40.0, 80.0)


def test_a_round_after_a_restart_proves_nothing_about_the_attempt_before() -> None:
    run = Run()
    run.observe(10, started_ms=exactly(10))
    run.add(40, a_loss(machine_returned=True))
    run.add(45, RoundOpened(round=a_round()))
    run.observe(60, started_ms=exactly(35), ended_ms=between(0, 35))
    run.add(100, released(ended_ms=exactly(90)))
    # 35..90; the end of the first attempt is between 10 and 35.
    assert run.bounds() == (55.0, 80.0)


def test_a_restart_without_times_counts_the_gap_once_at_most() -> None:
    run = Run()
    run.observe(10, started_ms=between(9, 10))
    run.add(20, RoundOpened(round=a_round()))
    run.add(40, a_loss(machine_returned=True))
    run.observe(60, started_ms=(0, ms(60)))
    run.add(100, released(ended_ms=between(90, 100)))
    # 10..20 and 60..90; 9..40 and 40..100.
    assert run.bounds() == (40.0, 91.0)


def test_a_round_without_times_proves_nothing_about_the_time_before_its_agent() -> None:
    run = Run()
    run.observe(10, started_ms=between(9, 10), may_be_restarted=True)
    run.add(50, RoundOpened(round=a_round()))
    run.add(80, RoundClosed(round_number=1, cause=FailureCause.NETWORK, reason=""))
    # The same agent is of the same attempt.
    run.add(85, RoundOpened(round=a_round(2)))
    run.add(100, released(ended_ms=between(90, 100)))
    assert run.bounds() == pytest.approx((40, 91), abs=0.01)


def test_another_agent_without_times_is_of_another_attempt() -> None:
    run = Run()
    run.add(5, RoundOpened(round=a_round()))
    run.observe(10, started_ms=between(9, 10), may_be_restarted=True)
    run.add(30, RoundClosed(round_number=1, cause=FailureCause.NETWORK, reason=""))
    restarted = [replace(a_member(0), agent=an_agent_id(9)), a_member(1)]
    run.add(60, RoundOpened(round=a_round(2, members=restarted)))
    run.add(100, released(ended_ms=between(90, 100)))
    # 10 s is when the machine was observed; its first agent is known to run until 5 s only.
    assert run.bounds() == pytest.approx((30, 91), abs=0.01)


def test_a_machine_without_times_has_the_same_attempt_in_a_validation_and_a_round() -> None:
    run = Run()
    run.observe(10, started_ms=between(9, 10), may_be_restarted=True)
    run.add(20, a_validation())
    ended = ValidationEnded(checkpoint_name="c", checkpoint_uid="1-0", status="validated")
    run.add(25, ended)
    run.add(50, RoundOpened(round=a_round()))
    run.add(55, TrainingFunctionStarted(round_number=1, startup_s=5.0))
    run.add(100, released(ended_ms=between(90, 100)))
    assert run.bounds() == pytest.approx((70, 91), abs=0.01)
    assert run.bill(100).idle_s == pytest.approx(30)


def test_unobserved_attempts_are_in_the_maximum() -> None:
    run = Run()
    run.observe(100, started_ms=exactly(80), attempt=3, unseen_until_ms=ms(80))
    run.add(100, released(ended_ms=exactly(90)))
    assert run.bounds() == (10.0, 90.0)


def test_attempts_that_no_leader_observed_before_a_loss_are_in_the_maximum_only() -> None:
    run = Run()
    run.observe(10, started_ms=between(9, 10))
    run.observe(20, ended_ms=between(15, 20))
    before = run.bounds()
    unseen = MachineTimes(node=0, unseen_until_ms=ms(70))
    run.add(80, a_loss(times=unseen))
    run.add(90, released())
    assert before == (5.0, 11.0)
    assert run.bounds() == (5.0, 61.0)


def test_time_without_an_observer_is_counted_once() -> None:
    run = Run()
    run.observe(20, started_ms=between(9, 10), ended_ms=between(15, 20))
    run.observe(70, unseen_until_ms=ms(70))
    run.observe(80, started_ms=between(0, 80), unseen_until_ms=ms(70))
    run.add(100, released(ended_ms=between(95, 100)))
    # 9..20, 20..70 and 70..100.
    assert run.bounds() == (20.0, 91.0)


# --- prices ---------------------------------------------------------------------------------------


def test_the_price_is_that_of_the_granted_offer() -> None:
    run = Run(an_offer("a", 3.6), an_offer("b", 7.2))
    run.request(OTHER, at_s=0, offer="b")
    run.observe(0, token=OTHER, started_ms=exactly(0), ended_ms=exactly(100))
    (line,) = run.bill(100).offers
    assert line.offer == "b"
    assert line.usd == pytest.approx(0.2)


def test_the_only_offer_of_the_backend_is_that_of_a_group_without_one() -> None:
    run = Run(an_offer("a", 3.6), an_offer("b", 7.2, provisioner="other"))
    run.observe(0, started_ms=exactly(0), ended_ms=exactly(100))
    assert run.bill(100).usd == pytest.approx(0.1)


def test_a_group_of_an_unknown_offer_has_no_price() -> None:
    run = Run(an_offer("a", 3.6), an_offer("b", 7.2))
    run.observe(0, started_ms=exactly(0), ended_ms=exactly(100))
    bill = run.bill(100)
    assert (bill.machine_s, bill.usd, bill.max_usd) == (100.0, None, None)


def test_the_requested_offer_is_kept_with_the_group_and_its_market_in_the_bill() -> None:
    run = Run()
    plan = GroupPlan(token=OTHER, provisioner="local", num_nodes=1, slots_per_node=1)
    request = replace(a_request(OTHER), offer=ON_DEMAND)
    handle = GroupHandle(token=OTHER, provisioner="local", name="g")
    run.add(
        0,
        GroupPlanned(request=request, plan=plan),
        GroupSubmitted(token=OTHER, handle=handle),
    )
    run.observe(0, token=OTHER, started_ms=exactly(0), ended_ms=exactly(100))
    assert isinstance(run.view, View)
    assert run.view.groups[OTHER].offer == ON_DEMAND
    (line,) = run.bill(100).offers
    assert (line.offer, line.market) == ("on-demand", Market.ON_DEMAND)
    assert line.usd == pytest.approx(0.3)


def test_the_on_demand_equivalent_is_that_of_the_same_region_and_type() -> None:
    place = {"region": "eu", "machine_type": "a"}
    cheaper = an_offer("cheaper", 1.0, market=Market.ON_DEMAND, region="us", machine_type="a")
    run = Run(
        an_offer("a", 3.6, **place),
        an_offer("dear", 18.0, market=Market.ON_DEMAND, **place),
        an_offer("same", 10.8, market=Market.ON_DEMAND, **place),
        cheaper,
    )
    run.request(OTHER, at_s=0, offer="a")
    run.observe(0, token=OTHER, started_ms=exactly(0), ended_ms=exactly(100))
    bill = run.bill(100)
    assert bill.on_demand_usd == pytest.approx(0.3)
    assert bill.saved_share == pytest.approx(2 / 3)


def test_without_an_on_demand_offer_there_is_no_equivalent() -> None:
    run = Run(an_offer())
    run.observe(0, started_ms=exactly(0), ended_ms=exactly(100))
    assert run.bill(100).on_demand_usd is None


def test_a_price_holds_from_its_entry_on() -> None:
    run = Run(an_offer(usd=3.6))
    run.observe(0, started_ms=exactly(0))
    run.add(50, PricesChanged(offers=(an_offer(usd=7.2),)))
    run.add(100, released(ended_ms=exactly(80)))
    assert run.bill(100).usd == pytest.approx((50 * 3.6 + 30 * 7.2) / 3600)


def test_a_wrong_clock_of_the_client_does_not_delay_the_changes_of_prices() -> None:
    """It has not measured the clock of the storage when it starts the fit."""
    run = Run()
    run.add(7200, started(an_offer(usd=3.6)))
    run.request(OTHER, at_s=1)
    run.observe(2, token=OTHER, started_ms=exactly(0))
    run.add(50, PricesChanged(offers=(an_offer(usd=7.2),)))
    run.add(100, PricesChanged(offers=(an_offer(usd=3.6),)))
    run.observe(200, token=OTHER, ended_ms=exactly(200))
    assert run.bill(1000).usd == pytest.approx(0.05 + 0.1 + 0.1)


def test_an_end_before_a_price_change_is_not_billed_at_the_later_price() -> None:
    run = Run(an_offer(usd=3.6))
    run.observe(0, started_ms=exactly(0))
    run.add(50, PricesChanged(offers=(an_offer(usd=7200.0),)))
    run.add(60, released(ended_ms=exactly(40)))
    assert run.bill(100).usd == pytest.approx(0.04)


def test_many_price_changes_keep_the_record_small_and_its_bounds_right() -> None:
    run = Run(an_offer(usd=1.0))
    run.observe(0, started_ms=exactly(0))
    right = 0.0
    for n in range(1, 500):
        right += 1 + (n - 1) % 3
        run.add(n * 3600, PricesChanged(offers=(an_offer(usd=1.0 + n % 3),)))
    assert len(run.usage.prices["spot"]) <= 64
    run.add(499 * 3600, released(ended_ms=exactly(499 * 3600)))
    bill = run.bill(499 * 3600)
    assert bill.usd is not None
    assert bill.max_usd is not None
    assert 0.4 * right < bill.usd < right < bill.max_usd < 2 * right


def test_price_changes_of_a_run_that_commits_are_exact() -> None:
    run = Run(an_offer(usd=1.0))
    run.observe(0, started_ms=exactly(0))
    run.add(0, RoundOpened(round=a_round()))
    right = 0.0
    for n in range(1, 500):
        right += 1 + (n - 1) % 3
        run.add(n * 3600, a_commit(round_age_s=1.0))
        run.add(n * 3600, PricesChanged(offers=(an_offer(usd=1.0 + n % 3),)))
        assert len(run.usage.prices["spot"]) <= 2
    run.add(499 * 3600, released(ended_ms=exactly(499 * 3600)))
    assert run.bill(499 * 3600).usd == pytest.approx(right)
    assert run.bill(499 * 3600).max_usd == pytest.approx(right)


# --- several fits ---------------------------------------------------------------------------------


def test_the_usage_of_earlier_fits_is_kept_until_their_groups_are_settled() -> None:
    run = Run(an_offer(usd=3.6))
    run.observe(0, started_ms=exactly(0))
    run.add(50, FitEnded(outcome="failed"), started(an_offer(usd=7.2)))
    assert run.bounds(60) == (0.0, 60.0)
    run.request(OTHER, at_s=60)
    run.observe(70, token=OTHER, started_ms=exactly(70))
    run.add(100, released(ended_ms=exactly(100)), GroupsReleased(token=OTHER))
    run.observe(110, token=OTHER, ended_ms=exactly(100))
    assert run.bounds() == (130.0, 130.0)
    assert run.bill(110).usd == pytest.approx((50 * 3.6 + 50 * 7.2 + 30 * 7.2) / 3600)


def test_a_group_that_its_backend_does_not_know_any_more_has_ended() -> None:
    run = Run()
    run.observe(0, started_ms=exactly(0))
    run.add(50, FitEnded(outcome="failed"), started())
    run.add(80, GroupRefused(token=TOKEN, reason="unknown"))
    assert run.bounds(1000) == (0.0, 80.0)


# --- waste ----------------------------------------------------------------------------------------


def waste(run: Run, at_s: float = 1000) -> tuple[float, float, float]:
    bill = run.bill(at_s)
    return bill.boot_s, bill.repeated_s, bill.idle_s


def two_machines() -> Run:
    run = Run(nodes=2)
    for node in range(2):
        run.observe(5, node=node, started_ms=exactly(0))
    run.add(10, RoundOpened(round=a_round()))
    run.add(20, TrainingFunctionStarted(round_number=1, startup_s=10.0))
    return run


def end_both(run: Run, at_s: float) -> None:
    run.add(at_s, GroupsReleased(token=TOKEN))
    for node in range(2):
        run.observe(at_s, node=node, ended_ms=exactly(at_s))


def test_boot_lasts_until_the_first_training_function_starts() -> None:
    run = two_machines()
    run.add(100, FitEnded(outcome="finished"))
    end_both(run, 100)
    assert waste(run) == (40.0, 0.0, 0.0)


def test_time_between_rounds_and_after_the_end_is_idle() -> None:
    run = two_machines()
    run.add(30, a_commit(round_age_s=20.0))
    run.add(30, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason=""))
    run.add(35, RoundOpened(round=a_round(2)))
    run.add(40, TrainingFunctionStarted(round_number=2, startup_s=5.0))
    run.add(100, FitEnded(outcome="finished"))
    end_both(run, 105)
    assert waste(run) == (40.0, 0.0, 30.0)


def test_idle_time_begins_with_the_recorded_attempt() -> None:
    run = Run()
    run.add(10, RoundOpened(round=a_round(1, members=[a_member(0)])))
    run.add(20, TrainingFunctionStarted(round_number=1, startup_s=10.0))
    run.add(50, FitEnded(outcome="finished"))
    # The attempt that has trained was lost before its start was recorded.
    run.observe(95, started_ms=exactly(90))
    run.add(100, released(ended_ms=exactly(100)))
    assert (run.bill(1000).machine_s, run.bill(1000).idle_s) == (10.0, 10.0)


def test_idle_time_before_another_round_begins_with_the_recorded_attempt() -> None:
    run = Run()
    run.add(10, RoundOpened(round=a_round(1, members=[a_member(0)])))
    run.add(20, TrainingFunctionStarted(round_number=1, startup_s=10.0))
    run.add(50, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason=""))
    run.observe(95, started_ms=exactly(90))
    run.add(96, RoundOpened(round=a_round(2, members=[a_member(0)])))
    run.add(97, TrainingFunctionStarted(round_number=2, startup_s=1.0))
    run.add(100, released(ended_ms=exactly(100)))
    assert run.bill(1000).idle_s == 7.0


def test_work_since_the_last_commit_of_a_round_is_repeated() -> None:
    run = two_machines()
    run.add(50, a_commit(round_age_s=40.0))
    run.add(80, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason=""))
    run.add(80, FitEnded(outcome="failed"))
    end_both(run, 80)
    assert waste(run) == (40.0, 60.0, 0.0)


def test_only_work_until_the_loss_is_repeated_if_it_is_noticed_later() -> None:
    run = two_machines()
    run.add(50, a_commit(round_age_s=40.0))
    run.observe(100, ended_ms=exactly(60))
    run.add(110, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason=""))
    run.add(110, FitEnded(outcome="failed"))
    run.add(110, observed(1, ended_ms=exactly(110)))
    assert waste(run) == (40.0, 20.0, 50.0)


def test_the_end_of_an_attempt_before_the_round_does_not_shorten_its_work() -> None:
    run = two_machines()
    run.observe(25, ended_ms=exactly(25))
    run.add(30, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason=""))
    run.add(30, RoundOpened(round=a_round(2)))
    run.add(40, TrainingFunctionStarted(round_number=2, startup_s=5.0))
    run.add(100, FitEnded(outcome="finished"))
    end_both(run, 100)
    # Of machine 1, which waited from the loss at 25 s until the next start.
    assert waste(run)[2] == 15.0


@pytest.mark.parametrize("how", ["replicated", "memory", "committed"])
def test_work_that_was_saved_elsewhere_is_not_repeated(how: str) -> None:
    run = two_machines()
    replicated = how == "replicated"
    closed = RoundClosed(
        round_number=1,
        cause=FailureCause.PREEMPTION,
        reason="",
        state_replicated=replicated,
    )
    run.add(80, closed)
    if how == "committed":
        run.add(80, a_commit(round_age_s=None))
    memory = SnapshotId(round=1, step=3) if how == "memory" else None
    run.add(80, RoundOpened(round=a_round(2, memory_snapshot=memory)))
    run.add(80, FitEnded(outcome="failed"))
    end_both(run, 80)
    assert waste(run) == (40.0, 0.0, 0.0)


def test_a_machine_for_validations_boots_until_the_first_and_is_idle_between_them() -> None:
    run = Run()
    run.observe(5, started_ms=exactly(0))
    for begin, end in ((10, 20), (35, 50)):
        run.add(begin, a_validation())
        ended = ValidationEnded(checkpoint_name="c", checkpoint_uid="1-0", status="validated")
        run.add(end, ended)
    run.add(60, released(ended_ms=exactly(60)))
    assert waste(run) == (10.0, 0.0, 25.0)


def a_validation() -> ValidationStarted:
    return ValidationStarted(
        checkpoint_name="c",
        checkpoint_uid="1-0",
        attempt=1,
        agent=an_agent_id(0),
        token=TOKEN,
        node=0,
    )


# --- the record itself ----------------------------------------------------------------------------


def test_the_size_of_the_record_does_not_grow_with_preemptions() -> None:
    run = Run(an_offer())
    sizes = []
    for n in range(200):
        token = Token(f"p-{n}")
        run.request(token, at_s=n * 600)
        run.observe(n * 600 + 10, token=token, started_ms=exactly(n * 600))
        run.add(n * 600 + 300, GroupsReleased(token=token))
        sizes.append(len(encode(run.usage)))
    assert max(sizes[10:]) <= max(sizes[:10]) + 100
    assert run.bounds()[1] == pytest.approx(200 * (300 + RELEASE_LIMIT_S))


def test_the_record_survives_encoding() -> None:
    run = two_machines()
    assert decoder(Usage).decode(encode(run.usage)) == run.usage


def test_groups_that_a_view_of_an_earlier_version_lacks_are_ignored() -> None:
    run = Run()
    run.view = replace(run.view, usage=Usage())
    run.observe(10, started_ms=exactly(0))
    run.add(20, RoundOpened(round=a_round()), a_loss())
    run.add(30, released(ended_ms=exactly(30)))
    assert run.bounds() == (0.0, 0.0)


def test_whatever_the_journal_ends_with_the_true_time_is_within_its_bounds() -> None:
    """Machine 0 runs from 12 to 95 s, machine 1 from 14 to 60 s and, restarted, from 70 to 97 s."""
    true_spans = ((12, 95), (14, 60), (70, 97))
    run = Run(an_offer(), nodes=2)
    steps: list[tuple[float, JournalEvent]] = [
        (16, observed(0, started_ms=exactly(12))),
        (16, observed(1, started_ms=between(10, 15))),
        (20, RoundOpened(round=a_round())),
        (30, TrainingFunctionStarted(round_number=1, startup_s=10.0)),
        (45, a_commit(round_age_s=20.0)),
        (62, RoundClosed(round_number=1, cause=FailureCause.NETWORK, reason="")),
        (66, replace(a_loss(machine_returned=True), node=1)),
        (72, observed(1, started_ms=between(69, 71))),
        (75, RoundOpened(round=a_round(2))),
        (90, FitEnded(outcome="finished")),
        (96, GroupsReleased(token=TOKEN)),
        (98, observed(0, ended_ms=exactly(95))),
        (99, observed(1, ended_ms=between(96, 98))),
    ]
    for at_s, event in steps:
        run.add(at_s, event)
        true_s = sum(max(0.0, min(at_s, end) - begin) for begin, end in true_spans)
        certain_s, maximum_s = run.bounds(at_s)
        known = [one.started_ms is not None for one in machines_of(run)]
        assert certain_s <= true_s
        # Before its start is recorded, a machine of a held group does not count.
        assert maximum_s >= true_s or not all(known)
    assert run.usage.groups == {}


def observed(node: int, **times: Any) -> MachinesObserved:
    return MachinesObserved(times={TOKEN: (MachineTimes(node=node, **times),)})


def machines_of(run: Run) -> tuple[Any, ...]:
    return run.usage.groups[TOKEN].machines if TOKEN in run.usage.groups else ()
