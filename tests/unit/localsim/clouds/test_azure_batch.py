"""Azure Batch on loopback, where it is odd in the way Azure is."""

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
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
    monkeypatch.setattr(cloud, "_UNUSABLE_DURATION_S", 0.0)
    monkeypatch.setattr(cloud, "_EVALUATION_INTERVAL_S", 0.04)
    monkeypatch.setattr(cloud, "_SAMPLING_INTERVAL_S", 0.02)
    with running_simulator(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator


def client(sim: Simulator) -> Any:
    """With a key, as azure-batch signs requests where no identity is given."""
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


def until(happens: Callable[[], object]) -> None:
    clock = SystemClock()
    give_up_at = clock.now() + 60
    while not happens():
        assert clock.now() < give_up_at
        clock.wait(0.01)


def task(sim: Simulator, task_id: str = "0") -> Any:
    return client(sim).get_task("job", task_id)


def test_a_task_knows_its_place_and_its_output_is_kept(sim: Simulator) -> None:
    make_pool(sim)
    make_job(sim)
    settings = [{"name": "GREETING", "value": "hello"}]
    command = "/bin/sh -c 'echo $GREETING $AZ_BATCH_POOL_ID $AZ_BATCH_TASK_ID'"
    add(sim, "0", command, environmentSettings=settings)
    until(lambda: task(sim).state == "completed")
    told = task(sim)
    assert (told.execution_info.exit_code, told.execution_info.result) == (0, "success")
    said = b"".join(client(sim).download_task_file("job", "0", "stdout.txt"))
    assert said == b"hello pool 0\n"


def test_an_exit_code_is_a_failure_and_the_next_task_gets_the_node(sim: Simulator) -> None:
    make_pool(sim, targetLowPriorityNodes=1)
    make_job(sim)
    add(sim, "0", "/bin/sh -c 'exit 3'")
    add(sim, "1", "true")
    until(lambda: task(sim, "1").state == "completed")
    told = task(sim).execution_info
    assert (told.exit_code, told.failure_info.code) == (3, "FailureExitCode")
    assert task(sim).node_info.node_id == task(sim, "1").node_info.node_id
    assert task(sim, "1").execution_info.result == "success"


def test_a_preempted_node_keeps_its_id_and_its_task_is_requeued(sim: Simulator) -> None:
    """Under neither count: both are about something else."""
    make_pool(sim)
    make_job(sim)
    add(sim, "0", constraints={"maxTaskRetryCount": 0})
    until(lambda: task(sim).state == "running")
    node_id = task(sim).node_info.node_id
    with sim._lock:
        sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=False)
    until(lambda: len(sim.datacenter.machines) == 2 and task(sim).state == "running")
    assert task(sim).node_info.node_id == node_id
    told = task(sim).execution_info
    assert (told.retry_count, told.requeue_count) == (0, 0)
    assert [node.id for node in client(sim).list_nodes("pool")] == [node_id]


def test_a_job_that_ends_with_its_tasks_ends_at_once_without_any(sim: Simulator) -> None:
    make_job(sim, onAllTasksComplete="terminatejob")
    until(lambda: client(sim).get_job("job").state == "completed")
    assert client(sim).get_job("job").execution_info.termination_reason == "AllTasksComplete"
    with pytest.raises(exceptions.ResourceExistsError) as told:
        add(sim, "0")
    assert told.value.error.code == "JobCompleted"


def test_who_terminates_a_job_ends_what_runs_and_leaves_what_waits_as_it_is(
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


def test_a_task_alone_is_ended_whether_it_runs_or_waits(sim: Simulator) -> None:
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


def test_the_library_cannot_terminate_a_job_without_a_reason(sim: Simulator) -> None:
    """Why ours gives one; may it be mended some day."""
    make_job(sim)
    with pytest.raises(ValueError, match="No value for given attribute"):
        client(sim).begin_terminate_job("job")


def test_a_job_may_wait_for_a_pool_that_is_not_there_yet(sim: Simulator) -> None:
    make_job(sim)
    add(sim, "0")
    make_pool(sim)
    until(lambda: task(sim).state == "running")


def test_of_tasks_that_come_together_each_is_judged_alone(sim: Simulator) -> None:
    make_job(sim)
    add(sim, "0")
    both = [{"id": one, "commandLine": "true"} for one in ("0", "1")]
    told = client(sim).create_task_collection("job", models.BatchTaskGroup({"value": both}))
    results = {
        one.task_id: (one.status, one.error and one.error.code) for one in told.result_values
    }
    assert results == {"0": ("clienterror", "TaskExists"), "1": ("success", None)}
    assert len(list(client(sim).list_tasks("job"))) == 2


def test_lists_come_in_pages_and_with_what_was_asked_for(sim: Simulator) -> None:
    make_job(sim)
    for number in range(5):
        add(sim, str(number))
    told = list(client(sim).list_tasks("job", max_results=2, select=["id"]))
    assert [one.id for one in told] == ["0", "1", "2", "3", "4"]
    assert told[0].command_line is None
    assert len(list(client(sim).list_tasks("job", filter="state eq 'running'"))) == 0


def test_a_pool_scales_by_its_formula_and_spares_what_runs(sim: Simulator) -> None:
    few = {"autoScaleFormula": "$TargetLowPriorityNodes = 0;"}
    make_pool(sim, enableAutoScale=True, autoScaleFormula="$TargetLowPriorityNodes = 2;")
    make_job(sim)
    add(sim, "0")
    add(sim, "1", "true")
    until(lambda: task(sim, "1").state == "completed" and task(sim).state == "running")
    told = client(sim).get_pool("pool")
    assert (told.target_low_priority_nodes, told.current_low_priority_nodes) == (2, 2)
    assert "$TargetLowPriorityNodes=2" in told.auto_scale_run.results
    client(sim).enable_pool_auto_scale("pool", models.BatchPoolEnableAutoScaleOptions(few))
    until(lambda: client(sim).get_pool("pool").current_low_priority_nodes == 1)
    assert task(sim).state == "running"


def test_a_formula_that_cannot_be_read_is_refused(sim: Simulator) -> None:
    with pytest.raises(exceptions.HttpResponseError) as told:
        make_pool(sim, enableAutoScale=True, autoScaleFormula="nonsense")
    assert told.value.error.code == "AutoScalingFormulaSyntaxError"


def test_a_pool_is_deleted_with_its_last_node(sim: Simulator) -> None:
    make_pool(sim)
    client(sim).begin_delete_pool("pool")
    until(lambda: not list(client(sim).list_pools()))


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda it: it.get_task("job", "nobody"), "TaskNotFound"),
        (lambda it: it.get_node("pool", "nobody"), "NodeNotFound"),
        (lambda it: it.get_job("nobody"), "JobNotFound"),
        (
            lambda it: it.create_job(
                models.BatchJobCreateOptions({"id": "job", "poolInfo": {"poolId": "pool"}})
            ),
            "JobExists",
        ),
        (
            lambda it: it.create_job(
                models.BatchJobCreateOptions({"id": "a b", "poolInfo": {"poolId": "pool"}})
            ),
            "InvalidPropertyValue",
        ),
        (
            lambda it: it.create_pool(models.BatchPoolCreateOptions({"id": "pool", "vmSize": "x"})),
            "PoolExists",
        ),
    ],
)
def test_what_azure_refuses_is_refused_in_its_words(
    sim: Simulator, ask: Callable[[Any], Any], code: str
) -> None:
    make_pool(sim)
    make_job(sim)
    with pytest.raises(exceptions.HttpResponseError) as told:
        ask(client(sim))
    assert told.value.error.code == code
    assert "RequestId:" in told.value.error.message


@pytest.fixture
def neighbours(sim: Simulator) -> list[Any]:
    """Two machines that are up."""
    make_pool(sim)
    make_job(sim)
    add(sim, "0")
    add(sim, "1")
    until(lambda: [task(sim, one).state for one in ("0", "1")] == ["running"] * 2)
    return list(sim.datacenter.machines.values())


def ask(
    sim: Simulator, machine: Any, path: str, method: str = "GET", body: Any = None
) -> WireResponse:
    path, _, _ = path.partition("?")
    sent = msgspec.json.encode(body) if body else b""
    request = WireRequest(method, path, {}, {"metadata": "true"}, sent)
    reply = sim.cloud.answer_metadata(machine, request)
    assert reply is not None
    return reply


def test_every_vm_hears_of_all_events_and_of_its_own_name(
    sim: Simulator, neighbours: list[Any]
) -> None:
    going, staying = neighbours
    path = "/metadata/scheduledevents"
    assert msgspec.json.decode(ask(sim, staying, path).body)["Events"] == []
    with sim._lock:
        sim.datacenter.reclaim(going, notice=True)
    (event,) = msgspec.json.decode(ask(sim, staying, path).body)["Events"]
    name = ask(sim, going, "/metadata/instance/compute/name").body.decode()
    assert (event["EventType"], event["Resources"]) == ("Preempt", [name])
    assert event["NotBefore"].endswith("GMT")
    begin = {"StartRequests": [{"EventId": event["EventId"]}]}
    ask(sim, going, path, "POST", begin)
    until(lambda: going.state == "over")


def test_nothing_is_told_without_the_header(sim: Simulator, neighbours: list[Any]) -> None:
    request = WireRequest("GET", "/metadata/scheduledevents", {}, {}, b"")
    reply = sim.cloud.answer_metadata(neighbours[0], request)
    assert reply is not None
    assert reply.status == 400
