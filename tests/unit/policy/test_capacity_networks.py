"""Capacity of a run with machines in two networks, which cannot connect to each other."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import FailureCause, NodeLost
from spotfit.model.group import NodeState
from spotfit.policy.capacity import (
    find_lost_nodes,
    has_agents,
    has_machines,
    is_replaced,
    joining_slots,
    missing_by_offer,
    network_in_use,
    pending_slots,
    surplus_groups,
)
from spotfit.policy.request_backoff import offer_request_due_s, unusable_until_s
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
from tests.unit.policy.offered_run import LEASE_S, OfferedRun

NOW = 1000.0


def lost(run: OfferedRun, **fields: Any) -> list[NodeLost]:
    usual = {"group_statuses": {token: a_group_status() for token in run.view.groups}}
    state = run.state(400, **{**usual, **fields})
    return list(find_lost_nodes(run.view, state, NOW))


def a_changed_run() -> OfferedRun:
    """The machines of network b lead, and those of network a are not connected any more."""
    run = a_networked_run()
    close_round(run, 300)
    elect(run, 301, 2, network="b")
    run.members.clear()
    run.connect(SECOND, first=2)
    return run


FORMER_AGENTS = {(FIRST, n): an_agent_id(n) for n in range(2)}


# --- Machines that stand by -----------------------------------------------------------------------


def test_machines_that_stand_by_are_not_lost() -> None:
    granted = {(SECOND, 0): 0.0, (SECOND, 1): 0.0}
    run = a_networked_run()
    assert lost(run, standby=standby(2, 3), granted_at=granted) == []
    reasons = {one.reason for one in lost(run, granted_at=granted)}
    assert reasons == {"its agent did not join within 900 s"}


def test_a_machine_that_ends_while_it_stands_by_is_lost_with_its_agent() -> None:
    ended = a_group_status(NodeState.RUNNING, NodeState.GONE)
    statuses = {FIRST: a_group_status(), SECOND: ended}
    (one,) = lost(a_networked_run(), standby=standby(2, 3), group_statuses=statuses)
    assert (one.node, one.agent, one.cause) == (1, an_agent_id(3), FailureCause.PREEMPTION)


def test_an_agent_that_cannot_start_workers_is_lost_as_if_it_was_refused() -> None:
    first, _ = lost(a_networked_run(), standby=standby(2, 3, failure="trace\nno torch"))
    assert (first.agent, first.reason) == (
        None,
        "its environment could not be set up: no torch; "
        "no further machines are requested there for 60 s",
    )


def broken_run(starts: int) -> OfferedRun:
    """That many groups of network b could train nothing, the last one at 1000 s."""
    run = a_networked_run()
    for start in range(starts):
        at_s = 1000.0 - 100 * (starts - 1 - start)
        token = Token(f"t-{start + 2}")
        if start:
            run.request(at_s - 50, token, FAR, network="b")
        run.add(at_s, *lost(run, standby=standby(2, 3, token=token, failure="no torch")))
    return run


@pytest.mark.parametrize(
    ("starts", "pause_s"), [(1, 60.0), (2, 120.0), (5, 960.0), (12, 21600.0), (30, 21600.0)]
)
def test_pauses_double_after_machines_that_could_train_nothing(starts: int, pause_s: float) -> None:
    run = broken_run(starts)
    assert offer_request_due_s(run.view, "far") == 1000.0 + pause_s
    assert unusable_until_s(run.view, "near") == 0.0


def test_the_reason_has_the_number_of_failures_and_the_pause() -> None:
    run = broken_run(2)
    run.request(1200, "t-9", FAR, network="b")
    (one, *_) = lost(run, standby=standby(7, token=Token("t-9"), failure="no torch"))
    assert one.is_unusable
    assert one.reason == (
        "its environment could not be set up: no torch (3 times in a row); "
        "no further machines are requested there for 4.0 min"
    )


def test_a_machine_with_a_notice_is_released_before_it_has_workers() -> None:
    first, _ = lost(a_networked_run(), standby=standby(2, 3, has_notice=True))
    assert (first.agent, first.cause) == (an_agent_id(2), None)
    assert first.reason == "it has a preemption notice, and no workers"


def test_an_agent_that_stops_reporting_is_lost_after_the_lease_timeout() -> None:
    run, known = a_networked_run(), {(SECOND, 0): an_agent_id(2)}
    assert lost(run, last_agent_by_node=known, leading_since=NOW - LEASE_S) == []
    (one,) = lost(run, last_agent_by_node=known, leading_since=NOW - LEASE_S - 0.1)
    assert one.reason == "its agent has not reported for 20 s"


def test_machines_that_stand_by_do_not_join() -> None:
    run = a_networked_run()
    state = run.state(300)
    assert (pending_slots(run.view, state), joining_slots(run.view, state)) == (2, 0)
    assert not is_replaced(run.view, FIRST, 0), "the backend may restart the machine"


def test_machines_that_stand_by_with_a_notice_are_missing() -> None:
    run = a_networked_run()
    assert missing_by_offer(run.view, run.state(300, standby=standby(2, 3))) == []
    noticed = run.state(300, standby=standby(2, has_notice=True))
    assert missing_by_offer(run.view, noticed) == [("far", 1)]


def test_a_group_has_agents_once_they_are_ready() -> None:
    run = a_networked_run()
    assert not has_agents(run.state(300, standby=standby(2, is_warm=False)), SECOND)
    ready = run.state(300, standby=standby(2))
    assert has_agents(ready, SECOND)
    assert has_machines(ready, SECOND)


# --- Requests and releases ------------------------------------------------------------------------


def test_requests_in_another_network_are_kept_while_they_are_wanted() -> None:
    run = a_networked_run()
    assert surplus_groups(run.view, run.state(300)) == []
    run.choose(300, "near", standing="far")
    assert surplus_groups(run.view, run.state(300)) == []


def test_unwanted_requests_in_another_network_are_released_once_a_round_is_open() -> None:
    run = a_networked_run(chosen="near")
    run.members.pop()
    assert surplus_groups(run.view, run.state(300)) == [SECOND]
    close_round(run, 300)
    assert surplus_groups(run.view, run.state(301)) == []


def test_the_old_machines_are_kept_until_a_round_is_open_in_the_new_network() -> None:
    run = a_changed_run()
    assert lost(run, last_agent_by_node=FORMER_AGENTS, leading_since=NOW) == []
    run.train(302)
    moved = lost(run, last_agent_by_node=FORMER_AGENTS, leading_since=NOW)
    assert [(one.token, one.node, one.agent, one.cause) for one in moved] == [
        (FIRST, n, an_agent_id(n), None) for n in range(2)
    ]
    assert moved[0].reason == "it was replaced by machines of another offer"


def test_machines_of_a_network_without_a_round_are_abandoned() -> None:
    run = a_changed_run()
    elect(run, 310, 0, network="a")
    run.members.clear()
    run.connect(FIRST)
    assert lost(run, standby=standby(2, 3)) == []
    run.train(312)
    abandoned = lost(run, standby=standby(2, 3))
    assert [(one.token, one.agent) for one in abandoned] == [(SECOND, None)] * 2
    assert abandoned[0].reason.startswith("no round could be opened in its network")


def test_a_headless_leader_abandons_no_machine_in_another_network() -> None:
    run = a_networked_run(chosen="near")
    assert lost(run, is_headless=True, standby=standby(2, 3), leading_since=NOW) == []


def test_machines_without_an_offer_are_requested_in_the_network_of_the_leader() -> None:
    run = a_networked_run()
    assert network_in_use(run.view) == "a"
    assert network_in_use(a_changed_run().view) == "b"
    assert network_in_use(replace(run.view, network="")) == "a", "the oldest group"
