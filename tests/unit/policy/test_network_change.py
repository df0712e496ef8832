"""When a run changes to machines of another network, and which of them leads there."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.events import LeaderElected, NodeLost
from spotfit.model.group import NodeState
from spotfit.model.leader_state import NoRound
from spotfit.policy.network_change import change_network, is_change_ready
from spotfit.testing.builders import a_group_status, an_agent_id
from tests.unit.policy.networked_run import (
    FAR,
    FIRST,
    SECOND,
    a_networked_run,
    close_round,
    elect,
    standby,
)
from tests.unit.policy.offered_run import OfferedRun

NOW = 1000.0


def a_closed_run(**fields: Any) -> OfferedRun:
    run = a_networked_run(**fields)
    close_round(run, 300)
    return run


def change(run: OfferedRun, *, since_s: float = 0.0, **fields: Any) -> LeaderElected | None:
    running = {token: a_group_status() for token in run.view.groups}
    usual: dict[str, Any] = {
        "phase": NoRound(since=NOW - since_s),
        "standby": standby(2, 3),
        "group_statuses": running,
        "leading_since": NOW - since_s,
    }
    return change_network(run.view, run.state(310, **{**usual, **fields}), NOW)


def test_the_run_is_handed_over_to_the_first_machine_of_the_chosen_offer() -> None:
    assert change(a_closed_run()) == LeaderElected(
        leader=an_agent_id(2),
        epoch=3,
        coordinator_address="10.0.0.2:7000",
        reason="the run moves to machines of another network",
        network="b",
    )


@pytest.mark.parametrize(
    "reports",
    [
        standby(2),
        standby(2, 3, is_proven=False),
        standby(2, 3, is_warm=False),
        standby(2, 3, has_notice=True),
        standby(2, 3, failure="no module named torch"),
    ],
    ids=["too few", "an old report", "still importing", "notice", "cannot start workers"],
)
def test_the_run_stays_until_all_workers_have_ready_machines(reports: Any) -> None:
    assert change(a_closed_run(), standby=reports) is None
    run = a_networked_run()
    assert not is_change_ready(run.view, run.state(310, standby=reports))


def test_a_change_of_an_open_round_is_ready_with_machines_for_its_workers() -> None:
    run = a_networked_run()
    assert is_change_ready(run.view, run.state(310, standby=standby(2, 3)))


def test_an_open_round_is_not_handed_over() -> None:
    assert change(a_networked_run()) is None


def test_the_checkpoints_of_the_last_round_are_searched_before() -> None:
    assert change(a_closed_run(), phase=NoRound(since=NOW, bucket_searched=False)) is None


def test_machines_that_have_ended_are_not_ready() -> None:
    ended = a_group_status(NodeState.RUNNING, NodeState.GONE)
    run = a_closed_run()
    assert change(run, group_statuses={FIRST: a_group_status(), SECOND: ended}) is None
    run.add(305, NodeLost(token=SECOND, node=1, agent=an_agent_id(3), reason="preempted"))
    assert change(run) is None


def test_machines_of_two_other_networks_are_not_added() -> None:
    run = a_closed_run()
    run.request(200, "t-3", FAR, network="c")
    reports = standby(2) | standby(3, token=Token("t-3"))
    assert change(run, standby=reports) is None


def test_without_a_choice_the_run_stays() -> None:
    run = a_closed_run()
    run.choose(305)
    assert change(run) is None


def test_machines_that_are_not_chosen_are_used_once_too_few_others_join() -> None:
    run = a_closed_run(chosen="near")
    run.members.pop()
    assert change(run, since_s=10.9) is None, "another agent may be late"
    changed = change(run, since_s=11.1)
    assert changed is not None
    assert (changed.leader, changed.network) == (an_agent_id(2), "b")
    assert "too few machines" in changed.reason


def test_machines_that_are_not_chosen_are_not_used_beside_those_that_join() -> None:
    assert change(a_closed_run(chosen="near"), since_s=600.0) is None


def test_machines_that_the_run_has_returned_from_are_not_tried_again() -> None:
    run = a_closed_run()
    elect(run, 310, 2, network="b")
    elect(run, 320, 0, network="a")
    assert change(run) is None
