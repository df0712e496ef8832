"""A machine serves a node, cleans up and waits for the next one."""

import os
import subprocess
import sys

import pytest

from spotfit.model.group import NodeState
from spotfit_provisioners.local import machine_pool, processes
from tests.unit.localsim.live.local_cloud_harness import (
    LocalCloudHarness,
    StartedAgent,
    wait_for_exit,
)


def end_agent(up: StartedAgent) -> None:
    up.end()
    wait_for_exit(up.message["worker"])


def test_next_run_uses_the_waiting_machine(local_cloud: LocalCloudHarness) -> None:
    first = local_cloud.submit("a", 2)
    before = local_cloud.next_agent()
    end_agent_and_group(local_cloud, before, first)
    local_cloud.submit("b", 2)
    after = local_cloud.next_agent()
    assert after.machine == before.machine
    assert after.message["token"] == "b"
    for name in ("SPOTFIT_HOST", "SPOTFIT_NOTICE_FILE", "SPOTFIT_SCRATCH"):
        assert after.message["environment"][name] != before.message["environment"][name]
    assert after.message["environment"]["TMPDIR"] == before.message["environment"]["TMPDIR"]


def end_agent_and_group(local_cloud: LocalCloudHarness, up: StartedAgent, handle: object) -> None:
    """End the agent and wait until its group is terminated, when its machine can be reused."""
    end_agent(up)
    while not local_cloud.observe(handle).is_terminated:  # type: ignore[arg-type]  # a handle
        os.sched_yield()


def test_machine_is_reused_only_with_an_equal_environment(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = local_cloud.submit("a", 2)
    before = local_cloud.next_agent()
    end_agent_and_group(local_cloud, before, handle)
    monkeypatch.setenv("FLAVOUR", "salt")
    local_cloud.submit("b", 2)
    after = local_cloud.next_agent()
    assert after.message["environment"]["FLAVOUR"] == "salt"
    wait_for_exit(before.machine.pid)  # it could never be reused


def test_release_of_a_reused_machine_releases_its_second_group(
    local_cloud: LocalCloudHarness,
) -> None:
    first = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    end_agent_and_group(local_cloud, up, first)
    second = local_cloud.submit("b", 2)
    local_cloud.next_agent()
    local_cloud.provisioner.cancel(first)
    assert local_cloud.observe(second).nodes[0].state == NodeState.RUNNING
    local_cloud.provisioner.cancel(second)
    wait_for_exit(up.machine.pid)


def test_machine_without_idle_time_exits_at_once(local_cloud: LocalCloudHarness) -> None:
    local_cloud.configure(idle_s=0)
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    up.end()
    wait_for_exit(up.machine.pid)
    assert local_cloud.observe(handle).is_terminated
    assert not local_cloud.root.path.exists()


def test_released_machine_is_gone(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    up.end(code=75)
    wait_for_exit(up.machine.pid)
    assert local_cloud.observe(handle).nodes[0].state == NodeState.GONE
    assert not local_cloud.root.path.exists()


def test_second_machine_of_a_node_exits(local_cloud: LocalCloudHarness) -> None:
    """A machine of a killed submitter that was not recorded, and one of its successor."""
    local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    (node,) = [node for group in local_cloud.root.groups() for node in group.nodes()]
    command = [sys.executable, "-m", "spotfit_provisioners.local.machine", str(node.path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert node.machine() == up.machine
    assert local_cloud.is_quiet()


def test_agent_that_cannot_be_loaded_is_reported(local_cloud: LocalCloudHarness) -> None:
    local_cloud.configure(agent="nowhere:at_all")
    handle = local_cloud.submit("a", 2)
    for machine in local_cloud.machines():
        wait_for_exit(machine.pid)
    (node,) = local_cloud.observe(handle).nodes
    assert node.state == NodeState.FAILED
    assert "No module named 'nowhere'" in node.reason


DRIVER = """
import sys
from pathlib import Path
from tests.unit.localsim.live.local_cloud_harness import LocalCloudHarness
local_cloud = LocalCloudHarness(Path(sys.argv[1]))
for token in sys.argv[2:]:
    local_cloud.submit(token, 2)
print("submitted", flush=True)
sys.stdin.readline()
"""


def driver(local_cloud: LocalCloudHarness, *tokens: str) -> subprocess.Popen[str]:
    """Another process that calls fit()."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(local_cloud.directory), *tokens],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_waiting_machine_exits_with_its_driver_and_a_training_one_continues(
    local_cloud: LocalCloudHarness,
) -> None:
    with driver(local_cloud, "a", "b") as other:
        first, second = local_cloud.next_agent(), local_cloud.next_agent()
        end_agent(first)
        other.kill()
    wait_for_exit(first.machine.pid)
    assert second.machine.is_alive
    second.end()
    wait_for_exit(second.machine.pid)
    local_cloud.root.collect_garbage()
    assert not local_cloud.root.path.exists()


def test_driver_exit_dismisses_waiting_machines(local_cloud: LocalCloudHarness) -> None:
    with driver(local_cloud, "a") as other:
        assert other.stdout is not None
        up = local_cloud.next_agent()
        assert other.stdout.readline() == "submitted\n"
        end_agent(up)
        while local_cloud.root.group(local_cloud.launch.run_id, up.message["token"]).exists:
            os.sched_yield()
        other.communicate("\n")
    assert not up.machine.is_alive
    assert not local_cloud.root.path.exists()


def test_machine_serves_only_its_driver(local_cloud: LocalCloudHarness) -> None:
    with driver(local_cloud, "a") as other:
        agent_of_driver = local_cloud.next_agent()
        end_agent(agent_of_driver)
        local_cloud.submit("b", 2)
        assert local_cloud.next_agent().machine != agent_of_driver.machine
        other.communicate("\n")


def test_requests_of_a_machine_belong_to_its_driver(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader requests a replacement, which belongs to the driver and has its environment."""
    handle = local_cloud.submit("a", 2)
    first = local_cloud.next_agent()
    monkeypatch.setenv(machine_pool.OWNER_ENV, str(processes.current_process()))
    monkeypatch.setenv(machine_pool.ROOT_ENV, str(local_cloud.root.path))
    monkeypatch.setenv(machine_pool.TMPDIR_ENV, "")
    monkeypatch.setenv("TMPDIR", first.message["environment"]["TMPDIR"])
    replacement = local_cloud.submit("b", 2)
    second = local_cloud.next_agent()
    assert second.message["environment"]["TMPDIR"] != first.message["environment"]["TMPDIR"]
    for name in (machine_pool.OWNER_ENV, machine_pool.ROOT_ENV, machine_pool.TMPDIR_ENV, "TMPDIR"):
        monkeypatch.delenv(name)
    end_agent_and_group(local_cloud, second, replacement)
    local_cloud.submit("c", 2)
    assert local_cloud.next_agent().machine == second.machine
    local_cloud.provisioner.cancel(handle)
