"""Behavior of the AWS Batch provisioner beyond the conformance suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.errors import MissingExtraError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, NodeState
from spotfit.provision.api import Refusal
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.testing.builders import ManualClock
from spotfit_localsim.clouds import aws_batch as simulated_cloud
from spotfit_localsim.clouds.aws_batch import AwsBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.price_history import PriceHistory
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.aws_batch import client as calls
from spotfit_provisioners.aws_batch import provisioner as provisioner_module
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.aws_batch.provisioner import AwsBatchProvisioner
from tests.unit.provisioners.waiting import until

pytest.importorskip("boto3")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

REQUEST = GroupRequest(token=Token("t-0123456789ab"), num_workers=1, total_workers=1)


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    for cache in (calls._client, provisioner_module._client_for_region):
        cache.cache_clear()
    with running_simulator(tmp_path, SimOptions(cloud="aws_batch", boot_s=0.0)) as simulator:
        yield simulator


def open_provisioner(sim: Simulator, **options: Any) -> AwsBatchProvisioner:
    access = AwsBatchCloud.client_access(sim.server.url)
    return AwsBatchProvisioner.with_options(**{**access.options, **options})


def submit_running(
    provisioner: AwsBatchProvisioner,
    tmp_path: Path,
    command: str,
    token: str = REQUEST.token,
    *,
    network: str = "",
    workers: int = 1,
) -> GroupHandle:
    """Submit a group whose machine runs `command` instead of an agent."""
    plan = provisioner.plan(
        replace(
            REQUEST,
            token=Token(token),
            num_workers=workers,
            total_workers=workers,
            network=network,
        )
    )
    plan.body["definition"]["containerProperties"]["command"] = ["/bin/sh", "-c", command]
    launch = AgentLaunchSpec(str(tmp_path), new_run_id(), "secret")
    handle = provisioner.submit(plan, launch)
    assert isinstance(handle, GroupHandle)
    return handle


def test_older_job_of_concurrent_submissions_stays(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`submit_job` has no client token, so concurrent submissions can create two jobs."""
    provisioner = open_provisioner(sim)
    first = submit_running(provisioner, tmp_path, "exec sleep 100")
    with monkeypatch.context() as patch:
        results = iter([None])

        def find_no_job(self: Any, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
            return next(results, found(self, plan, launch))

        found = AwsBatchProvisioner.find_group
        patch.setattr(AwsBatchProvisioner, "find_group", find_no_job)
        second = submit_running(provisioner, tmp_path, "exec sleep 100")
    assert second == first
    until(lambda: len(list(sim.datacenter.active_machines())) == 1)


@pytest.fixture
def late_sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """A simulator whose reads show nothing during a test."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    for cache in (calls._client, provisioner_module._client_for_region):
        cache.cache_clear()
    options = SimOptions(cloud="aws_batch", boot_s=0.0, lag_s=1000.0)
    with running_simulator(tmp_path / "late", options) as simulator:
        yield simulator


def test_the_handle_of_a_job_does_not_depend_on_its_listing(
    late_sim: Simulator, tmp_path: Path
) -> None:
    handle = submit_running(open_provisioner(late_sim), tmp_path, "exec sleep 100")
    assert list(_cloud(late_sim).state.jobs) == [handle.name]


def test_a_job_that_is_not_described_yet_is_unknown_and_can_be_cancelled(
    late_sim: Simulator, tmp_path: Path
) -> None:
    provisioner = open_provisioner(late_sim)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    assert [node.is_known for node in provisioner.observe(handle).nodes] == [False]
    assert provisioner.traits.read_lag_s > 0
    provisioner.cancel(handle)
    assert _cloud(late_sim).state.jobs[handle.name].termination_reason


def test_duplicates_that_were_listed_late_are_terminated(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes submit the token, and neither lists the job of the other."""
    clock = ManualClock()
    access = AwsBatchCloud.client_access(sim.server.url)
    provisioner = AwsBatchProvisioner(AwsBatchOptions(**access.options), clock)
    with monkeypatch.context() as patch:
        patch.setattr(calls.AwsBatchClient, "list_jobs_by_name", lambda *_: [])
        first = submit_running(provisioner, tmp_path, "exec sleep 100")
        second = submit_running(provisioner, tmp_path, "exec sleep 100")
    assert first != second
    jobs = _cloud(sim).state.jobs
    provisioner.observe(second)
    assert not jobs[first.name].termination_reason, "it may be the only one that is listed"
    clock.wait(provisioner.traits.read_lag_s)
    provisioner.observe(second)
    assert jobs[first.name].termination_reason
    assert not jobs[second.name].termination_reason


def test_a_retried_job_states_why_its_last_attempt_has_ended(
    sim: Simulator, tmp_path: Path
) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: [m for m in sim.datacenter.active_machines() if m.state == "up"])
    sim.market.max_machines = 0
    sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=False)
    until(lambda: _attempts(sim))
    (node,) = provisioner.observe(handle).nodes
    assert node.state is NodeState.WAITING
    assert "Host EC2 (instance i-" in node.reason


def test_agent_of_a_lost_host_is_restarted_up_to_the_limit(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim, attempts=3)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    for lost in range(1, 4):
        until(lambda: [m for m in sim.datacenter.active_machines() if m.state == "up"])
        sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=False)
        until(lambda count=lost: len(_attempts(sim)) == count)  # type: ignore[misc]
    until(lambda: provisioner.observe(handle).is_terminated)
    (node,) = provisioner.observe(handle).nodes
    assert node.state == NodeState.GONE
    assert "Host EC2 (instance i-" in node.reason


@pytest.mark.parametrize(("code", "tries"), [(85, 3), (75, 1), (70, 1), (0, 1)])
def test_only_drained_agents_are_retried(
    sim: Simulator, tmp_path: Path, code: int, tries: int
) -> None:
    provisioner = open_provisioner(sim, attempts=3)
    handle = submit_running(provisioner, tmp_path, f"exit {code}")
    until(lambda: provisioner.observe(handle).is_terminated)
    assert len(_attempts(sim)) == tries


def test_queue_without_capacity_is_reported(sim: Simulator, tmp_path: Path) -> None:
    sim.faults.inject("capacity", 1)
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: "INSUFFICIENT_INSTANCE_CAPACITY" in provisioner.observe(handle).refusal)
    assert provisioner.observe(handle).nodes[0].state == NodeState.WAITING


def test_group_moves_to_the_next_queue_and_waits_in_the_last(
    sim: Simulator, tmp_path: Path
) -> None:
    sim.faults.inject("capacity", 1_000_000)
    provisioner = open_provisioner(sim, queues=("spot", "other"))
    first = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: provisioner.observe(first).is_terminated)
    (status,) = provisioner.observe(first).nodes
    assert status.state is NodeState.REFUSED
    assert "the next queue is other" in status.reason
    provisioner.cancel(first)
    until(lambda: provisioner.observe(first).nodes[0].state is NodeState.FAILED)
    second = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-second")
    assert second.detail["queue"] == "other"
    until(lambda: provisioner.observe(second).refusal)
    assert not provisioner.observe(second).is_terminated, "the second handle is the remaining job"
    sim.faults.inject("capacity", 0)
    until(lambda: provisioner.observe(second).nodes[0].state is NodeState.RUNNING)
    third = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-third")
    assert third.detail["queue"] == "spot", (
        "all queues are available again after a machine was granted"
    )


def test_a_group_behind_another_one_moves_to_the_next_queue_without_a_reason(
    sim: Simulator, tmp_path: Path
) -> None:
    """AWS Batch explains only why the first job of a queue waits."""
    sim.market.max_machines = 0
    other_run = open_provisioner(sim, queues=("spot",), pending_timeout_s=600.0)
    head = submit_running(other_run, tmp_path, "exec sleep 100", token="t-head")
    until(lambda: "INSUFFICIENT_INSTANCE_CAPACITY" in other_run.observe(head).refusal)
    patient = open_provisioner(sim, queues=("spot", "other"), pending_timeout_s=600.0)
    handle = submit_running(patient, tmp_path, "exec sleep 100")
    until(lambda: cloud(sim).state.jobs[handle.name].children[0].status == "RUNNABLE")
    assert patient.observe(handle).refusal == ""
    impatient = open_provisioner(sim, queues=("spot", "other"), pending_timeout_s=0.5)
    until(lambda: impatient.observe(handle).is_terminated)
    assert "the next queue is other" in impatient.observe(handle).nodes[0].reason


def test_a_partly_granted_array_keeps_its_machines_and_excludes_its_queue(
    sim: Simulator, tmp_path: Path
) -> None:
    sim.market.max_machines = 2
    provisioner = open_provisioner(sim, queues=("spot", "other"), pending_timeout_s=0.5)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100", workers=3)

    def node_states() -> list[NodeState]:
        return [node.state for node in provisioner.observe(handle).nodes]

    until(lambda: provisioner.observe(handle).refusal and NodeState.RUNNING in node_states())
    until(lambda: provisioner.observe(handle) and provisioner._is_exhausted("spot"))
    assert sorted(node_states()) == ["running", "running", "waiting"]
    assert "INSUFFICIENT_INSTANCE_CAPACITY" in provisioner.observe(handle).refusal
    following = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-following")
    assert following.detail["queue"] == "other"


def test_queue_is_kept_until_the_pending_timeout(sim: Simulator, tmp_path: Path) -> None:
    sim.faults.inject("capacity", 1_000_000)
    provisioner = open_provisioner(sim, queues=("spot", "other"), pending_timeout_s=600.0)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: provisioner.observe(handle).refusal)
    assert not provisioner.observe(handle).is_terminated


def test_running_group_has_no_queue_reason(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim, queues=("spot", "other"))
    working = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: provisioner.observe(working).nodes[0].state is NodeState.RUNNING)
    sim.faults.inject("capacity", 1_000_000)
    missing = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-missing")
    until(lambda: provisioner.observe(missing).is_terminated)
    provisioner.observe(working)
    again = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-again")
    assert again.detail["queue"] == "other"


def test_region_of_a_queue_is_its_prefix_or_in_its_arn() -> None:
    assert provisioner_module._parse_queue("spot") == ("", "spot")
    assert provisioner_module._parse_queue("eu-west-1:spot") == ("eu-west-1", "spot")
    arn = "arn:aws:batch:us-east-1:1:job-queue/spot"
    assert provisioner_module._parse_queue(arn) == ("us-east-1", arn)


EAST, WEST = "sim-east-1", "sim-west-1"
TWO_REGIONS: dict[str, Any] = {
    "queues": ("east", f"{WEST}:west"),
    "instance_types": ("g5.xlarge", "g6.xlarge"),
}


@pytest.mark.parametrize(("network", "queue"), [("", "east"), (EAST, "east"), (WEST, "west")])
def test_replacement_is_submitted_in_the_region_of_the_standing_machines(
    sim: Simulator, tmp_path: Path, network: str, queue: str
) -> None:
    provisioner = open_provisioner(sim, **TWO_REGIONS)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100", network=network)
    assert (handle.detail["queue"], handle.network) == (queue, WEST if queue == "west" else EAST)


def test_replacement_without_capacity_waits_in_the_region_of_the_standing_machines(
    sim: Simulator, tmp_path: Path
) -> None:
    provisioner = open_provisioner(sim, **TWO_REGIONS)
    sim.faults.inject("capacity", 1_000_000)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100", network=EAST)
    until(lambda: provisioner.observe(handle).refusal)
    assert not provisioner.observe(handle).is_terminated, "another region has a queue, too"
    again = submit_running(provisioner, tmp_path, "exec sleep 100", "t-again", network=EAST)
    assert again.detail["queue"] == "east"


def test_replacement_moves_to_another_queue_of_the_same_region(
    sim: Simulator, tmp_path: Path
) -> None:
    provisioner = open_provisioner(sim, queues=(f"{EAST}:spot", f"{WEST}:spot", f"{EAST}:other"))
    sim.faults.inject("capacity", 1_000_000)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100", network=EAST)
    until(lambda: provisioner.observe(handle).is_terminated)
    again = submit_running(provisioner, tmp_path, "exec sleep 100", "t-again", network=EAST)
    assert (again.detail["region"], again.detail["queue"]) == (EAST, "other")


def test_region_without_a_queue_is_refused(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim)
    plan = provisioner.plan(replace(REQUEST, network="elsewhere-1"))
    answer = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(answer, Refusal)
    assert "elsewhere-1" in answer.reason


@pytest.mark.parametrize(("east", "first"), [("0.9", "west"), ("0.1", "east")])
def test_cheapest_queue_is_first(sim: Simulator, tmp_path: Path, east: str, first: str) -> None:
    sim.market.prices = PriceHistory(
        spot={f"{EAST}a": ((0.0, float(east)),), f"{WEST}a": ((0.0, 0.5),)}
    )
    handle = submit_running(
        open_provisioner(sim, queue_order="price", **TWO_REGIONS), tmp_path, "exec sleep 100"
    )
    assert handle.detail["queue"] == first


@pytest.mark.parametrize(
    ("scores", "first"),
    [
        ({EAST: 3, WEST: 9}, "west"),
        ({EAST: 9, WEST: 3}, "east"),
        ({EAST: 5, WEST: 5}, "east"),
        ({WEST: 1}, "west"),
        ({}, "east"),
    ],
    ids=["west", "east", "equal", "of one region", "none"],
)
def test_queue_with_the_best_placement_score_is_first(
    sim: Simulator, tmp_path: Path, scores: dict[str, int], first: str
) -> None:
    cloud(sim).placement_scores = scores
    handle = submit_running(
        open_provisioner(sim, queue_order="score", **TWO_REGIONS), tmp_path, "exec sleep 100"
    )
    assert handle.detail["queue"] == first


def test_queue_order_falls_back_to_given_without_scores(
    sim: Simulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(sim).placement_scores, cloud(sim).has_exhausted_scores = {EAST: 3, WEST: 9}, True
    handle = submit_running(
        open_provisioner(sim, queue_order="score", **TWO_REGIONS), tmp_path, "exec sleep 100"
    )
    assert handle.detail["queue"] == "east"
    assert "aws_batch.placement_scores_unavailable" in capsys.readouterr().err


def test_job_is_found_beyond_the_first_page(sim: Simulator, tmp_path: Path) -> None:
    """A page without matches need not be the last one."""
    provisioner = open_provisioner(sim)
    sim.market.max_machines = 0
    first = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-other")
    (other,) = cloud(sim).state.jobs.values()
    for n in range(210):
        copy = replace(other, id=f"{other.id}-{n}", name=f"t-other-{n}", created_ms=n)
        cloud(sim).state.jobs[copy.id] = copy
    handle = submit_running(provisioner, tmp_path, "exec sleep 100", token="t-first")
    assert submit_running(provisioner, tmp_path, "exec sleep 100", token="t-first") == handle
    assert submit_running(provisioner, tmp_path, "exec sleep 100", token="t-other") == first
    assert len(cloud(sim).state.jobs) == 212


def test_large_array_is_observed_completely(sim: Simulator, tmp_path: Path) -> None:
    """An array with more child jobs than one call describes."""
    sim.market.max_machines = 1
    provisioner = open_provisioner(sim)
    plan = provisioner.plan(
        GroupRequest(token=Token("t-large"), num_workers=250, total_workers=250)
    )
    plan.body["definition"]["containerProperties"]["command"] = ["/bin/sh", "-c", "exec sleep 100"]
    handle = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    until(lambda: provisioner.observe(handle).nodes[0].state is NodeState.RUNNING)
    assert len(provisioner.observe(handle).nodes) == 250


def test_misconfiguration_counts_after_the_pending_timeout(sim: Simulator, tmp_path: Path) -> None:
    """Batch reports one for minutes while an environment scales up from zero."""
    sim.faults.inject("misconfiguration", 1_000_000)
    long_timeout = open_provisioner(sim, queues=("spot", "other"), pending_timeout_s=600.0)
    handle = submit_running(long_timeout, tmp_path, "exec sleep 100")
    until(lambda: cloud(sim).state.jobs[handle.name].children[0].status_reason)
    status = long_timeout.observe(handle)
    assert (status.refusal, status.is_terminated) == ("", False)
    short_timeout = open_provisioner(sim, queues=("spot", "other"), pending_timeout_s=0.5)
    until(lambda: short_timeout.observe(handle).is_terminated)
    assert (
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT" in short_timeout.observe(handle).nodes[0].reason
    )
    sim.faults.inject("misconfiguration", 0)
    until(lambda: long_timeout.observe(handle).nodes[0].state is NodeState.RUNNING)


def cloud(sim: Simulator) -> AwsBatchCloud:
    assert isinstance(sim.cloud, AwsBatchCloud)
    return sim.cloud


def test_output_of_each_attempt_is_read_when_available(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CloudWatch is delayed: an attempt has a stream name before the stream exists."""
    monkeypatch.setattr(simulated_cloud, "LOG_DELAY_S", 1_000_000.0)
    provisioner = open_provisioner(sim, attempts=2)
    handle = submit_running(
        provisioner, tmp_path, "echo no module; echo attempt $AWS_BATCH_JOB_ATTEMPT; exit 85"
    )
    until(lambda: provisioner.observe(handle).is_terminated)
    first, second = provisioner.fetch_machine_output(handle, 0, max_lines=10)
    assert first.source.startswith("attempt 1, /aws/batch/job spotfit/default/")
    assert (first.lines, second.lines) == ((), ())
    monkeypatch.setattr(simulated_cloud, "LOG_DELAY_S", 0.0)
    first, second = provisioner.fetch_machine_output(handle, 0, max_lines=10)
    assert first.lines == ("no module", "attempt 1")
    assert provisioner.fetch_machine_output(handle, 0, max_lines=1)[1].lines == ("attempt 2",)


def _cloud(sim: Simulator) -> AwsBatchCloud:
    assert isinstance(sim.cloud, AwsBatchCloud)
    return sim.cloud


def _attempts(sim: Simulator) -> list[Any]:
    (job,) = _cloud(sim).state.jobs.values()
    return list(job.children[0].attempts)


def test_a_missing_client_library_is_reported_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        AwsBatchProvisioner.with_options(queues=("spot",), image="i").open_client()
