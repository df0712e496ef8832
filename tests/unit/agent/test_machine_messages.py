"""Lines about the size of machines, and about machines that share an instance."""

from __future__ import annotations

from functools import partial

import pytest

from spotfit.agent.machine_messages import MachineMessages
from spotfit.model.topology import MachineSize, Member
from spotfit.testing.builders import a_member, a_round
from spotfit_localsim.virtual import sim_machine
from tests.unit.agent.simulated_cluster import FakeCluster

SMALL = MachineSize(cpus=1, memory_bytes=2**30)
LARGE = MachineSize(cpus=8, memory_bytes=2**34, gpus=1)


def test_machines_of_one_size_are_described_together() -> None:
    members = [a_member(n, size=LARGE if n == 2 else SMALL) for n in range(3)]
    assert list(MachineMessages().describe_sizes(members)) == [
        "machines t-1/0, t-1/1: 1 CPU, 1.0 GiB memory, 0 B /dev/shm, no GPU each",
        "machine t-1/2: 8 CPUs, 16.0 GiB memory, 0 B /dev/shm, 1 GPU",
    ]


def test_many_machines_are_counted() -> None:
    (line,) = MachineMessages().describe_sizes(a_member(n, size=SMALL) for n in range(9))
    assert line.startswith("9 machines: 1 CPU")


def test_a_machine_is_described_once() -> None:
    messages = MachineMessages()
    assert len(list(messages.describe_sizes([a_member(0, size=SMALL)]))) == 1
    later = [a_member(0, size=SMALL), a_member(1, size=SMALL)]
    (line,) = messages.describe_sizes(later)
    assert line.startswith("machine t-1/1:")


def test_an_agent_without_a_size_is_left_out() -> None:
    assert list(MachineMessages().describe_sizes([a_member(0)])) == []


def test_a_shared_instance_is_reported_once_with_a_remedy() -> None:
    members = [a_member(0, instance="i-1", slots=2), a_member(1, instance="i-1", slots=2)]
    assignments = a_round(members=[*members, a_member(2, instance="i-2")]).assignments
    messages = MachineMessages()
    (warning,) = messages.warn_of_shared_instances(assignments)
    assert warning.startswith("machines t-1/0, t-1/1 share one instance (i-1)")
    assert "copies of snapshots in memory are kept on other instances" in warning
    assert "workers_per_node=4" in warning
    assert list(messages.warn_of_shared_instances(assignments)) == []


def test_copies_on_the_only_instance_are_lost_with_it() -> None:
    members = [a_member(0, instance="i-1"), a_member(1, instance="i-1")]
    (warning,) = MachineMessages().warn_of_shared_instances(a_round(members=members).assignments)
    assert "copies of snapshots in their memory are lost with it" in warning


def test_machines_of_unknown_or_own_instances_are_not_reported() -> None:
    members = [a_member(0), a_member(1), a_member(2, instance="i-1"), a_member(3, instance="i-2")]
    assignments = a_round(members=members).assignments
    assert list(MachineMessages().warn_of_shared_instances(assignments)) == []


def test_the_leader_writes_the_lines_to_the_log_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sim_machine, "Member", partial(Member, instance="i-1", size=LARGE))
    cluster = FakeCluster()
    cluster.advance_until(lambda: cluster.is_training)
    size, warning = cluster.messages
    assert "8 CPUs, 16.0 GiB memory, 0 B /dev/shm, 1 GPU each" in size
    assert "share one instance (i-1)" in warning
