"""The local provisioner: idempotency, observation of losses, cleanup."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest, NodeState
from spotfit.provision.api import Refusal
from spotfit_provisioners.local import processes
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.provisioner import LocalProvisioner
from spotfit_provisioners.local.state_dir import LocalCloudDir
from tests.unit.localsim.live.local_cloud_harness import SECRET, LocalCloudHarness, wait_for_exit


def states(local_cloud: LocalCloudHarness, handle: object) -> list[NodeState]:
    return [node.state for node in local_cloud.observe(handle).nodes]  # type: ignore[arg-type]  # a handle


@pytest.mark.parametrize(
    ("nodes", "workers", "of", "expected"),
    [(1, 4, 4, (1, 4)), (2, 4, 4, (2, 2)), (2, 2, 4, (1, 2)), (3, 4, 4, (2, 2)), (2, 1, 4, (1, 2))],
)
def test_workers_are_distributed_over_equal_nodes(
    nodes: int, workers: int, of: int, expected: tuple[int, int]
) -> None:
    local = LocalProvisioner(LocalOptions(nodes=nodes))
    request = GroupRequest(token=Token("t"), num_workers=workers, total_workers=of)
    plan = local.plan(request)
    assert (plan.num_nodes, plan.slots_per_node) == expected
    assert local.plan(request) == plan


@pytest.mark.parametrize(("nodes", "fits"), [(1, False), (2, True)])
def test_workers_of_a_node_must_not_need_more_gpus_than_there_are(
    monkeypatch: pytest.MonkeyPatch, nodes: int, fits: bool
) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:0,cuda:1")
    request = GroupRequest(
        token=Token("t"), num_workers=4, total_workers=4, resources_per_worker={"GPU": 1.0}
    )
    local = LocalProvisioner(LocalOptions(nodes=nodes))
    if fits:
        assert local.plan(request).slots_per_node == 2
    else:
        with pytest.raises(ConfigError, match="this machine has 2 GPUs") as refused:
            local.plan(request)
        assert "SPOTFIT_DEVICES" in refused.value.do


@pytest.mark.parametrize(
    "request_",
    [
        GroupRequest(token=Token("../t"), num_workers=1, total_workers=1),
        GroupRequest(token=Token("t"), num_workers=0, total_workers=1),
    ],
)
def test_invalid_values_are_rejected(request_: GroupRequest) -> None:
    with pytest.raises(ConfigError):
        LocalProvisioner().plan(request_)


@pytest.mark.parametrize(
    ("prices", "name"),
    [
        ({}, "local/spot"),
        ({"*": {"on_demand": 0}}, "local/on_demand"),
        ({"*": {"spot": 1, "on_demand": 2}}, "local/spot"),
    ],
)
def test_this_computer_has_one_offer(prices: dict[str, dict[str, float]], name: str) -> None:
    local = LocalProvisioner(LocalOptions(prices=prices))
    request = GroupRequest(token=Token("t"), num_workers=1, total_workers=1)
    (offer,) = local.offers(request).offers
    assert offer.name == local.offers(request).default == name
    assert local.plan(replace(request, offer=offer)) == local.plan(request)
    other = replace(offer, machine_type="p5.48xlarge")
    with pytest.raises(ConfigError, match="one offer"):
        local.plan(replace(request, offer=other))


def test_end_of_a_machine_is_recorded_by_the_first_observation(
    local_cloud: LocalCloudHarness,
) -> None:
    handle = local_cloud.submit("a", 1)
    assert handle.offer == "local/spot"
    up = local_cloud.next_agent()
    started_at_ms = local_cloud.observe(handle).nodes[0].started_at_ms
    assert started_at_ms is not None
    processes.kill_process_tree(up.machine)
    (node,) = local_cloud.observe(handle).nodes
    assert node.started_at_ms == started_at_ms
    assert node.ended_at_ms is not None
    assert node.ended_at_ms >= started_at_ms
    assert local_cloud.observe(handle).nodes == (node,)


def test_every_node_is_a_process_group(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 4)
    first, second = local_cloud.next_agent(), local_cloud.next_agent()
    assert {first.message["node"], second.message["node"]} == {0, 1}
    assert first.message["group"] == first.machine.pid != second.message["group"]
    assert os.getsid(first.machine.pid) == first.machine.pid
    assert states(local_cloud, handle) == [NodeState.RUNNING, NodeState.RUNNING]
    hosts = {up.message["environment"]["SPOTFIT_HOST"] for up in (first, second)}
    assert len(hosts) == 2
    assert all(host.startswith("127.0.") for host in hosts)


def test_machines_are_detached_processes(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 2)
    assert local_cloud.next_agent().machine.pid not in processes.descendant_pids(os.getpid())


def test_run_key_is_on_no_command_line_and_in_no_file(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    assert up.message["secret"] == SECRET
    assert not any(SECRET in argument for argument in up.message["argv"])
    assert SECRET.encode() not in Path(f"/proc/{up.machine.pid}/environ").read_bytes()
    files = (path for path in local_cloud.root.path.rglob("*") if path.is_file())
    assert not [path for path in files if SECRET in path.read_text(errors="replace")]


def test_submission_is_idempotent(local_cloud: LocalCloudHarness) -> None:
    assert local_cloud.submit("a", 4) == local_cloud.submit("a", 4)
    machines = {local_cloud.next_agent().machine, local_cloud.next_agent().machine}
    assert local_cloud.submit("a", 4).name == "run/a"
    assert local_cloud.is_quiet()
    assert {
        node.machine() for group in local_cloud.root.groups() for node in group.nodes()
    } == machines


def test_concurrent_submission_is_idempotent(local_cloud: LocalCloudHarness) -> None:
    script = (
        "from spotfit.core.ids import RunId, Token\n"
        "from spotfit.model.group import GroupRequest\n"
        "from spotfit.provision.launch import AgentLaunchSpec\n"
        "from spotfit_provisioners.local.options import LocalOptions\n"
        "from spotfit_provisioners.local.provisioner import LocalProvisioner\n"
        "import sys\n"
        "local = LocalProvisioner(LocalOptions(nodes=2, root=sys.argv[1], agent=sys.argv[2]))\n"
        "launch = AgentLaunchSpec(sys.argv[3], RunId('run'), 'key')\n"
        "request = GroupRequest(token=Token('a'), num_workers=4, total_workers=4)\n"
        "local.submit(local.plan(request), launch)\n"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(local_cloud.root.path),
        local_cloud.provisioner.options.agent,
        str(local_cloud.directory),
    ]
    submitters = [subprocess.Popen(command) for _ in range(4)]
    assert [one.wait() for one in submitters] == [0, 0, 0, 0]
    ups = [local_cloud.next_agent(), local_cloud.next_agent()]
    assert sorted(up.message["node"] for up in ups) == [0, 1]
    assert local_cloud.is_quiet()


def test_interrupted_submission_is_completed_by_the_next(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first submitter is killed after creating the second node, before starting its machine."""
    started: list[int] = []
    start = processes.start_detached

    def crash(*args: object, **kwargs: object) -> object:
        if started:
            raise KeyboardInterrupt
        started.append(1)
        return start(*args, **kwargs)  # type: ignore[arg-type]  # arguments are passed on

    with monkeypatch.context() as patch:
        patch.setattr(processes, "start_detached", crash)
        with pytest.raises(KeyboardInterrupt):
            local_cloud.submit("a", 4)
    before = local_cloud.next_agent()
    local_cloud.submit("a", 4)
    after = local_cloud.next_agent()
    assert {before.message["node"], after.message["node"]} == {0, 1}
    assert before.machine.is_alive
    assert local_cloud.is_quiet()


def test_started_but_unrecorded_machine_is_not_started_twice(
    local_cloud: LocalCloudHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submitter was killed before recording the machine; the successor's machine exits."""
    start = processes.start_detached
    monkeypatch.setattr(processes, "start_detached", lambda *a, **k: start(*a, **k) and None)
    local_cloud.submit("a", 2)
    local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    other = [one for one in local_cloud.root.machines() if one != up.machine]
    for process in other:
        wait_for_exit(process.pid)
    assert local_cloud.is_quiet()
    assert states(local_cloud, local_cloud.submit("a", 2)) == [NodeState.RUNNING]


def test_killed_machine_is_lost_with_its_descendants(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 4)
    up = local_cloud.next_agent()
    processes.kill_process_tree(up.machine)
    wait_for_exit(up.machine.pid)
    wait_for_exit(up.message["worker"])
    expected = {up.message["node"]: NodeState.GONE, 1 - up.message["node"]: NodeState.RUNNING}
    assert states(local_cloud, handle) == [expected[0], expected[1]]
    assert up.machine not in local_cloud.root.machines()


def test_reused_pid_is_not_the_machine(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    node = next(local_cloud.root.groups()).node(0)
    processes.kill_process_tree(up.machine)
    (node.path / "machine").write_text(f"{os.getpid()}-1")
    assert states(local_cloud, handle) == [NodeState.GONE]
    local_cloud.provisioner.cancel(handle)  # and this process continues


def test_failed_agent_is_reported_with_its_last_output(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    up.end(code=3)
    wait_for_exit(up.machine.pid)
    (node,) = local_cloud.observe(handle).nodes
    assert node.state == NodeState.FAILED
    assert "code 3" in node.reason
    assert "the fake agent exits" in node.reason


def test_output_of_a_machine_is_kept_until_release(
    local_cloud: LocalCloudHarness,
) -> None:
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    up.end(code=3)
    wait_for_exit(up.machine.pid)
    local_cloud.observe(handle)
    (output,) = local_cloud.provisioner.fetch_machine_output(handle, 0, max_lines=1)
    assert Path(output.source).is_file()
    assert output.lines == ("the fake agent exits with code 3",)
    assert local_cloud.provisioner.fetch_machine_output(handle, 0, max_lines=0)[0].lines == ()
    local_cloud.provisioner.cancel(handle)
    assert local_cloud.provisioner.fetch_machine_output(handle, 0, max_lines=1) == []


def test_successful_agent_leaves_no_files(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 4)
    ups = [local_cloud.next_agent(), local_cloud.next_agent()]
    for up in ups:
        up.end()
    local_cloud.provisioner.cancel(handle)
    for up in ups:
        processes.kill_process_tree(up.machine)
        wait_for_exit(up.machine.pid)
    assert states(local_cloud, handle) == [NodeState.GONE, NodeState.GONE]
    local_cloud.root.collect_garbage()
    assert not local_cloud.root.path.exists()


def test_release_kills_all_processes_and_is_idempotent(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 4)
    ups = [local_cloud.next_agent(), local_cloud.next_agent()]
    local_cloud.provisioner.cancel(handle)
    local_cloud.provisioner.cancel(handle)
    for up in ups:
        wait_for_exit(up.machine.pid)
        wait_for_exit(up.message["worker"])
    assert local_cloud.observe(handle).is_terminated
    local_cloud.root.collect_garbage()
    assert not local_cloud.root.path.exists()


def test_release_kills_a_suspended_machine(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    os.kill(up.machine.pid, signal.SIGSTOP)
    local_cloud.provisioner.cancel(handle)
    wait_for_exit(up.machine.pid)


def test_unknown_group_is_gone(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 4)
    local_cloud.provisioner.cancel(handle)
    assert states(local_cloud, handle) == [NodeState.GONE, NodeState.GONE]


def test_request_beyond_the_capacity_is_refused(local_cloud: LocalCloudHarness) -> None:
    local_cloud.root.set_capacity(1)
    plan = local_cloud.provisioner.plan(
        GroupRequest(token=Token("a"), num_workers=4, total_workers=4)
    )
    refusal = local_cloud.provisioner.submit(plan, local_cloud.launch)
    assert isinstance(refusal, Refusal)
    assert "1 of 1" in refusal.reason
    local_cloud.submit("b", 2)
    assert isinstance(local_cloud.provisioner.submit(plan, local_cloud.launch), Refusal)
    local_cloud.submit("b", 2)  # a granted request is not refused later
    local_cloud.root.set_capacity(None)
    local_cloud.submit("a", 4)


def test_lost_node_frees_capacity(local_cloud: LocalCloudHarness) -> None:
    local_cloud.root.set_capacity(1)
    local_cloud.submit("a", 2)
    machine = local_cloud.next_agent().machine
    processes.kill_process_tree(machine)
    wait_for_exit(machine.pid)
    local_cloud.submit("b", 2)


def test_runs_are_isolated(local_cloud: LocalCloudHarness) -> None:
    local_cloud.submit("a", 2)
    local_cloud.launch = type(local_cloud.launch)(
        str(local_cloud.directory), RunId("other"), SECRET
    )
    local_cloud.submit("a", 2)
    assert local_cloud.next_agent().machine != local_cloud.next_agent().machine


def test_root_accessible_to_other_users_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ProvisionPermissionError, match="directory of this user"):
        LocalCloudDir(tmp_path).ensure()
    tmp_path.chmod(0o700)
    with contextlib.suppress(FileNotFoundError):
        LocalCloudDir(tmp_path).ensure()
