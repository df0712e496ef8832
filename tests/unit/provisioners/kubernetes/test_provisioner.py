"""Behavior of the Kubernetes provisioner beyond the conformance suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.offer import Market, Offer
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.clouds.kubernetes import KubernetesCloud, KubernetesStatusError
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.kubernetes.client import KubernetesClient
from spotfit_provisioners.kubernetes.provisioner import KubernetesProvisioner
from tests.unit.provisioners.waiting import until

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="kubernetes", boot_s=0.0)) as simulator:
        yield simulator


@pytest.fixture
def provisioner(sim: Simulator) -> KubernetesProvisioner:
    return KubernetesProvisioner.with_options(
        **KubernetesCloud.client_access(sim.server.url).options
    )


def submit_running(
    provisioner: KubernetesProvisioner, tmp_path: Path, command: str, offer: Offer | None = None
) -> GroupHandle:
    """Submit a group whose pod runs `command` instead of an agent."""
    plan = provisioner.plan(
        GroupRequest(token=Token("t-0123456789ab"), num_workers=1, total_workers=1, offer=offer)
    )
    container = plan.body["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["/bin/sh", "-c", command]
    handle = provisioner.submit(
        plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "the secret itself")
    )
    assert isinstance(handle, GroupHandle)
    return handle


def pods(sim: Simulator) -> list[Any]:
    return list(sim.cloud.state.objects["pods"].values())


def test_pod_gets_its_secret_address_and_index(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    handle = submit_running(provisioner, tmp_path, "env; exit 0")
    until(lambda: provisioner.observe(handle).is_terminated)
    result = sim.datacenter.output(sim.datacenter.machines[1])
    assert "SPOTFIT_RUN_SECRET=the secret itself" in result
    assert "JOB_COMPLETION_INDEX=0" in result
    assert "SPOTFIT_HOST=127." in result


@pytest.mark.parametrize(
    ("code", "restarts", "state"),
    [(85, True, None), (75, False, NodeState.FAILED), (0, False, NodeState.GONE)],
)
def test_only_drained_agents_restart_their_pod(
    sim: Simulator,
    provisioner: KubernetesProvisioner,
    tmp_path: Path,
    code: int,
    restarts: bool,
    state: NodeState | None,
) -> None:
    handle = submit_running(provisioner, tmp_path, f"exit {code}")
    if restarts:
        until(lambda: len(pods(sim)) >= 3)
        assert not provisioner.observe(handle).is_terminated
    else:
        until(lambda: provisioner.observe(handle).is_terminated)
        assert len(pods(sim)) == 1
        assert provisioner.observe(handle).nodes[0].state == state


def test_repeated_submission_completes_an_interrupted_one(
    sim: Simulator,
    provisioner: KubernetesProvisioner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            KubernetesClient, "set_owner", lambda *_: (_ for _ in ()).throw(OSError("cut off"))
        )
        with pytest.raises(OSError, match="cut off"):
            submit_running(provisioner, tmp_path, "exec sleep 100")
    submit_running(provisioner, tmp_path, "exec sleep 100")
    (secret,) = sim.cloud.state.objects["secrets"].values()
    (job,) = sim.cloud.state.objects["jobs"].values()
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


def test_on_demand_machine_is_had_without_spot_capacity_at_the_time_of_its_node(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    request = GroupRequest(token=Token("t-list"), num_workers=1, total_workers=1)
    offers = {offer.market: offer for offer in provisioner.offers(request).offers}
    sim.market.max_machines = 0
    handle = submit_running(provisioner, tmp_path, "exit 0", offers[Market.ON_DEMAND])
    assert handle.offer == "kubernetes/on_demand"
    until(lambda: provisioner.observe(handle).is_terminated)
    (machine,) = sim.datacenter.machines.values()
    assert machine.market is Market.ON_DEMAND
    (node,) = provisioner.observe(handle).nodes
    assert machine.started_at_s is not None
    assert machine.ended_at_s is not None
    # The API has whole seconds.
    assert node.started_at_ms == int(machine.started_at_s) * 1000
    assert node.ended_at_ms == int(machine.ended_at_s) * 1000


def test_released_group_leaves_no_objects(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)
    provisioner.cancel(handle)
    until(lambda: not any(sim.cloud.state.objects.values()))
    assert not list(sim.datacenter.active_machines())


def test_pod_quota_is_distinguished_from_missing_nodes(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    """The Job is accepted; only its events state that its pods are rejected."""
    sim.faults.inject("pod_quota", 1_000_000)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: provisioner.observe(handle).refusal)
    refusal = provisioner.observe(handle).refusal
    assert refusal.startswith("a ResourceQuota of the namespace is exceeded")
    assert "limited: pods=4" in refusal
    sim.faults.inject("pod_quota", 0)
    sim.faults.inject("capacity", 1_000_000)
    until(lambda: "nodes are available" in provisioner.observe(handle).refusal)
    sim.faults.inject("capacity", 0)
    until(lambda: provisioner.observe(handle).nodes[0].state is NodeState.RUNNING)
    assert provisioner.observe(handle).refusal == ""


def test_denied_events_reduce_the_reported_reasons(
    sim: Simulator,
    provisioner: KubernetesProvisioner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = KubernetesCloud._list

    def forbidden(self: Any, kind: str, *request: Any) -> Any:
        if kind == "events":
            raise KubernetesStatusError(403, "Forbidden", "events is forbidden")
        return listed(self, kind, *request)

    monkeypatch.setattr(KubernetesCloud, "_list", forbidden)
    sim.faults.inject("pod_quota", 1_000_000)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: sim.cloud.state.objects["events"])
    assert provisioner.observe(handle).refusal == ""


def test_machine_on_an_unresponsive_node_is_not_running(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: provisioner.observe(handle).nodes[0].state is NodeState.RUNNING)
    sim.datacenter.silence(next(sim.datacenter.active_machines()))
    until(lambda: provisioner.observe(handle).nodes[0].reason)
    assert provisioner.observe(handle).nodes[0].reason == "its node is unreachable"


def test_output_of_pods_is_read_while_they_exist(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    handle = submit_running(provisioner, tmp_path, "echo no module; echo at all; exit 1")
    until(lambda: provisioner.observe(handle).is_terminated)
    [output] = provisioner.fetch_machine_output(handle, 0, max_lines=1)
    assert output.source.startswith("pod t-0123456789ab-0-")
    assert output.lines == ("at all",)
    provisioner.cancel(handle)
    until(lambda: not pods(sim))
    assert provisioner.fetch_machine_output(handle, 0, max_lines=1) == []


def test_output_of_a_pod_that_does_not_start_is_its_reason(
    sim: Simulator, provisioner: KubernetesProvisioner, tmp_path: Path
) -> None:
    sim.faults.inject("capacity", 1)
    handle = submit_running(provisioner, tmp_path, "exit 0")
    until(lambda: pods(sim))
    [output] = provisioner.fetch_machine_output(handle, 0, max_lines=10)
    assert "is waiting to start" in output.lines[0]


def test_a_missing_client_library_is_reported_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        KubernetesProvisioner.with_options(image="i").open_client()
