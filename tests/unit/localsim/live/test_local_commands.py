"""`spotfit local` preempts nodes of the chosen run only."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitStarted
from spotfit.model.group import NodeState
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.store.factory import open_store
from spotfit.testing.builders import a_spec, an_agent_id
from spotfit_localsim.live.local_commands import app
from spotfit_localsim.live.preemption import Reclaimer
from spotfit_provisioners.local.state_dir import LocalNode
from tests.unit.localsim.live.local_cloud_harness import SECRET, LocalCloudHarness, wait_for_exit


def invoke(local_cloud: LocalCloudHarness, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--root", str(local_cloud.root.path)])


def start_nodes(local_cloud: LocalCloudHarness, run: str, token: str) -> str:
    """Start two nodes of a run; return the directory of the run."""
    url = str(local_cloud.directory / run)
    ledger = Ledger(open_store(url), RunId(run), an_agent_id(0))
    ledger.append(FitStarted(spec=a_spec(run_id=RunId(run))), after=ledger.catch_up())
    local_cloud.launch = AgentLaunchSpec(str(local_cloud.directory), RunId(run), SECRET)
    local_cloud.submit(token, 4)
    for _ in range(2):
        local_cloud.next_agent()
    return url


def end_node(local_cloud: LocalCloudHarness, node: LocalNode, *arguments: str) -> str:
    """Run a command that kills the node; return its output after the node's process has ended."""
    machine = node.machine()
    assert machine is not None
    shown = invoke(local_cloud, *arguments).stdout
    wait_for_exit(machine.pid)
    return shown


def node_of(local_cloud: LocalCloudHarness, run: str, token: str, number: int) -> LocalNode:
    return local_cloud.root.group(RunId(run), Token(token)).node(number)


def running_nodes(local_cloud: LocalCloudHarness) -> list[str]:
    nodes = Reclaimer(local_cloud.root).running_nodes()
    return [f"{node.group.token}/{node.number}" for node in nodes]


def test_kill_ends_a_node_of_the_only_run(local_cloud: LocalCloudHarness) -> None:
    start_nodes(local_cloud, "one", "a")
    node = node_of(local_cloud, "one", "a", 0)
    assert "a/0 was killed" in end_node(local_cloud, node, "kill")
    assert running_nodes(local_cloud) == ["a/1"]
    status = node.status()
    assert (status.state, status.reason) == (NodeState.GONE, "reclaimed without notice")


def test_nodes_of_other_runs_are_not_affected(local_cloud: LocalCloudHarness) -> None:
    start_nodes(local_cloud, "one", "a")
    url = start_nodes(local_cloud, "two", "b")
    ambiguous = invoke(local_cloud, "kill").exception
    assert isinstance(ambiguous, ConfigError)
    assert "Several runs have nodes" in ambiguous.message
    assert running_nodes(local_cloud) == ["a/0", "a/1", "b/0", "b/1"]
    node = node_of(local_cloud, "two", "b", 1)
    assert "b/1 was killed" in end_node(local_cloud, node, "kill", url, "--node", "b/1")
    assert running_nodes(local_cloud) == ["a/0", "a/1", "b/0"]
    foreign = invoke(local_cloud, "kill", url, "--node", "a/0").exception
    assert isinstance(foreign, ConfigError)
    assert foreign.do == "Pass one of its nodes: b/0."


def test_a_node_with_a_notice_is_killed_at_its_deadline(local_cloud: LocalCloudHarness) -> None:
    start_nodes(local_cloud, "one", "a")
    node = node_of(local_cloud, "one", "a", 1)
    shown = end_node(local_cloud, node, "notice", "--node", "a/1", "--seconds", "0")
    assert "a/1 has 0.00 s left" in shown
    assert "a/1 was killed" in shown
    assert node.notice_path.exists()
    assert node.status().reason == "reclaimed after its notice"


def test_ls_shows_the_nodes_of_a_run(local_cloud: LocalCloudHarness) -> None:
    url = start_nodes(local_cloud, "one", "a")
    start_nodes(local_cloud, "two", "b")
    end_node(local_cloud, node_of(local_cloud, "one", "a", 0), "kill", url)
    lines = invoke(local_cloud, "ls", url).stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [["run", "one", "a/0"], ["run", "one", "a/1"]]
    assert "gone" in lines[0]
    assert "running" in lines[1]
    assert len(invoke(local_cloud, "ls").stdout.splitlines()) == 4


def test_without_nodes_the_remedy_names_the_backend(
    local_cloud: LocalCloudHarness, tmp_path: Path
) -> None:
    assert "There are no nodes in" in invoke(local_cloud, "ls").stdout
    for command in (["kill"], ["kill", str(tmp_path / "no run")]):
        refused = invoke(local_cloud, *command).exception
        assert isinstance(refused, ConfigError)
        assert refused.do


@pytest.mark.parametrize("command", ["kill", "notice"])
def test_a_run_without_nodes_here_is_refused(
    local_cloud: LocalCloudHarness, command: str, tmp_path: Path
) -> None:
    start_nodes(local_cloud, "one", "a")
    ledger = Ledger(open_store(tmp_path / "other"), RunId("other"), an_agent_id(0))
    ledger.append(FitStarted(spec=a_spec(run_id=RunId("other"))), after=ledger.catch_up())
    refused = invoke(local_cloud, command, str(tmp_path / "other")).exception
    assert isinstance(refused, ConfigError)
    assert "no running node" in refused.message
    assert running_nodes(local_cloud) == ["a/0", "a/1"]
