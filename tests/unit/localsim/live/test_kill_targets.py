"""Kill targets are found by their kind, and other processes continue."""

import subprocess
import sys
from pathlib import Path

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger.journal import Ledger
from spotfit.model.events import LeaderElected
from spotfit.model.topology import Member
from spotfit.store.factory import open_store
from spotfit_localsim.live.kill_targets import KillTargets, kill_processes, processes_with_variable
from spotfit_localsim.random_streams import SeededStreams
from tests.unit.localsim.live.local_cloud_harness import LocalCloudHarness, wait_for_exit

STREAM = SeededStreams(1).stream("kill targets")


def kill_targets_of(local_cloud: LocalCloudHarness) -> KillTargets:
    return KillTargets(local_cloud.root, str(local_cloud.directory / "run"))


def test_kill_without_processes_returns_none(local_cloud: LocalCloudHarness) -> None:
    for kind in ("worker", "fork_server", "agent", "leader", "node"):
        assert kill_targets_of(local_cloud).kill(kind, STREAM) is None


def test_agent_is_killed(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 2)
    agent = local_cloud.next_agent()
    assert kill_targets_of(local_cloud).kill("agent", STREAM) == f"the agent {agent.machine.pid}"
    wait_for_exit(agent.machine.pid)


def test_node_is_killed_with_its_workers(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 2)
    agent = local_cloud.next_agent()
    killed = kill_targets_of(local_cloud).kill("node", STREAM)
    assert killed is not None
    assert "a/0" in killed
    wait_for_exit(agent.machine.pid)
    wait_for_exit(agent.message["worker"])


def test_leader_is_found_by_the_journal(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 4)
    agents = [local_cloud.next_agent(), local_cloud.next_agent()]
    ledger = Ledger(open_store(local_cloud.directory / "run"), RunId("run"), AgentId("agent"))
    ledger.append(LeaderElected(leader=AgentId("agent"), epoch=1), after=ledger.catch_up())
    leader = agents[1].machine.pid
    ledger.publish_member(
        Member(
            agent=AgentId("agent"),
            host="h",
            coordinator_address="h:1",
            slots=2,
            token=Token("a"),
            node=1,
            pid=leader,
        )
    )
    assert kill_targets_of(local_cloud).kill("leader", STREAM) == f"the leader {leader}"
    wait_for_exit(leader)
    assert agents[0].machine.is_alive


def test_marked_process_is_found_and_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"CHAOS_RUN": "of/seed/7"}
    ) as child:
        marked = processes_with_variable("CHAOS_RUN", "of/seed/7")
        assert [one.partition(" ")[0] for one in marked] == [str(child.pid)]
        assert processes_with_variable("CHAOS_RUN", "of/seed") == []
        kill_processes(marked)
        assert child.wait() != 0


def test_variable_name_without_value_does_not_match(tmp_path: Path) -> None:
    assert processes_with_variable("PATH", str(tmp_path)) == []
