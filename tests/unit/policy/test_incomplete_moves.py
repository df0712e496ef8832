"""Moves of which a part of the machines is granted: when they end, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.core.units import format_seconds
from spotfit.model.events import (
    FailureCause,
    GroupsReleased,
    MachinesChosen,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    PreemptionNoticed,
    RoundClosed,
)
from spotfit.model.leader_state import NoRound
from spotfit.model.offer import Offer
from spotfit.policy.capacity import surplus_groups
from spotfit.policy.incomplete_moves import is_move_paused
from spotfit.policy.machine_choice import choose_machines
from spotfit.policy.request_backoff import move_due_s, release_jitter
from spotfit.testing.builders import a_notice, an_agent_id
from tests.unit.policy.offered_run import ON_DEMAND, SPOT, T0_MS, OfferedRun, an_offer

# With its random part, see `release_jitter`.
LIMIT_S = 900.0 * (1 + release_jitter(OfferedRun().view) / 2)
ON_SPOT, ON_ON_DEMAND = {"spot": 2}, {"on-demand": 2}


def training_on_demand(nodes: int = 2, **fields: Any) -> OfferedRun:
    """A run that trains on demand since 110 s."""
    run = OfferedRun(**fields)
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND, nodes=nodes)
    run.connect("t-1", nodes=nodes)
    run.train(100)
    return run


def a_move(*, granted: int = 1, **fields: Any) -> OfferedRun:
    """Its move to spot machines: `granted` of two run since 300 s, the others wait."""
    run = training_on_demand(**fields)
    run.choose(200, "spot")
    run.request(200, "t-2", SPOT)
    run.bill(300, "t-2", started_s=300, nodes=granted)
    return run


def lose(run: OfferedRun, at_s: float, token: str, node: int, **fields: Any) -> None:
    lost = NodeLost(token=Token(token), node=node, agent=an_agent_id(9), reason="gone", **fields)
    run.add(at_s, lost)


def start(run: OfferedRun, at_s: float, token: str, node: int) -> None:
    times = MachineTimes(node=node, started_ms=(1, 2))
    run.add(at_s, MachinesObserved(times={Token(token): (times,)}))


def choose(run: OfferedRun, at_s: float, **fields: Any) -> MachinesChosen:
    chosen = choose_machines(run.view, run.state(at_s, **fields), at_s)
    assert chosen is not None
    return chosen


def assert_ends_after(run: OfferedRun, since_s: float) -> None:
    before, after = choose(run, since_s + LIMIT_S - 1), choose(run, since_s + LIMIT_S + 1)
    assert (before.workers, before.incomplete_offer) == (ON_SPOT, "")
    assert (after.workers, after.incomplete_offer) == (ON_ON_DEMAND, "spot")


def end_move(run: OfferedRun, at_s: float) -> None:
    chosen = choose(run, at_s)
    assert chosen.incomplete_offer == "spot"
    run.add(at_s, chosen)


# --- When a move ends ----------------------------------------------------------------------


def test_a_move_ends_after_a_timeout_from_the_first_start() -> None:
    assert_ends_after(a_move(), 300)


def test_later_starts_and_further_reports_do_not_extend_the_time() -> None:
    run = training_on_demand(3, workers=(3, 3))
    run.choose(200, "spot")
    run.request(200, "t-2", SPOT, nodes=3)
    for at_s, node in [(300, 0), (700, 1), (800, 0)]:
        start(run, at_s, "t-2", node)
    assert choose(run, 300 + LIMIT_S + 1).incomplete_offer == "spot"


def test_the_reason_names_the_offer_and_the_limit() -> None:
    reason = choose(a_move(), 2000).reason
    limit = format_seconds(LIMIT_S)
    assert reason.startswith(f"spot has granted only a part of the machines for more than {limit};")


def test_each_leader_ends_it_at_the_same_time() -> None:
    at_s = 300 + LIMIT_S + 1
    assert choose(a_move(), at_s, leading_since=at_s).incomplete_offer == "spot"


def test_a_move_of_which_all_machines_are_granted_does_not_end() -> None:
    assert choose(a_move(granted=2), 9000).workers == ON_SPOT


def test_machines_that_run_at_different_times_are_all_granted() -> None:
    run = a_move()
    start(run, 400, "t-2", 1)
    assert choose(run, 9000).workers == ON_SPOT


def test_the_time_in_which_all_machines_ran_does_not_count() -> None:
    run = a_move(granted=2)
    lose(run, 5000, "t-2", 1)
    run.request(5010, "t-3", SPOT, nodes=1)
    assert_ends_after(run, 5000)


def test_a_refused_replacement_counts_from_the_loss() -> None:
    run = a_move(granted=2)
    lose(run, 5000, "t-2", 1)
    run.refuse(5010, "t-3", SPOT)
    run.refuse(5100, "t-4", SPOT)
    lose(run, 5200, "t-2", 0, machine_returned=True)
    assert_ends_after(run, 5000)


def test_a_machine_with_a_notice_is_not_missing_before_its_loss() -> None:
    run = a_move(granted=2)
    run.connect("t-2", first=2)
    agent = run.members[-1].member.agent
    run.add(8900, PreemptionNoticed(agent=agent, notice=a_notice()))
    assert choose(run, 9000).workers == ON_SPOT


def test_the_start_of_a_lost_machine_does_not_count() -> None:
    run = a_move()
    lose(run, 400, "t-2", 0)
    run.request(410, "t-3", SPOT, nodes=1)
    start(run, 3000, "t-2", 1)
    assert_ends_after(run, 3000)


def test_a_machine_that_is_restarted_by_its_backend_is_granted() -> None:
    run = a_move(granted=2)
    lose(run, 5000, "t-2", 1, machine_returned=True)
    assert choose(run, 5900).workers == ON_SPOT
    lose(run, 6000, "t-2", 1)
    run.request(6010, "t-3", SPOT, nodes=1)
    assert_ends_after(run, 6000)


def test_a_lost_replacement_does_not_extend_the_time() -> None:
    run = a_move()
    run.request(350, "t-3", SPOT, nodes=1)
    lose(run, 450, "t-3", 0)
    run.request(451, "t-4", SPOT, nodes=1)
    assert_ends_after(run, 300)


def test_a_replacement_that_is_lost_after_its_start_does_not_extend_the_time() -> None:
    run = training_on_demand(3, workers=(3, 3))
    run.choose(200, "spot")
    run.request(200, "t-2", SPOT, nodes=3)
    start(run, 300, "t-2", 0)
    start(run, 400, "t-2", 1)
    lose(run, 1000, "t-2", 1)
    run.request(1010, "t-3", SPOT, nodes=1)
    assert choose(run, 300 + LIMIT_S + 1).incomplete_offer == "spot"


def test_a_move_to_on_demand_machines_does_not_end() -> None:
    """The deadline may require them."""
    run = OfferedRun(deadline_ms=T0_MS + 5_000_000, training_time_s=3600.0)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100)
    run.choose(200, "on-demand")
    run.request(200, "t-2", ON_DEMAND)
    run.bill(300, "t-2", started_s=300, nodes=1)
    assert choose(run, 2000).incomplete_offer == ""


def test_without_a_round_no_move_ends() -> None:
    """`partial_capacity` limits the time then."""
    run = a_move()
    run.add(400, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost"))
    assert choose(run, 2000, phase=NoRound()).workers == ON_SPOT


def test_the_time_after_a_round_counts() -> None:
    """The machine of the incomplete offer took part in a round beside machines of another one."""
    run = a_move()
    run.add(400, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="others"))
    on_demand = list(run.members)
    run.members.pop()
    run.connect("t-2", first=2, nodes=1)
    run.train(450)
    assert choose(run, 2500).incomplete_offer == ""
    run.add(2600, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="others"))
    run.members = on_demand
    run.train(2700)
    assert_ends_after(run, 2600)


# --- Elastic groups -------------------------------------------------------------------------------


def an_elastic_move(standing: str = "", **workers: int) -> OfferedRun:
    """Two machines train on demand, and one spot machine of a group of two runs since 300 s."""
    run = training_on_demand(workers=(1, 2), deadline_ms=T0_MS + 90_000_000, training_time_s=3600.0)
    run.choose_workers(200, standing, **workers)
    run.request(200, "t-2", SPOT)
    run.bill(300, "t-2", started_s=300, nodes=1)
    return run


@pytest.mark.parametrize(
    ("workers", "standing", "ends"),
    [
        ({"spot": 2}, "", True),
        ({"on_demand": 2}, "spot", True),
        # With a machine on demand as many as train.
        ({"spot": 1, "on_demand": 1}, "", False),
    ],
)
def test_an_elastic_group_releases_a_part_that_cannot_replace_the_round(
    workers: dict[str, int], standing: str, ends: bool
) -> None:
    run = an_elastic_move(standing, **workers)
    run.bill(110, "t-1", started_s=50)
    chosen = choose(run, 2000)
    assert (chosen.incomplete_offer == "spot") == ends
    if ends:
        assert (chosen.workers, chosen.standing_offer) == (ON_ON_DEMAND, "")
    run.add(2000, chosen)
    assert (surplus_groups(run.view, run.state(2000)) == ["t-2"]) == ends


@pytest.mark.parametrize("seconds", [2, 100])
def test_the_choice_of_an_elastic_group_does_not_change_during_the_pause(seconds: int) -> None:
    run = an_elastic_move(spot=2)
    run.bill(110, "t-1", started_s=50)
    run.add(2000, choose(run, 2000), GroupsReleased(token=Token("t-2")))
    chosen = choose(run, 2000 + seconds)
    assert (chosen.workers, chosen.standing_offer) == (ON_ON_DEMAND, "")


def test_an_elastic_group_requests_the_offer_again_after_the_pause() -> None:
    run = an_elastic_move(spot=2)
    run.bill(110, "t-1", started_s=50)
    run.add(2000, choose(run, 2000), GroupsReleased(token=Token("t-2")))
    due_s = move_due_s(run.view, "spot")
    chosen = choose(run, due_s)
    assert (chosen.workers, chosen.standing_offer) == (ON_ON_DEMAND, "spot")
    run.add(due_s, chosen)
    run.request(due_s, "t-3", SPOT)
    start(run, due_s + 100, "t-3", 0)
    assert choose(run, due_s + 100 + LIMIT_S - 1).incomplete_offer == ""
    assert choose(run, due_s + 100 + LIMIT_S + 1).incomplete_offer == "spot"


def test_a_loss_after_which_machines_are_too_few_counts_although_others_wait_for_long() -> None:
    """Two of four workers train, so that two of four spot machines suffice for the move."""
    run = training_on_demand(workers=(1, 4), deadline_ms=T0_MS + 90_000_000, training_time_s=3600.0)
    run.bill(110, "t-1", started_s=50)
    run.choose_workers(200, spot=4)
    run.request(200, "t-2", SPOT, nodes=4)
    run.bill(300, "t-2", started_s=300, nodes=2)
    lose(run, 5000, "t-2", 1)
    assert choose(run, 5000 + LIMIT_S - 1).incomplete_offer == ""
    assert choose(run, 5000 + LIMIT_S + 1).incomplete_offer == "spot"


def test_the_time_before_more_workers_are_needed_does_not_count() -> None:
    """The deadline requires on-demand machines beside the spot machines that all run."""
    dearer = an_offer("dearer", 2.0)
    run = OfferedRun(
        SPOT,
        dearer,
        ON_DEMAND,
        workers=(1, 4),
        deadline_ms=T0_MS + 90_000_000,
        training_time_s=3600.0,
    )
    run.choose_workers(0, dearer=2)
    run.request(0, "t-1", dearer)
    run.connect("t-1")
    run.train(100)
    run.bill(110, "t-1", started_s=50)
    run.choose_workers(200, spot=2)
    run.request(200, "t-2", SPOT)
    run.bill(300, "t-2", started_s=300)
    run.choose_workers(5000, spot=2, on_demand=2)
    run.request(5000, "t-3", ON_DEMAND)
    assert choose(run, 5000 + LIMIT_S - 1).incomplete_offer == ""
    assert choose(run, 5000 + LIMIT_S + 1).incomplete_offer == "spot"


def test_the_time_before_a_round_of_more_workers_does_not_count() -> None:
    run = training_on_demand(workers=(1, 4), deadline_ms=T0_MS + 90_000_000, training_time_s=3600.0)
    run.bill(110, "t-1", started_s=50)
    run.choose_workers(200, spot=4)
    run.request(200, "t-2", SPOT, nodes=4)
    run.bill(300, "t-2", started_s=300, nodes=2)
    run.request(4000, "t-3", ON_DEMAND, nodes=1)
    run.add(5000, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="another machine"))
    run.connect("t-3", first=4, nodes=1)
    run.train(5010)
    assert choose(run, 5000 + LIMIT_S - 1).incomplete_offer == ""
    assert choose(run, 5000 + LIMIT_S + 1).incomplete_offer == "spot"


@pytest.mark.parametrize(
    ("workers", "ends"), [({"spot": 1, "on_demand": 3}, True), ({"spot": 4}, False)]
)
def test_on_demand_machines_that_are_chosen_are_needed_for_a_move(
    workers: dict[str, int], ends: bool
) -> None:
    """Two workers train; two of four spot machines run."""
    run = training_on_demand(workers=(1, 4), deadline_ms=T0_MS + 90_000_000, training_time_s=3600.0)
    run.bill(110, "t-1", started_s=50)
    run.choose_workers(200, **workers)
    run.request(200, "t-2", SPOT, nodes=workers["spot"])
    run.bill(300, "t-2", started_s=300, nodes=min(2, workers["spot"]))
    assert (choose(run, 2000).incomplete_offer == "spot") == ends


def test_an_elastic_group_that_trains_on_the_offer_has_a_part_of_it() -> None:
    run = OfferedRun(workers=(1, 2))
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.bill(50, "t-1", started_s=50, nodes=1)
    run.connect("t-1", nodes=1)
    run.train(100)
    assert choose(run, 9000).incomplete_offer == ""


# --- The pause ------------------------------------------------------------------------------------


def after_an_end() -> OfferedRun:
    """A run that has ended a move at 2000 s."""
    run = a_move()
    end_move(run, 2000)
    return run


def test_a_move_that_was_ended_is_possible_after_a_pause() -> None:
    run = after_an_end()
    due_s = move_due_s(run.view, "spot")
    assert 2000 + 150 <= due_s <= 2000 + 450
    paused = choose(run, due_s - 1)
    assert (paused.workers, paused.standing_offer, paused.incomplete_offer) == (
        ON_ON_DEMAND,
        "",
        "",
    )
    run.add(2010, GroupsReleased(token=Token("t-2")))
    assert choose(run, due_s).workers == ON_SPOT


def test_refusals_and_rounds_of_other_offers_do_not_change_the_pause() -> None:
    run = after_an_end()
    due_s = move_due_s(run.view, "spot")
    run.refuse(2050, "t-3", SPOT)
    run.add(2060, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="other machines"))
    run.train(2070)
    assert move_due_s(run.view, "spot") == due_s


def test_the_pause_continues_between_rounds_unless_all_machines_are_lost() -> None:
    run = after_an_end()
    run.add(2010, GroupsReleased(token=Token("t-2")))
    run.add(2050, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost"))
    lose(run, 2050, "t-1", 0)
    gap: dict[str, Any] = {"phase": NoRound()}
    assert choose(run, 2060, **gap).workers == ON_ON_DEMAND
    lose(run, 2070, "t-1", 1)
    run.members.clear()
    assert choose(run, 2080, **gap).workers == ON_SPOT


def test_pauses_are_doubled_up_to_an_hour() -> None:
    run = training_on_demand()
    pauses_s = []
    for n in range(1, 7):
        run.add(1000 * n, MachinesChosen(workers=ON_ON_DEMAND, incomplete_offer="spot"))
        pauses_s.append(move_due_s(run.view, "spot") - 1000 * n)
    shares = [pause_s / pauses_s[0] for pause_s in pauses_s]
    assert shares == pytest.approx([1, 2, 4, 8, 12, 12])


@pytest.mark.parametrize(
    ("offers", "is_reset"), [((SPOT,), True), ((ON_DEMAND,), False), ((SPOT, ON_DEMAND), False)]
)
def test_only_a_round_on_its_machines_alone_resets_the_pause(
    offers: tuple[Offer, ...], is_reset: bool
) -> None:
    run = after_an_end()
    run.members.clear()
    for n, offer in enumerate(offers):
        run.request(2700, f"t-{n + 5}", offer, nodes=1)
        run.connect(f"t-{n + 5}", first=n + 5, nodes=1)
    run.train(2800)
    assert (move_due_s(run.view, "spot") == 0.0) == is_reset


def test_an_offer_whose_machines_are_in_the_last_round_is_not_paused() -> None:
    run = after_an_end()
    run.members.pop()
    run.request(2010, "t-3", SPOT, nodes=1)
    run.connect("t-3", first=3, nodes=1)
    run.train(2020)
    assert move_due_s(run.view, "spot") > 2040
    assert not is_move_paused(run.view, run.state(2040), "spot")
    assert is_move_paused(after_an_end().view, run.state(2040), "spot")
