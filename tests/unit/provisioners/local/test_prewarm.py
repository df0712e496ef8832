"""Prewarmed machines: used by the next group, or ended without leaving files."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest, NodeState
from spotfit_provisioners.local import prewarm, processes
from spotfit_provisioners.local.processes import ProcessIdentity
from tests.unit.localsim.live.local_cloud_harness import SECRET, LocalCloudHarness, wait_for_exit

FRAMEWORK = "none"


def plan(local_cloud: LocalCloudHarness, workers: int = 4) -> GroupPlan:
    return local_cloud.provisioner.plan(
        GroupRequest(token=Token("t-preflight"), num_workers=workers, total_workers=4)
    )


def waiting(local_cloud: LocalCloudHarness) -> set[ProcessIdentity]:
    return {one.process for one in prewarm._unassigned if one.root == local_cloud.root}


def test_run_uses_prewarmed_machines(local_cloud: LocalCloudHarness) -> None:
    with local_cloud.provisioner.prewarm(plan(local_cloud), FRAMEWORK):
        started = waiting(local_cloud)
        assert len(started) == 2
        handle = local_cloud.submit("a", 4)
        assert not waiting(local_cloud)
    ups = [local_cloud.next_agent(), local_cloud.next_agent()]
    assert {up.machine for up in ups} == started
    assert sorted(up.message["node"] for up in ups) == [0, 1]
    assert [node.state for node in local_cloud.observe(handle).nodes] == [NodeState.RUNNING] * 2


def test_prewarmed_machine_serves_like_any_other(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAVOUR", "salt")
    with local_cloud.provisioner.prewarm(plan(local_cloud, 2), FRAMEWORK):
        local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    assert up.message["secret"] == SECRET
    assert SECRET not in " ".join(up.message["argv"])
    assert up.message["environment"]["FLAVOUR"] == "salt"
    assert up.message["environment"]["TMPDIR"].startswith(
        str(local_cloud.root.machine_dir(up.machine))
    )
    assert up.message["environment"]["SPOTFIT_NOTICE_FILE"].startswith(str(local_cloud.root.path))
    up.end()
    local_cloud.submit("b", 2)
    assert local_cloud.next_agent().message["token"] == "b"


def test_unused_prewarmed_machines_leave_nothing(local_cloud: LocalCloudHarness) -> None:
    with local_cloud.provisioner.prewarm(plan(local_cloud), FRAMEWORK):
        started = waiting(local_cloud)
    assert started
    for machine in started:
        wait_for_exit(machine.pid)
    assert not local_cloud.root.path.exists()


def test_error_before_submission_dismisses_prewarmed_machines(
    local_cloud: LocalCloudHarness,
) -> None:
    started: set[ProcessIdentity] = set()

    def interrupted() -> None:
        with local_cloud.provisioner.prewarm(plan(local_cloud), FRAMEWORK):
            started.update(waiting(local_cloud))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started
    for machine in started:
        wait_for_exit(machine.pid)


@contextlib.contextmanager
def killed_driver(local_cloud: LocalCloudHarness, *, nodes: int, line: str) -> Iterator[list[int]]:
    """Kill a driver that has prewarmed machines; yield the numbers that its `line` has printed."""
    driver = (
        "import os, signal, sys\n"
        "from spotfit.core.ids import Token\n"
        "from spotfit.model.group import GroupRequest\n"
        "from spotfit_provisioners.local import prewarm\n"
        "from spotfit_provisioners.local.provisioner import LocalProvisioner\n"
        f"local = LocalProvisioner(nodes={nodes}, root=sys.argv[1])\n"
        f"request = GroupRequest(token=Token('t'), num_workers={nodes}, total_workers={nodes})\n"
        "with local.prewarm(local.plan(request), 'none'):\n"
        "    machines = [one.process.pid for one in prewarm._unassigned]\n"
        f"    {line}\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", driver, str(local_cloud.root.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as requests:
        assert requests.stdout is not None
        printed = [int(number) for number in requests.stdout.readline().split()]
        requests.send_signal(signal.SIGKILL)
        requests.wait()
        yield printed


def test_prewarmed_machines_exit_with_their_driver(local_cloud: LocalCloudHarness) -> None:
    with killed_driver(local_cloud, nodes=2, line="print(*machines, flush=True)") as machines:
        assert len(machines) == 2
        for machine in machines:
            wait_for_exit(machine)
    assert not local_cloud.root.path.exists()


def test_prewarmed_machine_exits_although_a_fork_of_its_driver_runs(
    local_cloud: LocalCloudHarness,
) -> None:
    """The fork has inherited the driver's end of the pipe."""
    line = "print(os.fork() or signal.pause(), *machines, flush=True)"
    with killed_driver(local_cloud, nodes=1, line=line) as (fork, machine):
        try:
            wait_for_exit(machine)
        finally:
            os.kill(fork, signal.SIGKILL)
    assert not local_cloud.root.path.exists()


@pytest.mark.parametrize("is_sent", [True, False])
def test_prewarmed_machine_waits_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    monkeypatch.setattr(prewarm, "MAX_WAIT_S", 0.0)
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as pipe, os.fdopen(write_end, "w") as driver:
        if is_sent:
            driver.write("/a/node\n")
            driver.flush()
        assert prewarm._wait_for_line(pipe.fileno(), processes.current_process()) is is_sent


def test_prewarmed_machine_recreates_a_removed_root(
    local_cloud: LocalCloudHarness,
) -> None:
    """Its driver was killed at once, and the next one removed the root. Chaos seed 6000002."""
    command = [
        *prewarm.MACHINE_COMMAND,
        prewarm.WAIT_FLAG,
        str(local_cloud.root.path),
        "2",
        FRAMEWORK,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as machine:
        while not any((home / "tmp").exists() for home in local_cloud.root.path.glob("machines/*")):
            assert machine.poll() is None
            os.sched_yield()
        local_cloud.root.ensure()  # raises for a root that other users can enter
        machine.communicate()
    assert machine.returncode == 0
    assert not local_cloud.root.path.exists()


def test_prewarmed_machine_with_another_environment_is_not_used(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_cloud.provisioner.prewarm(plan(local_cloud, 2), FRAMEWORK):
        (started,) = waiting(local_cloud)
        monkeypatch.setenv("FLAVOUR", "salt")
        local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    assert up.machine != started
    assert up.message["environment"]["FLAVOUR"] == "salt"
    wait_for_exit(started.pid)


def test_ended_prewarmed_machine_is_replaced(local_cloud: LocalCloudHarness) -> None:
    with local_cloud.provisioner.prewarm(plan(local_cloud, 2), FRAMEWORK):
        (started,) = waiting(local_cloud)
        processes.kill_process_tree(started)
        wait_for_exit(started.pid)
        handle = local_cloud.submit("a", 2)
    assert local_cloud.next_agent().machine != started
    assert local_cloud.observe(handle).nodes[0].state == NodeState.RUNNING


def test_no_machine_is_prewarmed_without_capacity(local_cloud: LocalCloudHarness) -> None:
    local_cloud.configure(capacity=1)
    with local_cloud.provisioner.prewarm(plan(local_cloud), FRAMEWORK):
        assert not waiting(local_cloud)


def test_no_machine_is_prewarmed_if_machines_wait(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 2)
    local_cloud.next_agent()
    with local_cloud.provisioner.prewarm(plan(local_cloud), FRAMEWORK):
        assert not waiting(local_cloud)


def test_machine_does_not_prewarm(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_LOCAL_OWNER", f"{os.getppid()}-1")
    with local_cloud.provisioner.prewarm(plan(local_cloud), FRAMEWORK):
        assert not waiting(local_cloud)
