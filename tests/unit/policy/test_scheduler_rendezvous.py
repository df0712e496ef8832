"""Rendezvous: when a round opens, its members and ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.ids import AgentId, Token
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.spec import RunTiming
from spotfit.model.topology import Round, SnapshotId, SnapshotShard
from spotfit.model.view import View
from spotfit.policy.actions import Wait
from spotfit.policy.scheduler import next_round
from spotfit.testing.builders import (
    TOKEN,
    a_committed_checkpoint,
    a_final_group_status,
    a_group,
    a_leader_state,
    a_member,
    a_member_status,
    a_notice,
    a_round,
    a_spec,
    a_view,
    an_agent_id,
    member_statuses,
)

NOW = 1000.0


def round_of(view: View, observations: LeaderState, now: float = NOW) -> Round:
    round_ = next_round(view, observations, now)
    assert isinstance(round_, Round), round_
    return round_


def wait_of(view: View, observations: LeaderState, now: float = NOW) -> Wait:
    wait = next_round(view, observations, now)
    assert isinstance(wait, Wait), wait
    assert wait.until > now
    return wait


def test_the_first_round_starts_without_a_checkpoint() -> None:
    round_ = round_of(a_view(), a_leader_state())
    assert (round_.number, round_.checkpoint_name, round_.world_size) == (1, None, 2)


def test_the_next_round_starts_from_the_latest_checkpoint() -> None:
    view = a_view(
        last_round=a_round(6),
        checkpoints=(a_committed_checkpoint("c1"), a_committed_checkpoint("c2")),
    )
    round_ = round_of(view, a_leader_state())
    assert (round_.number, round_.checkpoint_name) == (7, "c2")


def test_a_range_of_one_size_waits_for_all_workers() -> None:
    only = a_spec(min_workers=2, max_workers=2, is_elastic=True)
    assert wait_of(
        a_view(spec=only), a_leader_state(members=member_statuses(a_member_status(0))), NOW + 999.0
    )
    three = a_leader_state(
        members=member_statuses(
            a_member_status(0), a_member_status(1), a_member_status(2, member=a_member(2, node=2))
        )
    )
    group = a_group(nodes=3)
    assert round_of(a_view(spec=only, groups={TOKEN: group}), three).world_size == 2


def test_a_round_waits_for_stopping_workers() -> None:
    observations = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1, running_round=1))
    )
    assert "are stopping on 1 nodes" in wait_of(a_view(), observations).reason


def test_a_round_waits_for_min_workers() -> None:
    assert wait_of(
        a_view(), a_leader_state(members=member_statuses(a_member_status(0)))
    ).reason == ("slots for 1 of at least 2 workers")


def test_a_round_has_at_least_one_worker() -> None:
    view = a_view(spec=a_spec(min_workers=0, max_workers=2), groups={})
    assert wait_of(view, a_leader_state(members={})).reason.startswith("slots for 0 of at least")


def test_a_few_rounds_without_progress_are_not_delayed() -> None:
    assert (
        round_of(
            a_view(rounds_without_progress=5), a_leader_state(phase=NoRound(since=NOW))
        ).world_size
        == 2
    )


@pytest.mark.parametrize(
    ("without_progress", "pause_s"), [(6, 0.2), (7, 0.4), (13, 25.6), (14, 30.0), (10**6, 30.0)]
)
def test_rounds_without_progress_back_off(without_progress: int, pause_s: float) -> None:
    view, observations = (
        a_view(rounds_without_progress=without_progress),
        a_leader_state(phase=NoRound(since=NOW)),
    )
    wait = wait_of(view, observations)
    assert wait.until == pytest.approx(NOW + pause_s)
    assert wait.reason == f"{without_progress} rounds in a row ended without a checkpoint"
    assert round_of(view, observations, wait.until).world_size == 2


def test_a_machine_on_its_last_attempt_is_assigned_only_if_needed() -> None:
    spare = Token("t-2")
    groups = {TOKEN: a_group(), spare: a_group(token=spare, nodes=1)}
    fresh = a_member_status(2, member=a_member(2, token=spare, node=0))
    last: dict[str, Any] = {"group_statuses": {TOKEN: a_final_group_status(0)}}
    three = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1), fresh), **last
    )
    places = round_of(a_view(groups=groups), three).assignments
    assert [place.agent for place in places] == [an_agent_id(1), an_agent_id(2)]
    both = round_of(a_view(groups=groups), a_leader_state(**last)).assignments
    assert [place.agent for place in both] == [an_agent_id(0), an_agent_id(1)]


def test_a_leaving_node_is_not_assigned() -> None:
    view = a_view(spec=a_spec(min_workers=1, max_workers=2), notices={an_agent_id(0): a_notice()})
    assert [place.agent for place in round_of(view, a_leader_state()).assignments] == [
        an_agent_id(1)
    ]


# --- an elastic group ----------------------------------------------------------------------------

ELASTIC: dict[str, Any] = {
    "spec": a_spec(min_workers=1, max_workers=2, timing=RunTiming(round_fill_timeout_s=60.0))
}
ONE = member_statuses(a_member_status(0))


def test_a_round_waits_for_pending_machines() -> None:
    wait = wait_of(a_view(**ELASTIC), a_leader_state(members=ONE, phase=NoRound(since=NOW - 10)))
    assert wait.until == NOW + 50
    assert "more machines are booting" in wait.reason


@pytest.mark.parametrize(
    ("view", "observations"),
    [
        (a_view(**ELASTIC), a_leader_state(members=ONE, phase=NoRound(since=NOW - 60))),
        (
            a_view(**ELASTIC, groups={TOKEN: a_group(nodes=1)}),
            a_leader_state(members=ONE, phase=NoRound(since=NOW)),
        ),
        (
            a_view(**ELASTIC, last_refusal="full", refusals=1),
            a_leader_state(members=ONE, phase=NoRound(since=NOW), refused_at={"train": NOW - 0.5}),
        ),
    ],
    ids=["timeout", "no machine pending", "refused"],
)
def test_an_elastic_round_starts_smaller(view: View, observations: LeaderState) -> None:
    assert round_of(view, observations).world_size == 1


# --- assignments ---------------------------------------------------------------------------------


def test_surviving_nodes_keep_their_order() -> None:
    order = [a_member(n) for n in (2, 0, 1)]
    view = a_view(
        spec=a_spec(max_workers=4),
        groups={TOKEN: a_group(nodes=4)},
        last_round=a_round(1, members=order),
    )
    observations = a_leader_state(members=member_statuses(*(a_member_status(n) for n in range(4))))
    assert [place.agent for place in round_of(view, observations).assignments] == [
        an_agent_id(2),
        an_agent_id(0),
        an_agent_id(1),
        an_agent_id(3),
    ]


def test_a_node_with_too_many_slots_is_used_in_part() -> None:
    view = a_view(spec=a_spec(max_workers=3), groups={TOKEN: a_group(slots=2)})
    wide = member_statuses(*(a_member_status(member=a_member(n, slots=2)) for n in (0, 1)))
    places = round_of(view, a_leader_state(members=wide)).assignments
    assert [(place.node_rank, list(place.ranks)) for place in places] == [(0, [0, 1]), (1, [2])]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=8),
    st.permutations(range(8)),
    st.integers(0, 8),
)
def test_ranks_are_complete_and_unique(
    expected: int, nodes: list[tuple[int, int]], order: list[int], survivors: int
) -> None:
    members = [
        a_member(n, slots=slots, token=Token(f"t-{group}"), node=n)
        for n, (slots, group) in enumerate(nodes)
    ]
    groups = {Token(f"t-{g}"): a_group(token=Token(f"t-{g}"), nodes=8, slots=1) for g in range(3)}
    before = a_round(
        3, members=[members[n] for n in order if n < min(survivors, len(members))] or ()
    )
    view = a_view(
        spec=a_spec(min_workers=1, max_workers=expected), groups=groups, last_round=before
    )
    round_ = round_of(
        view,
        a_leader_state(members=member_statuses(*(a_member_status(member=one) for one in members))),
        1e9,
    )
    ranks = [rank for place in round_.assignments for rank in place.ranks]
    assert ranks == list(range(min(expected, sum(slots for slots, _ in nodes))))
    assert [place.node_rank for place in round_.assignments] == list(range(len(round_.assignments)))
    agents: list[AgentId] = [place.agent for place in round_.assignments]
    assert len(set(agents)) == len(agents)
    by_agent = {one.agent: one for one in members}
    assert all(0 < place.num_workers <= by_agent[place.agent].slots for place in round_.assignments)


def test_a_round_resumes_from_memory_if_it_is_newer() -> None:
    state, alone = SnapshotId(round=1, step=9), a_member(0, slots=2)
    held = tuple(SnapshotShard(snapshot_id=state, rank=rank, world_size=2) for rank in range(2))
    view = a_view(last_round=a_round(members=[alone]), checkpoints=(a_committed_checkpoint("c1"),))
    round_ = round_of(
        view,
        a_leader_state(
            members=member_statuses(a_member_status(0, member=alone, snapshot_shards=held))
        ),
    )
    assert (round_.checkpoint_name, round_.memory_snapshot) == ("c1", state)
    assert round_.shard_holders == ((an_agent_id(0),), (an_agent_id(0),))
    torn = a_leader_state(
        members=member_statuses(a_member_status(0, member=alone, snapshot_shards=held[:1]))
    )
    assert round_of(view, torn).memory_snapshot is None
