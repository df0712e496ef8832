"""Rounds, rank assignments and preemption information."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from spotfit.model.topology import MachineSize, PreemptionInfo
from spotfit.testing.builders import a_member, a_round, an_agent_id

ROUND = a_round(members=[a_member(0, slots=2), a_member(1, slots=3)])
INFO = PreemptionInfo(1_000, {"node-b": [3, 2], "node-a": [1]})


def test_ranks_are_consecutive_over_the_nodes() -> None:
    assert ROUND.world_size == 5
    assert [ROUND.assignment_for_rank(rank).agent for rank in range(5)] == [
        *[an_agent_id(0)] * 2,
        *[an_agent_id(1)] * 3,
    ]


def test_a_size_states_the_limit_of_the_container_and_the_machine() -> None:
    gib = 2**30
    size = MachineSize(
        cpus=4,
        memory_bytes=14 * gib,
        machine_memory_bytes=15 * gib,
        shared_memory_bytes=7 * gib,
        gpus=1,
    )
    memory = "14.0 GiB memory (limit of the container; 15.0 GiB in all)"
    assert str(size) == f"4 CPUs, {memory}, 7.0 GiB /dev/shm, 1 GPU"
    unlimited = MachineSize(cpus=1, memory_bytes=15 * gib, machine_memory_bytes=15 * gib)
    assert str(unlimited) == "1 CPU, 15.0 GiB memory, 0 B /dev/shm, no GPU"


def test_an_unknown_instance_is_shared_with_no_machine() -> None:
    members = [a_member(0), a_member(1), a_member(2, instance="i"), a_member(3, instance="i")]
    a, b, c, d = a_round(members=members).assignments
    assert (a.shares_instance(b), b.shares_instance(c), c.shares_instance(d)) == (
        False,
        False,
        True,
    )


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
