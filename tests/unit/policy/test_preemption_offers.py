"""Moving the workers of a round to machines of another offer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from spotfit.model.events import FailureCause, RoundClosed
from spotfit.model.leader_state import LeaderState, RoundCommit, Training
from spotfit.policy.actions import Wait
from spotfit.policy.preemption import is_move_ready, replace_working_nodes
from spotfit.testing.builders import a_committed_checkpoint
from tests.unit.policy.networked_run import a_networked_run, standby
from tests.unit.policy.offered_run import ON_DEMAND, SPOT, OfferedRun

NOW = 100.0


def a_move(*, joined: int = 2) -> OfferedRun:
    """On-demand machines train, spot is chosen, and `joined` spot machines are connected."""
    run = OfferedRun()
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND)
    run.connect("t-1")
    run.train(100)
    run.choose(200, "spot")
    run.request(200, "t-2", SPOT)
    run.connect("t-2", first=2, nodes=joined)
    return run


def decide(run: OfferedRun, state: LeaderState, **fields: Any) -> RoundClosed | Wait | None:
    assert run.round is not None
    training = Training(round=run.round, since=0.0, **fields)
    return replace_working_nodes(run.view, state, training, NOW)


def committed(run: OfferedRun) -> RoundCommit:
    run.add(210, a_committed_checkpoint(round_age_s=100.0))
    return RoundCommit(committed_at=NOW)


def test_a_move_is_ready_once_all_workers_have_other_machines() -> None:
    assert is_move_ready((run := a_move()).view, run.state(200))
    assert not is_move_ready((run := a_move(joined=1)).view, run.state(200))


def test_a_move_is_not_ready_while_workers_would_start_with_delay() -> None:
    run = a_move()
    run.members[-1] = replace(run.members[-1], is_warm=False)
    assert not is_move_ready(run.view, run.state(200))


def test_without_a_round_or_another_offer_there_is_no_move() -> None:
    run = a_move()
    run.choose(210, "on-demand")
    assert not is_move_ready(run.view, run.state(210))
    run = a_move()
    run.add(210, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason=""))
    assert not is_move_ready(run.view, run.state(210))


def test_the_round_of_a_move_is_closed_directly_after_a_commit() -> None:
    run = a_move()
    commit = committed(run)
    assert decide(run, run.state(210), last_commit=commit) == RoundClosed(
        round_number=1, cause=FailureCause.RESIZE, reason="moving to spot; replacement ready"
    )


def test_a_move_waits_for_the_next_commit() -> None:
    run = a_move()
    waiting = decide(run, run.state(210))
    assert waiting == Wait(NOW + 1.0, "moving to spot; replacing after the next commit")


def test_a_round_is_not_closed_before_all_workers_have_other_machines() -> None:
    run = a_move(joined=1)
    commit = committed(run)
    assert decide(run, run.state(210), last_commit=commit) is None


def test_a_round_is_closed_for_machines_of_another_network() -> None:
    run = a_networked_run()
    commit = committed(run)
    assert not is_move_ready(run.view, run.state(210))
    ready = run.state(210, standby=standby(2, 3))
    assert is_move_ready(run.view, ready)
    closed = decide(run, ready, last_commit=commit)
    assert isinstance(closed, RoundClosed)
    assert closed.reason == "moving to far; replacement ready"
    assert decide(run, run.state(210, standby=standby(2)), last_commit=commit) is None


def test_machines_of_the_chosen_offer_are_not_replaced() -> None:
    run = a_move()
    run.choose(205, "on-demand")
    commit = committed(run)
    assert decide(run, run.state(210), last_commit=commit) is None
