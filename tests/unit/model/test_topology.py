"""Rounds, rank assignments and preemption information."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from spotfit.model.topology import PreemptionInfo
from spotfit.testing.builders import a_member, a_round, an_agent_id

ROUND = a_round(members=[a_member(0, slots=2), a_member(1, slots=3)])
INFO = PreemptionInfo(1_000, {"node-b": [3, 2], "node-a": [1]})


def test_ranks_are_consecutive_over_the_nodes() -> None:
    assert ROUND.world_size == 5
    assert [ROUND.assignment_for_rank(rank).agent for rank in range(5)] == [
        *[an_agent_id(0)] * 2,
        *[an_agent_id(1)] * 3,
    ]


def test_an_agent_without_assignment_gives_none() -> None:
    assignment = ROUND.assignment_of(an_agent_id(1))
    assert assignment is not None
    assert assignment.ranks == range(2, 5)
    assert ROUND.assignment_of(an_agent_id(9)) is None


def test_preempted_nodes_and_ranks_are_sorted() -> None:
    assert INFO.preempted_node_ids == ["node-a", "node-b"]
    assert INFO.preempted_ranks == [1, 2, 3]


def test_a_rank_on_two_preempted_nodes_is_listed_once() -> None:
    info = PreemptionInfo(None, {"n2": [3, 1], "n1": [1]})
    assert info.preempted_ranks == [1, 3]


def test_preemption_info_is_frozen_and_picklable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        INFO.deadline_ms = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(INFO)) == INFO
