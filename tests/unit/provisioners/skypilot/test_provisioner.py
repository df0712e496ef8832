"""Behavior of the SkyPilot provisioner against an in-memory API server.

`make sky-api` tests the real SDK and server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError, ProvisionError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, NodeState
from spotfit.provision.api import MachineOutput
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.testing.builders import ManualClock
from spotfit_provisioners.skypilot.client import LaunchFailure, SkyPilotClient, SkyPilotRequest
from spotfit_provisioners.skypilot.offers import allowed_offers
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from spotfit_provisioners.skypilot.provisioner import SkyPilotProvisioner
from spotfit_provisioners.skypilot.states import SkyPilotJob, UsageInterval

NO_CAPACITY = LaunchFailure("no p4d anywhere", is_capacity_error=True)
LAUNCH = AgentLaunchSpec("s3://b/run", RunId("r-1"), "the secret itself")


@dataclass
class Server(SkyPilotClient):
    """Jobs and clusters of an API server, as returned by its client."""

    queue: list[SkyPilotJob] = field(default_factory=list)
    under_way: dict[str, str] = field(default_factory=dict)
    up: dict[str, str] = field(default_factory=dict)
    requests: dict[str, list[SkyPilotRequest]] = field(default_factory=dict)
    tasks: list[Mapping[str, Any]] = field(default_factory=list)
    enabled: tuple[str, ...] = ("aws",)
    error: Exception | None = None
    failure: LaunchFailure = NO_CAPACITY
    late: list[SkyPilotJob] = field(default_factory=list)
    """Jobs that another client launches concurrently."""
    usage: dict[str, UsageInterval] = field(default_factory=dict)
    num_usage_reports: int = 0
    printed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Output by job id and by cluster name."""

    def describe_server(self) -> str:
        return "version 0"

    def list_clouds(self) -> list[str]:
        return list(self.enabled)

    def check_catalog(self, task: Mapping[str, Any]) -> None:
        if task["resources"].get("accelerators", "").startswith("none-such"):
            raise ProvisionError("no such machine")

    def launch_job(self, task: Mapping[str, Any]) -> str:
        self.tasks.append(task)
        self.queue.append(SkyPilotJob(len(self.queue) + 1, task["name"], "PENDING"))
        return f"request-{task['name']}"

    def list_jobs(self, prefix: str) -> list[SkyPilotJob]:
        return sorted((j for j in self.queue if j.name.startswith(prefix)), key=lambda j: j.id)

    def list_launching_jobs(self) -> dict[str, str]:
        return self.under_way

    def cancel_jobs(self, ids: Sequence[int]) -> None:
        for id_ in ids:
            self.set_state(id_, "CANCELLED")

    def wait_for(self, request: str) -> None:
        if self.error is not None:
            raise self.error
        self.queue += self.late
        self.late = []

    def set_state(self, id_: int, state: str, why: str = "") -> None:
        self.queue = [
            SkyPilotJob(job.id, job.name, state, why) if job.id == id_ else job
            for job in self.queue
        ]

    def launch_cluster(self, task: Mapping[str, Any]) -> str:
        self.tasks.append(task)
        self.requests.setdefault(task["name"], []).insert(0, SkyPilotRequest("r", "RUNNING"))
        return "r"

    def cluster_states(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.up[name] for name in names if name in self.up}

    def cluster_usage(self, names: Sequence[str]) -> dict[str, UsageInterval]:
        self.num_usage_reports += 1
        if self.error is not None:
            raise self.error
        return {name: self.usage[name] for name in names if name in self.usage}

    def list_launches(self, cluster: str) -> list[SkyPilotRequest]:
        return self.requests.get(cluster, [])

    def find_failure(self, request: str) -> LaunchFailure:
        return self.failure

    def abort_requests(self, requests: Sequence[str]) -> None:
        self.requests = {name: [SkyPilotRequest("r", "CANCELLED")] for name in self.requests}

    def tear_down(self, cluster: str) -> None:
        del self.up[cluster]

    def read_job_log(self, id_: int, max_lines: int) -> tuple[str, ...]:
        return self.printed.get(str(id_), ())[-max_lines:]

    def read_cluster_log(self, cluster: str, max_lines: int) -> tuple[str, ...]:
        return self.printed.get(cluster, ())[-max_lines:]


@pytest.fixture
def server() -> Server:
    return Server()


def make_provisioner(server: Server, **options: Any) -> SkyPilotProvisioner:
    provisioner = SkyPilotProvisioner.with_options(**{"infra": ("aws/us-east-1",), **options})
    provisioner._client = server
    return provisioner


def a_plan(provisioner: SkyPilotProvisioner, workers: int = 2, **resources: float) -> GroupPlan:
    return provisioner.plan(
        GroupRequest(
            token=Token("t-1"),
            num_workers=workers,
            total_workers=workers,
            resources_per_worker=resources,
        )
    )


def submit_group(provisioner: SkyPilotProvisioner) -> GroupHandle:
    handle = provisioner.submit(a_plan(provisioner), LAUNCH)
    assert isinstance(handle, GroupHandle)
    return handle


def node_states(status: GroupStatus) -> list[NodeState]:
    return [node.state for node in status.nodes]


# ── managed jobs ──────────────────────────────────────────────────────────────────────────────────


def test_handle_names_the_region_of_all_machines(server: Server) -> None:
    assert submit_group(make_provisioner(server)).network == "aws/us-east-1"


def test_group_has_one_single_node_job_per_machine(server: Server) -> None:
    provisioner = make_provisioner(server)
    handle = submit_group(provisioner)
    assert [job.name for job in server.queue] == ["t-1-0", "t-1-1"]
    assert [task["envs"]["SPOTFIT_NODE"] for task in server.tasks] == ["0", "1"]
    assert all(task["num_nodes"] == 1 for task in server.tasks)
    server.set_state(1, "RUNNING")
    server.set_state(2, "RECOVERING")
    assert node_states(provisioner.observe(handle)) == [NodeState.RUNNING, NodeState.WAITING]


def test_submission_is_idempotent(server: Server) -> None:
    provisioner = make_provisioner(server)
    assert submit_group(provisioner) == submit_group(provisioner)
    assert len(server.queue) == 2


def test_pending_launch_is_not_repeated(server: Server) -> None:
    server.under_way = {"t-1-0": "their-request"}
    submit_group(make_provisioner(server))
    assert [job.name for job in server.queue] == ["t-1-1"]


def test_older_job_of_concurrent_submissions_stays(server: Server) -> None:
    server.late = [SkyPilotJob(7, "t-1-0", "STARTING"), SkyPilotJob(8, "t-1-1", "STARTING")]
    provisioner = make_provisioner(server)
    handle = submit_group(provisioner)
    assert [job.id for job in server.queue if job.state == "CANCELLED"] == [7, 8]
    server.set_state(1, "RUNNING")
    server.set_state(2, "RUNNING")
    assert node_states(provisioner.observe(handle)) == [NodeState.RUNNING] * 2


def test_partially_failed_launch_leaves_no_jobs(
    server: Server,
) -> None:
    server.error = OSError("the connection broke")
    provisioner = make_provisioner(server)
    with pytest.raises(OSError, match="broke"):
        submit_group(provisioner)
    assert all(job.is_over for job in server.queue)
    server.error = None
    assert provisioner.observe(submit_group(provisioner)).is_terminated


def test_machine_in_no_catalog_is_rejected_before_launch(
    server: Server,
) -> None:
    provisioner = make_provisioner(server, accelerator="none-such")
    with pytest.raises(ProvisionError, match="no such machine"):
        provisioner.submit(a_plan(provisioner, GPU=1.0), LAUNCH)
    assert not server.queue


def test_missing_capacity_is_reported(server: Server) -> None:
    provisioner = make_provisioner(server)
    handle = submit_group(provisioner)
    server.set_state(2, "FAILED_NO_RESOURCE", "no p4d")
    assert provisioner.observe(handle).refusal == "FAILED_NO_RESOURCE: no p4d"


TWO_REGIONS = ("aws/us-east-1", "gcp/us-central1")


def make_waiting(server: Server, **request: Any) -> tuple[SkyPilotProvisioner, GroupHandle]:
    """Return a group of two machines that has waited for capacity for 599 s."""
    provisioner = make_provisioner(server, infra=TWO_REGIONS)
    provisioner._clock = clock = ManualClock()
    plan = provisioner.plan(
        GroupRequest(token=Token("t-1"), num_workers=2, total_workers=2, **request)
    )
    handle = provisioner.submit(plan, LAUNCH)
    assert isinstance(handle, GroupHandle)
    for number in (1, 2):
        server.set_state(number, "PENDING", "Job is in backoff")
    assert node_states(provisioner.observe(handle)) == [NodeState.WAITING] * 2
    clock.wait(599.0)
    assert node_states(provisioner.observe(handle)) == [NodeState.WAITING] * 2
    clock.wait(1.0)
    return provisioner, handle


def test_group_without_capacity_moves_to_the_next_region(server: Server) -> None:
    provisioner, handle = make_waiting(server)
    status = provisioner.observe(handle)
    assert node_states(status) == [NodeState.REFUSED] * 2
    assert status.nodes[0].reason.startswith("aws/us-east-1 has no machines for 600 s: ")


def test_replacement_waits_in_the_region_of_the_standing_machines(server: Server) -> None:
    provisioner, handle = make_waiting(server, network="aws/us-east-1")
    assert node_states(provisioner.observe(handle)) == [NodeState.WAITING] * 2


def test_given_offer_without_capacity_is_refused(server: Server) -> None:
    """The leader may then choose the on-demand offer of the same region."""
    (spot,) = (
        one
        for one in allowed_offers(SkyPilotOptions(infra=TWO_REGIONS[:1]))
        if one.market == "spot"
    )
    provisioner, handle = make_waiting(server, network="aws/us-east-1", offer=spot)
    assert handle.offer == spot.name
    assert node_states(provisioner.observe(handle)) == [NodeState.REFUSED] * 2


def test_group_with_a_machine_does_not_move(server: Server) -> None:
    provisioner, handle = make_waiting(server)
    server.set_state(1, "RUNNING")
    assert node_states(provisioner.observe(handle)) == [NodeState.RUNNING, NodeState.WAITING]


def test_released_group_leaves_no_jobs(server: Server) -> None:
    provisioner = make_provisioner(server)
    handle = submit_group(provisioner)
    server.set_state(1, "SUCCEEDED")
    provisioner.cancel(handle)
    assert [job.state for job in server.queue] == ["SUCCEEDED", "CANCELLED"]
    provisioner.cancel(handle)


def test_group_is_found_by_one_of_its_jobs(server: Server) -> None:
    provisioner = make_provisioner(server)
    assert provisioner.find_group(a_plan(provisioner), LAUNCH) is None
    assert server.tasks == []
    handle = submit_group(provisioner)
    del server.queue[0]
    assert provisioner.find_group(a_plan(provisioner), LAUNCH) == handle


def test_group_is_found_after_its_pending_launch(server: Server) -> None:
    provisioner = make_provisioner(server)
    server.under_way = {"t-1-0": "request-1"}
    server.late = [SkyPilotJob(1, "t-1-0", "PENDING")]
    assert provisioner.find_group(a_plan(provisioner), LAUNCH) is not None


def test_unknown_group_is_gone(server: Server) -> None:
    handle = GroupHandle(
        token=Token("t-9"),
        provisioner="skypilot",
        name="t-9",
        detail={"nodes": 2, "launch_mode": "jobs"},
    )
    assert make_provisioner(server).observe(handle).is_terminated
    make_provisioner(server).cancel(handle)


def test_output_is_read_from_the_controller_of_the_job(server: Server) -> None:
    provisioner = make_provisioner(server)
    handle = submit_group(provisioner)
    server.set_state(1, "RECOVERING")
    server.set_state(2, "RUNNING")
    server.queue += [SkyPilotJob(3, "t-1-10", "RUNNING"), SkyPilotJob(4, "t-1-1", "CANCELLED")]
    server.printed = {"1": ("waits",), "2": ("one", "two", "three"), "3": ("no",), "4": ("twice",)}
    assert provisioner.fetch_machine_output(handle, 1, max_lines=2) == [
        MachineOutput("sky jobs logs 2", ("two", "three")),
        MachineOutput("sky jobs logs 4", ("twice",)),
    ]
    assert provisioner.fetch_machine_output(handle, 0, max_lines=2) == []
    assert provisioner.traits.keeps_output


# ── clusters ──────────────────────────────────────────────────────────────────────────────────────


def test_cluster_starts_runs_and_ends(server: Server) -> None:
    provisioner = make_provisioner(server, launch_mode="clusters")
    handle = submit_group(provisioner)
    assert node_states(provisioner.observe(handle)) == [NodeState.WAITING] * 2
    server.up = {"t-1-0": "UP", "t-1-1": "INIT"}
    assert node_states(provisioner.observe(handle)) == [NodeState.RUNNING, NodeState.WAITING]
    assert submit_group(provisioner) == handle
    assert len(server.tasks) == 2
    provisioner.cancel(handle)
    assert not server.up
    assert provisioner.observe(handle).is_terminated


def test_times_of_a_cluster_are_read_after_its_start_and_after_its_end(server: Server) -> None:
    provisioner = make_provisioner(server, launch_mode="clusters")
    handle = submit_group(provisioner)
    assert [node.started_at_ms for node in provisioner.observe(handle).nodes] == [None, None]
    assert server.num_usage_reports == 0
    server.up = {"t-1-0": "UP", "t-1-1": "INIT"}
    server.usage = {"t-1-0": UsageInterval(100, None)}
    for _ in range(2):
        assert [node.started_at_ms for node in provisioner.observe(handle).nodes] == [100_000, None]
    assert server.num_usage_reports == 1
    server.up = {"t-1-1": "UP"}
    server.requests["t-1-0"] = [SkyPilotRequest("r", "SUCCEEDED")]
    server.usage = {"t-1-0": UsageInterval(100, 250), "t-1-1": UsageInterval(110, None)}
    for _ in range(2):
        times = [(one.started_at_ms, one.ended_at_ms) for one in provisioner.observe(handle).nodes]
        assert times == [(100_000, 250_000), (110_000, None)]
    assert server.num_usage_reports == 2


def test_machines_are_observed_without_their_times(server: Server) -> None:
    provisioner = make_provisioner(server, launch_mode="clusters")
    handle = submit_group(provisioner)
    server.up = {"t-1-0": "UP", "t-1-1": "UP"}
    server.error = ProvisionError("no access to costs")
    assert node_states(provisioner.observe(handle)) == [NodeState.RUNNING] * 2
    server.error = None
    server.usage = {"t-1-0": UsageInterval(100, None)}
    assert provisioner.observe(handle).nodes[0].started_at_ms == 100_000


def test_failed_cluster_launch_has_its_reason(server: Server) -> None:
    provisioner = make_provisioner(server, launch_mode="clusters")
    handle = submit_group(provisioner)
    server.requests["t-1-1"] = [SkyPilotRequest("r", "FAILED")]
    status = provisioner.observe(handle)
    assert node_states(status) == [NodeState.WAITING, NodeState.REFUSED]
    assert status.refusal == "FAILED: no p4d anywhere"
    server.failure = LaunchFailure("the setup failed")
    status = provisioner.observe(handle)
    assert node_states(status) == [NodeState.WAITING, NodeState.FAILED]
    assert (status.nodes[1].reason, status.refusal) == ("FAILED: the setup failed", "")


def test_output_of_a_cluster_is_read_while_it_exists(server: Server) -> None:
    provisioner = make_provisioner(server, launch_mode="clusters")
    handle = submit_group(provisioner)
    server.printed = {"t-1-1": ("one", "two")}
    assert provisioner.fetch_machine_output(handle, 1, max_lines=1) == [
        MachineOutput("sky logs t-1-1", ("two",))
    ]
    assert provisioner.fetch_machine_output(handle, 0, max_lines=1) == []


def test_clusters_are_found_also_before_they_are_up(server: Server) -> None:
    provisioner = make_provisioner(server, launch_mode="clusters")
    plan = a_plan(provisioner)
    assert provisioner.find_group(plan, LAUNCH) is None
    server.requests["t-1-1"] = [SkyPilotRequest("r", "PENDING")]
    assert provisioner.find_group(plan, LAUNCH) is not None


def test_unknown_cluster_is_gone(server: Server) -> None:
    handle = GroupHandle(
        token=Token("t-9"),
        provisioner="skypilot",
        name="t-9",
        detail={"nodes": 1, "launch_mode": "clusters"},
    )
    assert make_provisioner(server).observe(handle).is_terminated
    make_provisioner(server).cancel(handle)


# ── traits and check-up ──────────────────────────────────────────────────────────────────────────


def test_notice_source_follows_the_cloud_of_the_machine(server: Server) -> None:
    assert make_provisioner(server).traits.notice_sources == ("machine", "signal")
    assert make_provisioner(server, infra=()).traits.notice_s == 0.0
    assert make_provisioner(server, infra=("aws/us-east-1",)).traits.notice_sources == (
        "machine",
        "signal",
    )
    assert make_provisioner(server, infra=("aws", "gcp")).traits.notice_s == 30.0
    assert make_provisioner(server, infra=("aws", "k8s")).traits.notice_s == 0.0
    assert make_provisioner(server, infra=("k8s",)).traits.notice_sources == ("machine", "signal")


@pytest.mark.parametrize(
    ("infra", "shared"),
    [((), "possibly"), (("aws/us-east-1", "gcp"), "never"), (("aws", "slurm/lab"), "possibly")],
)
def test_directories_are_shared_on_sites_only(
    server: Server, infra: tuple[str, ...], shared: str
) -> None:
    assert make_provisioner(server, infra=infra).traits.shared_directories == shared


def test_only_managed_jobs_are_recovered(server: Server) -> None:
    assert make_provisioner(server).traits.requeues_itself
    assert not make_provisioner(server, launch_mode="clusters").traits.requeues_itself


def test_doctor_checks_server_clouds_and_catalog(server: Server) -> None:
    assert [
        check.passed for check in make_provisioner(server, infra=("aws/us-east-1",)).check_account()
    ] == [True] * 3
    server.enabled = ("AWS", "Kubernetes")
    assert [
        check.passed for check in make_provisioner(server, infra=("k8s/context",)).check_account()
    ] == [True] * 3
    _, clouds, _ = make_provisioner(server, infra=("gcp",)).check_account()
    assert not clouds.passed
    assert "gcp" in clouds.detail
    assert "sky check" in clouds.do


def test_a_missing_client_library_is_reported_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        SkyPilotProvisioner.with_options().open_client()
