"""Moving the workers of an elastic round to the chosen numbers of machines."""

from __future__ import annotations

from msgspec.structs import replace

from spotfit.model.events import (
    FailureCause,
    LeaderElected,
    PreemptionNoticed,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.leader_state import LeaderState, NoRound, RoundCommit, Training
from spotfit.model.topology import Round
from spotfit.policy.actions import AppendEvent, Wait
from spotfit.policy.preemption import (
    is_growth_due,
    is_move_ready,
    replace_working_nodes,
    resize_group,
)
from spotfit.policy.scheduler import next_action, next_round
from spotfit.testing.builders import a_committed_checkpoint, a_notice, an_agent_id
from tests.unit.policy.offered_run import ON_DEMAND, SPOT, T0_MS, OfferedRun

NOW = 100.0


def a_run(deadline_ms: int | None = T0_MS, **workers: int) -> OfferedRun:
    """A run of 2 to 4 workers that train on two spot machines; then `workers` are chosen."""
    run = OfferedRun(workers=(2, 4), deadline_ms=deadline_ms)
    run.choose_workers(0, spot=4)
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100)
    run.choose_workers(200, **workers)
    return run


def join(run: OfferedRun, token: str, *, first: int, nodes: int) -> OfferedRun:
    offer = ON_DEMAND if token == "t-2" else SPOT
    run.request(200, token, offer, nodes=nodes)
    run.connect(token, first=first, nodes=nodes)
    return run


def training(run: OfferedRun) -> Training:
    """The round, which has committed just now."""
    assert run.round is not None
    run.add(210, a_committed_checkpoint(round_age_s=100.0))
    return Training(round=run.round, since=0.0, last_commit=RoundCommit(committed_at=NOW))


def close(run: OfferedRun, state: LeaderState) -> RoundClosed | Wait | None:
    trained = training(run)
    return replace_working_nodes(run.view, state, trained, NOW)


def test_a_move_to_on_demand_machines_waits_for_all_of_them() -> None:
    some = join(a_run(on_demand=4), "t-2", first=2, nodes=2)
    assert close(some, some.state(210)) is None
    assert not is_move_ready(some.view, some.state(210))
    all_ = join(a_run(on_demand=4), "t-2", first=2, nodes=4)
    assert is_move_ready(all_.view, all_.state(210))
    assert isinstance(close(all_, all_.state(210)), RoundClosed)


def test_a_round_ends_if_it_has_more_machines_of_an_offer_than_chosen() -> None:
    run = a_run(spot=1, on_demand=3)
    assert close(run, run.state(210)) is None
    join(run, "t-2", first=2, nodes=3)
    closed = close(run, run.state(210))
    assert isinstance(closed, RoundClosed)
    assert closed.reason == "moving to spot, on-demand; replacement ready"


def test_a_group_grows_by_machines_of_the_other_offer() -> None:
    run = join(a_run(spot=2, on_demand=2), "t-2", first=2, nodes=2)
    assert close(run, run.state(210)) is None
    grown = resize_group(run.view, run.state(210), training(run), NOW)
    assert isinstance(grown, RoundClosed)
    assert grown.reason == "growing from 2 to 4 workers"


def test_without_a_deadline_a_group_does_not_grow_by_on_demand_machines_that_are_not_chosen() -> (
    None
):
    run = join(a_run(None, spot=4), "t-2", first=2, nodes=1)
    assert resize_group(run.view, run.state(210), training(run), NOW) is None


def uncommitted(run: OfferedRun) -> Training:
    """The round, which has not committed for 90 s; its function was called 10 s after its start."""
    assert run.round is not None
    return Training(round=run.round, since=0.0)


def test_a_group_grows_without_a_commit_if_repeating_its_work_costs_less() -> None:
    run = join(a_run(spot=2, on_demand=2), "t-2", first=2, nodes=2)
    grown = resize_group(run.view, run.state(210), uncommitted(run), NOW)
    assert isinstance(grown, RoundClosed)
    assert grown.reason == (
        "growing from 2 to 4 workers; "
        "repeating 90 s of 2 workers, as 2 more workers would wait for 8.5 min"
    )
    assert isinstance(resize_group(run.view, run.state(210), uncommitted(run), NOW + 200), Wait)


def test_a_round_with_a_preemption_notice_waits_for_its_last_save() -> None:
    run = join(a_run(spot=2, on_demand=2), "t-2", first=2, nodes=2)
    run.add(205, PreemptionNoticed(agent=an_agent_id(1), notice=a_notice()))
    join(run, "t-3", first=4, nodes=2)
    assert isinstance(resize_group(run.view, run.state(210), uncommitted(run), NOW), Wait)


def test_a_move_to_more_machines_does_not_wait_for_a_commit_that_is_far_away() -> None:
    run = join(a_run(on_demand=4), "t-2", first=2, nodes=4)
    closed = replace_working_nodes(run.view, run.state(210), uncommitted(run), NOW)
    assert isinstance(closed, RoundClosed)
    assert "repeating 90 s of 2 workers" in closed.reason
    same = join(a_run(spot=0, on_demand=2), "t-2", first=2, nodes=2)
    assert isinstance(
        replace_working_nodes(same.view, same.state(210), uncommitted(same), NOW), Wait
    )


def test_a_growth_is_due_after_the_resize_interval() -> None:
    run = join(a_run(spot=2, on_demand=2), "t-2", first=2, nodes=2)
    state = run.state(210, phase=uncommitted(run))
    due_at = run.view.spec.resize_interval_s
    assert is_growth_due(run.view, state, due_at)
    assert not is_growth_due(run.view, state, due_at - 0.1)
    alone = a_run(spot=2, on_demand=2)
    assert not is_growth_due(alone.view, alone.state(210, phase=uncommitted(alone)), due_at)
    assert not is_growth_due(run.view, run.state(210, phase=NoRound(since=0.0)), due_at)


def between_rounds(run: OfferedRun) -> OfferedRun:
    run.add(220, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason=""))
    return run


def test_the_next_round_has_the_chosen_machines() -> None:
    run = between_rounds(join(a_run(spot=1, on_demand=3), "t-2", first=2, nodes=3))
    opened = next_round(run.view, run.state(230), NOW)
    assert isinstance(opened, Round)
    assert [one.token for one in opened.assignments] == ["t-1", "t-2", "t-2", "t-2"]


def test_a_leader_whose_machine_is_not_among_the_chosen_ones_hands_over() -> None:
    run = between_rounds(join(a_run(spot=1, on_demand=3), "t-2", first=2, nodes=3))
    state = run.state(230, agent_id=an_agent_id(1), phase=NoRound(since=0.0), wall_ms=None)
    action = next_action(run.view, state, NOW)
    assert isinstance(action, AppendEvent)
    assert isinstance(action.event, LeaderElected)
    assert action.event.leader == an_agent_id(0)


def test_the_leadership_is_not_handed_to_a_silent_agent() -> None:
    run = between_rounds(join(a_run(on_demand=4), "t-2", first=2, nodes=4))
    run.members = [replace(one, last_heard_at=NOW) for one in run.members]
    run.members[2] = replace(run.members[2], last_heard_at=NOW - 10.0)
    state = run.state(230, phase=NoRound(since=0.0), wall_ms=None)
    action = next_action(run.view, state, NOW)
    assert isinstance(action, AppendEvent)
    assert isinstance(action.event, LeaderElected)
    assert action.event.leader == an_agent_id(3)


def test_a_leader_whose_machine_is_chosen_opens_the_round() -> None:
    run = between_rounds(join(a_run(spot=1, on_demand=3), "t-2", first=2, nodes=3))
    state = run.state(230, phase=NoRound(since=0.0), wall_ms=None)
    action = next_action(run.view, state, NOW)
    assert isinstance(action, AppendEvent)
    assert isinstance(action.event, RoundOpened)


def test_a_round_does_not_wait_for_machines_that_the_backend_delays() -> None:
    run = between_rounds(a_run(spot=4))
    run.request(230, "t-3", SPOT)
    state = run.state(230, phase=NoRound(since=NOW))
    waiting = next_round(run.view, state, NOW)
    assert isinstance(waiting, Wait)
    run.wait_at_backend(231, "t-3")
    assert isinstance(next_round(run.view, state, NOW), Round)
