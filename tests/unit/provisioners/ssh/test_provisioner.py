"""Behavior of the ssh provisioner beyond the conformance suite, with a real sshd on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.core.errors import InfrastructureError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.host.system import SystemClock, new_run_id
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, NodeState
from spotfit.provision.api import Refusal
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_provisioners.ssh.provisioner import SshProvisioner
from tests.ssh_hosts import SshHosts, requires_sshd, run_ssh_hosts

pytestmark = [requires_sshd, pytest.mark.real_time("real hosts use real time")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with run_ssh_hosts(tmp_path_factory.mktemp("ssh"), 3) as hosts:
        yield hosts


@pytest.fixture
def make_provisioner(hosts: SshHosts, tmp_path: Path) -> Callable[..., SshProvisioner]:
    """Return a provisioner with these hosts and the options of the tests."""

    def make(*names: str, **options: Any) -> SshProvisioner:
        return SshProvisioner.with_options(
            **{
                "hosts": names or hosts.names,
                "config": str(hosts.config),
                "state_dir": str(hosts.state_dir / tmp_path.name),
                "python": sys.executable,
                "grace_s": 1.0,
                **options,
            }
        )

    return make


By = Callable[..., SshProvisioner]


@pytest.fixture
def launch(tmp_path: Path) -> AgentLaunchSpec:
    return AgentLaunchSpec(str(tmp_path), new_run_id(), "the secret itself")


def a_plan(provisioner: SshProvisioner, token: str, workers: int = 2) -> GroupPlan:
    """Submit a group whose machines sleep instead of running agents."""
    plan = provisioner.plan(
        GroupRequest(token=Token(token), num_workers=workers, total_workers=workers)
    )
    return msgspec.structs.replace(plan, body={**plan.body, "agent": "exec sleep 100"})


def submit_group(
    provisioner: SshProvisioner, plan: GroupPlan, launch: AgentLaunchSpec
) -> GroupHandle:
    handle = provisioner.submit(plan, launch)
    assert isinstance(handle, GroupHandle), handle
    return handle


def cancel_group(provisioner: SshProvisioner, handle: GroupHandle) -> None:
    provisioner.cancel(handle)
    clock = SystemClock()
    deadline = clock.now() + 60
    while not provisioner.observe(handle).is_terminated:
        assert clock.now() < deadline
        clock.wait(0.1)


def test_concurrent_submissions_get_one_group(
    make_provisioner: By, launch: AgentLaunchSpec, hosts: SshHosts
) -> None:
    provisioner = make_provisioner()
    plan = a_plan(provisioner, "t-1")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: submit_group(provisioner, plan, launch), range(2))
    assert first == second
    assert first.detail["hosts"] == ["h1", "h2"]
    assert not hosts.processes("h3")
    cancel_group(provisioner, first)
    assert not hosts.processes()


def test_concurrent_submissions_on_different_hosts_agree_on_the_first(
    make_provisioner: By, launch: AgentLaunchSpec, hosts: SshHosts
) -> None:
    """One submission did not reach h1 and started on h2."""
    other = make_provisioner("h2")
    submit_group(other, a_plan(other, "t-1", 1), launch)
    provisioner = make_provisioner()
    plan = a_plan(provisioner, "t-1", 1)
    provisioner._start_machine(0, ["h1"], plan=plan, launch=launch)
    assert submit_group(provisioner, plan, launch).detail["hosts"] == ["h1"]
    assert not hosts.processes("h2")
    cancel_group(provisioner, submit_group(provisioner, plan, launch))


def test_unreachable_and_busy_hosts_are_skipped(
    make_provisioner: By, launch: AgentLaunchSpec
) -> None:
    provisioner = make_provisioner("down", "h1", "h2")
    first = submit_group(provisioner, a_plan(provisioner, "t-1", 1), launch)
    assert first.detail["hosts"] == ["h1"]
    second = submit_group(provisioner, a_plan(provisioner, "t-2", 1), launch)
    assert second.detail["hosts"] == ["h2"]
    refusal = provisioner.submit(a_plan(provisioner, "t-3", 1), launch)
    assert isinstance(refusal, Refusal)
    assert not refusal.is_final
    assert "h1: another agent runs on it" in refusal.reason
    assert "down does not answer" in refusal.reason
    cancel_group(provisioner, first)
    cancel_group(provisioner, second)


def test_too_few_hosts_undo_a_partial_start(
    make_provisioner: By, launch: AgentLaunchSpec, hosts: SshHosts
) -> None:
    provisioner = make_provisioner("h1", "down")
    plan = a_plan(provisioner, "t-1")
    assert isinstance(provisioner.submit(plan, launch), Refusal)
    provisioner._start_machine(0, ["h1"], plan=plan, launch=launch)
    assert hosts.processes("h1")
    assert isinstance(provisioner.submit(plan, launch), Refusal)
    assert not hosts.processes("h1")


def test_host_with_a_failed_agent_comes_last(make_provisioner: By, launch: AgentLaunchSpec) -> None:
    provisioner = make_provisioner("h1", "h2")
    plan = a_plan(provisioner, "t-1", 1)
    broken = msgspec.structs.replace(plan, body={**plan.body, "agent": "no-such-command"})
    failed = submit_group(provisioner, broken, launch)
    cancel_group(provisioner, failed)
    assert provisioner.observe(failed).nodes[0].state == NodeState.FAILED
    second = submit_group(provisioner, a_plan(provisioner, "t-2", 1), launch)
    assert second.detail["hosts"] == ["h2"]
    cancel_group(provisioner, second)


def test_unresponsive_host_is_retried_and_can_be_released(make_provisioner: By) -> None:
    provisioner = make_provisioner("down")
    handle = GroupHandle(
        token=Token("t-1"),
        provisioner="ssh",
        name="t-1",
        detail={"hosts": ["down"], "state_dir": "x"},
    )
    (node,) = provisioner.observe(handle).nodes
    assert node.state == NodeState.WAITING
    assert "does not answer" in node.reason
    provisioner.cancel(handle)


def test_submission_without_reachable_hosts_is_retryable(
    make_provisioner: By, launch: AgentLaunchSpec
) -> None:
    provisioner = make_provisioner("down", "unverified")
    with pytest.raises(InfrastructureError, match="down does not answer"):
        provisioner.submit(a_plan(provisioner, "t-1", 1), launch)


def test_unverified_host_receives_nothing(make_provisioner: By, launch: AgentLaunchSpec) -> None:
    provisioner = make_provisioner("unverified")
    with pytest.raises(ProvisionPermissionError, match="is not in known_hosts"):
        provisioner.submit(a_plan(provisioner, "t-1", 1), launch)


def test_doctor_checks_every_host(make_provisioner: By, monkeypatch: pytest.MonkeyPatch) -> None:
    client, sound, silent, unknown, *reaches = make_provisioner(
        "h1", "down", "unverified"
    ).check_account()
    assert client.passed
    assert sound.passed
    assert "GiB free" in sound.detail
    assert not silent.passed
    assert "Check that it is running" in silent.do
    assert "known_hosts" in unknown.do
    assert [one.name for one in reaches] == [
        "h1 reaches down",
        "down reaches unverified",
        "unverified reaches h1",
    ]
    assert [(one.passed, one.conclusive) for one in reaches] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "port 1" in reaches[0].detail
    (_, without) = make_provisioner("h1", python="/usr/bin/no-such-python").check_account()
    assert not without.passed
    monkeypatch.setenv("PATH", "/none")
    assert [check.passed for check in make_provisioner("h1").check_account()] == [False]


def test_doctor_reports_hosts_that_reach_each_other(make_provisioner: By) -> None:
    reaches = [one for one in make_provisioner("h1", "h2").check_account() if "reaches" in one.name]
    assert [(one.name, one.conclusive) for one in reaches] == [
        ("h1 reaches h2", True),
        ("h2 reaches h1", True),
    ]


def test_output_of_an_agent_is_read_from_its_host(
    make_provisioner: By, launch: AgentLaunchSpec
) -> None:
    provisioner = make_provisioner("h1")
    plan = provisioner.plan(GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1))
    body = {**plan.body, "agent": "echo no module; echo at all; exit 1"}
    handle = submit_group(provisioner, msgspec.structs.replace(plan, body=body), launch)
    cancel_group(provisioner, handle)
    [output] = provisioner.fetch_machine_output(handle, 0, max_lines=1)
    assert output.source.startswith("h1:")
    assert output.lines == ("at all",)
    gone = msgspec.structs.replace(handle, name="t-9")
    assert provisioner.fetch_machine_output(gone, 0, max_lines=1) == []


def test_host_with_another_python_version_fails_the_check(
    make_provisioner: By, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Python 3.6.1, spotfit 0.1, 100 GiB free\n")
    python.chmod(0o755)
    (_, other) = make_provisioner("h1", python=str(python)).check_account()
    assert "Python 3.6.1" in other.detail
    assert "python=" in other.do
