"""The simulated Azure Batch reproduces documented and observed deviations of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds import azure_batch as cloud
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

batch = pytest.importorskip("azure.batch")
models = pytest.importorskip("azure.batch.models")
exceptions = pytest.importorskip("azure.core.exceptions")
pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
    monkeypatch.setattr(cloud, "_UNUSABLE_DURATION_S", 0.0)
    monkeypatch.setattr(cloud, "_EVALUATION_INTERVAL_S", 0.04)
    monkeypatch.setattr(cloud, "_SAMPLING_INTERVAL_S", 0.02)
    with running_simulator(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator


def client(sim: Simulator) -> Any:
    """A client that authenticates with an account key."""
    from azure.core.credentials import AzureNamedKeyCredential
    from azure.core.pipeline.policies import RetryPolicy

    key = AzureNamedKeyCredential(cloud.ACCOUNT, "c2VjcmV0")
    return batch.BatchClient(sim.server.url, key, retry_policy=RetryPolicy.no_retries())


def make_pool(sim: Simulator, **more: Any) -> None:
    fixed: dict[str, Any] = {"targetLowPriorityNodes": 2}
    body = {"id": "pool", "vmSize": "standard_d4s_v5", **(more or fixed)}
    client(sim).create_pool(models.BatchPoolCreateOptions(body))


def make_job(sim: Simulator, job_id: str = "job", **more: Any) -> None:
    body = {"id": job_id, "poolInfo": {"poolId": "pool"}, **more}
    client(sim).create_job(models.BatchJobCreateOptions(body))


def add(sim: Simulator, task_id: str, command: str = "sleep 100", **more: Any) -> None:
    body = {"id": task_id, "commandLine": command, **more}
    client(sim).create_task("job", models.BatchTaskCreateOptions(body))


def until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    deadline_s = clock.now() + 60
    while not condition():
        assert clock.now() < deadline_s
        clock.wait(0.01)


def task(sim: Simulator, task_id: str = "0") -> Any:
    return client(sim).get_task("job", task_id)


def test_task_gets_its_pool_and_id_and_its_output_is_kept(sim: Simulator) -> None:
    make_pool(sim)
    make_job(sim)
    settings = [{"name": "GREETING", "value": "hello"}]
    command = "/bin/sh -c 'echo $GREETING $AZ_BATCH_POOL_ID $AZ_BATCH_TASK_ID'"
    add(sim, "0", command, environmentSettings=settings)
    until(lambda: task(sim).state == "completed")
    completed = task(sim)
    assert (completed.execution_info.exit_code, completed.execution_info.result) == (0, "success")
    output = b"".join(client(sim).download_task_file("job", "0", "stdout.txt"))
    assert output == b"hello pool 0\n"


def test_nonzero_exit_code_is_a_failure_and_the_node_runs_the_next_task(sim: Simulator) -> None:
    make_pool(sim, targetLowPriorityNodes=1)
    make_job(sim)
    add(sim, "0", "/bin/sh -c 'exit 3'")
    add(sim, "1", "true")
    until(lambda: task(sim, "1").state == "completed")
    execution = task(sim).execution_info
    assert (execution.exit_code, execution.failure_info.code) == (3, "FailureExitCode")
    assert task(sim).node_info.node_id == task(sim, "1").node_info.node_id
    assert task(sim, "1").execution_info.result == "success"


def test_preempted_node_keeps_its_id_and_its_task_is_requeued(sim: Simulator) -> None:
    """Neither retry_count nor requeue_count counts preemptions."""
    make_pool(sim)
    make_job(sim)
    add(sim, "0", constraints={"maxTaskRetryCount": 0})
    until(lambda: task(sim).state == "running")
    node_id = task(sim).node_info.node_id
    with sim._lock:
        sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=False)
    until(lambda: len(sim.datacenter.machines) == 2 and task(sim).state == "running")
    assert task(sim).node_info.node_id == node_id
    execution = task(sim).execution_info
    assert (execution.retry_count, execution.requeue_count) == (0, 0)
    assert [node.id for node in client(sim).list_nodes("pool")] == [node_id]


def test_job_that_terminates_with_its_tasks_ends_at_once_without_tasks(sim: Simulator) -> None:
    make_job(sim, onAllTasksComplete="terminatejob")
    until(lambda: client(sim).get_job("job").state == "completed")
    assert client(sim).get_job("job").execution_info.termination_reason == "AllTasksComplete"
    with pytest.raises(exceptions.ResourceExistsError) as raised:
        add(sim, "0")
    assert raised.value.error.code == "JobCompleted"


def test_terminating_a_job_ends_running_tasks_and_leaves_active_tasks_unchanged(
    sim: Simulator,
) -> None:
    make_pool(sim, targetLowPriorityNodes=1)
    make_job(sim)
    add(sim, "0")
    add(sim, "1")
    until(lambda: task(sim).state == "running")
    client(sim).begin_terminate_job("job", {"terminateReason": "enough"})
    until(lambda: client(sim).get_job("job").state == "completed")
    assert task(sim).execution_info.failure_info.code == "TaskEnded"
    assert task(sim, "1").state == "active"
    assert len(sim.datacenter.machines) == 1
    with pytest.raises(exceptions.ResourceExistsError):
        client(sim).begin_terminate_job("job", {"terminateReason": "enough"})


def test_running_or_active_task_can_be_terminated(sim: Simulator) -> None:
    make_pool(sim, targetLowPriorityNodes=1)
    make_job(sim)
    add(sim, "0")
    add(sim, "1")
    until(lambda: task(sim).state == "running")
    for one in ("1", "0"):
        client(sim).terminate_task("job", one)
    until(lambda: [task(sim, one).state for one in ("0", "1")] == ["completed"] * 2)
    codes = {task(sim, one).execution_info.failure_info.code for one in ("0", "1")}
    assert codes == {"TaskEnded"}
    assert len(sim.datacenter.machines) == 1


def test_azure_library_cannot_terminate_a_job_without_a_reason(sim: Simulator) -> None:
    """The provisioner therefore passes a reason; this test fails once the library is fixed."""
    make_job(sim)
    with pytest.raises(ValueError, match="No value for given attribute"):
        client(sim).begin_terminate_job("job")


def test_job_waits_for_a_pool_that_does_not_exist_yet(sim: Simulator) -> None:
    make_job(sim)
    add(sim, "0")
    make_pool(sim)
    until(lambda: task(sim).state == "running")


def test_each_task_of_a_collection_has_its_own_result(sim: Simulator) -> None:
    make_job(sim)
    add(sim, "0")
    tasks = [{"id": one, "commandLine": "true"} for one in ("0", "1")]
    response = client(sim).create_task_collection("job", models.BatchTaskGroup({"value": tasks}))
    results = {
        one.task_id: (one.status, one.error and one.error.code) for one in response.result_values
    }
    assert results == {"0": ("clienterror", "TaskExists"), "1": ("success", None)}
    assert len(list(client(sim).list_tasks("job"))) == 2


def test_task_list_is_paginated_and_applies_select_and_filter(sim: Simulator) -> None:
    make_job(sim)
    for number in range(5):
        add(sim, str(number))
    listed = list(client(sim).list_tasks("job", max_results=2, select=["id"]))
    assert [one.id for one in listed] == ["0", "1", "2", "3", "4"]
    assert listed[0].command_line is None
    assert len(list(client(sim).list_tasks("job", filter="state eq 'running'"))) == 0


def test_pool_scales_by_its_formula_and_keeps_nodes_of_running_tasks(sim: Simulator) -> None:
    scale_to_zero = {"autoScaleFormula": "$TargetLowPriorityNodes = 0;"}
    make_pool(sim, enableAutoScale=True, autoScaleFormula="$TargetLowPriorityNodes = 2;")
    make_job(sim)
    add(sim, "0")
    add(sim, "1", "true")
    until(lambda: task(sim, "1").state == "completed" and task(sim).state == "running")
    pool = client(sim).get_pool("pool")
    assert (pool.target_low_priority_nodes, pool.current_low_priority_nodes) == (2, 2)
    assert "$TargetLowPriorityNodes=2" in pool.auto_scale_run.results
    client(sim).enable_pool_auto_scale(
        "pool", models.BatchPoolEnableAutoScaleOptions(scale_to_zero)
    )
    until(lambda: client(sim).get_pool("pool").current_low_priority_nodes == 1)
    assert task(sim).state == "running"


def test_invalid_autoscale_formula_is_rejected(sim: Simulator) -> None:
    with pytest.raises(exceptions.HttpResponseError) as raised:
        make_pool(sim, enableAutoScale=True, autoScaleFormula="invalid")
    assert raised.value.error.code == "AutoScalingFormulaSyntaxError"


def test_empty_pool_is_deleted(sim: Simulator) -> None:
    make_pool(sim)
    client(sim).begin_delete_pool("pool")
    until(lambda: not list(client(sim).list_pools()))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda azure: azure.get_task("job", "missing"), "TaskNotFound"),
        (lambda azure: azure.get_node("pool", "missing"), "NodeNotFound"),
        (lambda azure: azure.get_job("missing"), "JobNotFound"),
        (
            lambda azure: azure.create_job(
                models.BatchJobCreateOptions({"id": "job", "poolInfo": {"poolId": "pool"}})
            ),
            "JobExists",
        ),
        (
            lambda azure: azure.create_job(
                models.BatchJobCreateOptions({"id": "a b", "poolInfo": {"poolId": "pool"}})
            ),
            "InvalidPropertyValue",
        ),
        (
            lambda azure: azure.create_pool(
                models.BatchPoolCreateOptions({"id": "pool", "vmSize": "x"})
            ),
            "PoolExists",
        ),
    ],
)
def test_rejected_request_has_the_error_code_of_azure(
    sim: Simulator, call: Callable[[Any], Any], code: str
) -> None:
    make_pool(sim)
    make_job(sim)
    with pytest.raises(exceptions.HttpResponseError) as raised:
        call(client(sim))
    assert raised.value.error.code == code
    assert "RequestId:" in raised.value.error.message


@pytest.fixture
def machines(sim: Simulator) -> list[Any]:
    """Two machines that each run a task."""
    make_pool(sim)
    make_job(sim)
    add(sim, "0")
    add(sim, "1")
    until(lambda: [task(sim, one).state for one in ("0", "1")] == ["running"] * 2)
    return list(sim.datacenter.machines.values())


def metadata(
    sim: Simulator, machine: Any, path: str, method: str = "GET", body: Any = None
) -> WireResponse:
    path, _, _ = path.partition("?")
    data = msgspec.json.encode(body) if body else b""
    request = WireRequest(method, path, {}, {"metadata": "true"}, data)
    reply = sim.cloud.answer_metadata(machine, request)
    assert reply is not None
    return reply


def test_each_vm_receives_the_events_of_all_vms_and_its_own_name(
    sim: Simulator, machines: list[Any]
) -> None:
    preempted, other = machines
    path = "/metadata/scheduledevents"
    assert msgspec.json.decode(metadata(sim, other, path).body)["Events"] == []
    with sim._lock:
        sim.datacenter.reclaim(preempted, notice=True)
    (event,) = msgspec.json.decode(metadata(sim, other, path).body)["Events"]
    name = metadata(sim, preempted, "/metadata/instance/compute/name").body.decode()
    assert (event["EventType"], event["Resources"]) == ("Preempt", [name])
    assert event["NotBefore"].endswith("GMT")
    begin = {"StartRequests": [{"EventId": event["EventId"]}]}
    metadata(sim, preempted, path, "POST", begin)
    until(lambda: preempted.state == "over")


def test_metadata_service_requires_the_metadata_header(sim: Simulator, machines: list[Any]) -> None:
    request = WireRequest("GET", "/metadata/scheduledevents", {}, {}, b"")
    reply = sim.cloud.answer_metadata(machines[0], request)
    assert reply is not None
    assert reply.status == 400
