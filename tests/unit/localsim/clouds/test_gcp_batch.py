"""The simulated Google Cloud Batch reproduces documented and observed deviations of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds import gcp_batch as cloud
from spotfit_localsim.clouds.gcp_batch import PROJECT, REGION
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

batch = pytest.importorskip("google.cloud.batch_v1")
exceptions = pytest.importorskip("google.api_core.exceptions")
pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")

PARENT = f"projects/{PROJECT}/locations/{REGION}"
JobState, TaskState = batch.JobStatus.State, batch.TaskStatus.State


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
    with running_simulator(tmp_path, SimOptions(cloud="gcp_batch", boot_s=0.0)) as simulator:
        yield simulator


def client(sim: Simulator) -> Any:
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials

    return batch.BatchServiceClient(
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        transport="rest",
        client_options=ClientOptions(api_endpoint=sim.server.url),
    )


def job_body(command: str = "exec sleep 100", *, count: int = 1, **spec: Any) -> dict[str, Any]:
    container = {"image_uri": "i", "entrypoint": "/bin/sh", "commands": ["-c", command]}
    task = {"runnables": [{"container": container}], **spec}
    allocation = {"instances": [{"policy": {"provisioning_model": "SPOT"}}]}
    return {
        "task_groups": [{"task_count": count, "task_spec": task}],
        "allocation_policy": allocation,
    }


def submit(sim: Simulator, job: dict[str, Any], job_id: str = "job", **more: Any) -> str:
    request = {"parent": PARENT, "job_id": job_id, "job": job, **more}
    return str(client(sim).create_job(request).name)


def until(sim: Simulator, name: str, state: Any) -> Any:
    clock, service = SystemClock(), client(sim)
    deadline_s = clock.now() + 60
    while (job := service.get_job(name=name)).status.state != state:
        assert clock.now() < deadline_s, job
        clock.wait(0.02)
    return job


def tasks_of(sim: Simulator, name: str) -> list[Any]:
    return list(client(sim).list_tasks(parent=f"{name}/taskGroups/group0"))


def test_task_gets_its_index_and_the_number_of_tasks(sim: Simulator) -> None:
    name = submit(sim, job_body("echo $BATCH_TASK_INDEX of $BATCH_TASK_COUNT", count=2))
    job = until(sim, name, JobState.SUCCEEDED)
    assert job.status.task_groups["group0"].counts == {"SUCCEEDED": 2}
    outputs = sorted(sim.datacenter.output(machine) for machine in sim.datacenter.machines.values())
    assert outputs == ["0 of 2\n", "1 of 2\n"]


def test_failed_task_fails_the_job_after_all_tasks_ended(sim: Simulator) -> None:
    name = submit(sim, job_body("exit $BATCH_TASK_INDEX", count=2))
    until(sim, name, JobState.FAILED)
    states = [task.status.state for task in tasks_of(sim, name)]
    assert states == [TaskState.SUCCEEDED, TaskState.FAILED]


def test_retries_of_all_causes_count_against_one_limit(sim: Simulator) -> None:
    policy = {"action": "RETRY_TASK", "action_condition": {"exit_codes": [50001, 85]}}
    name = submit(sim, job_body("exit 85", max_retry_count=2, lifecycle_policies=[policy]))
    until(sim, name, JobState.FAILED)
    (task,) = tasks_of(sim, name)
    codes = [event.task_execution.exit_code for event in task.status.status_events]
    assert sorted(filter(None, codes)) == [85] * 3
    times = [event.event_time for event in task.status.status_events]
    assert times != sorted(times), "the API does not sort events"


@pytest.mark.parametrize(
    ("action", "codes", "tries"),
    [("RETRY_TASK", [1], 1), ("FAIL_TASK", [1], 3), ("FAIL_TASK", [2], 1)],
)
def test_exit_codes_that_a_policy_does_not_list_get_the_opposite_action(
    sim: Simulator, action: str, codes: list[int], tries: int
) -> None:
    policy = {"action": action, "action_condition": {"exit_codes": codes}}
    name = submit(sim, job_body("exit 2", max_retry_count=2, lifecycle_policies=[policy]))
    until(sim, name, JobState.FAILED)
    assert len(sim.datacenter.machines) == tries


def test_cancelled_job_can_be_queried_and_deleted_job_cannot(sim: Simulator) -> None:
    name = submit(sim, job_body())
    until(sim, name, JobState.RUNNING)
    operation = client(sim).cancel_job({"name": name})
    until(sim, name, JobState.CANCELLED)
    assert operation.metadata.verb == "cancel"
    with pytest.raises(exceptions.BadRequest):
        client(sim).cancel_job({"name": name})
    client(sim).delete_job({"name": name})
    clock = SystemClock()
    deadline_s = clock.now() + 60
    while sim.cloud.state.jobs:
        assert clock.now() < deadline_s
        clock.wait(0.02)
    with pytest.raises(exceptions.NotFound):
        client(sim).get_job(name=name)


def test_existing_job_id_is_rejected_unless_the_request_id_is_repeated(sim: Simulator) -> None:
    first = submit(sim, job_body(), request_id="5b16bd1e-2e3f-4a55-b9f5-7d1f6b0a4c11")
    assert submit(sim, job_body(), request_id="5b16bd1e-2e3f-4a55-b9f5-7d1f6b0a4c11") == first
    with pytest.raises(exceptions.Conflict):
        submit(sim, job_body())


@pytest.mark.parametrize(
    ("job_id", "job"),
    [
        ("Job", job_body()),
        ("job", {"task_groups": []}),
        ("job", job_body(max_retry_count=11)),
        ("job", job_body(lifecycle_policies=[{"action": "RETRY_TASK"}] * 2)),
        ("job", job_body(environment={"variables": {"A": "x" * 2**20}})),
        (
            "job",
            {
                **job_body(),
                "allocation_policy": {"location": {"allowed_locations": ["regions/us-west1"]}},
            },
        ),
    ],
)
def test_invalid_job_is_rejected(sim: Simulator, job_id: str, job: dict[str, Any]) -> None:
    with pytest.raises(exceptions.BadRequest):
        submit(sim, job, job_id)


def test_states_are_names_or_numbers_by_the_alt_parameter(sim: Simulator) -> None:
    name = submit(sim, job_body("true"))
    until(sim, name, JobState.SUCCEEDED)

    def status(path: str, **query: str) -> Any:
        import msgspec

        reply = sim.cloud.answer_request(WireRequest("GET", f"/v1/{path}", query, {}, b""))
        return msgspec.json.decode(reply.body)["status"]

    numbers = {"$alt": "json;enum-encoding=int"}
    assert status(name)["state"] == "SUCCEEDED"
    assert status(name, **numbers)["state"] == 4
    task = status(f"{name}/taskGroups/group0/tasks/0", **numbers)
    assert task["state"] == 5
    assert {event["taskState"] for event in task["statusEvents"]} <= {3, 5}


def test_metadata_server_holds_a_request_with_wait_for_change(sim: Simulator) -> None:
    name = submit(sim, job_body())
    until(sim, name, JobState.RUNNING)
    (machine,) = list(sim.datacenter.machines.values())
    path = "/computeMetadata/v1/instance/preempted"

    def get(query: dict[str, str], headers: dict[str, str]) -> WireResponse:
        reply = sim.cloud.answer_metadata(machine, WireRequest("GET", path, query, headers, b""))
        assert reply is not None
        return reply

    flavor = {"metadata-flavor": "Google"}
    assert get({}, {}).status == 403
    first = get({}, flavor)
    assert (first.body, first.hold_s) == (b"FALSE", 0.0)
    wait = {"wait_for_change": "true", "timeout_sec": "3", "last_etag": first.headers["etag"]}
    assert get(wait, flavor).hold_s == 3.0
    with sim._lock:
        sim.datacenter.reclaim(machine, notice=True)
    reply = get(wait, flavor)
    assert (reply.body, reply.hold_s) == (b"TRUE", 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": {"Team": "a"}}, "label Team=a is invalid"),
        ({"labels": {"team": "A"}}, "label team=A is invalid"),
        ({"labels": {"goog-x": "a"}}, "reserved"),
        ({"labels": {f"a{n}": "b" for n in range(65)}}, "at most 64 labels"),
        ({"task_groups": [{"task_spec": {}}]}, "runnables"),
        ({"priority": 100}, "priority"),
    ],
)
def test_documented_limits_of_jobs_are_enforced(
    sim: Simulator, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(exceptions.BadRequest, match=message):
        submit(sim, {**job_body(), **change})


@pytest.mark.parametrize("count", [100_001, -1])
def test_number_of_tasks_is_limited(sim: Simulator, count: int) -> None:
    with pytest.raises(exceptions.BadRequest, match="task_count"):
        submit(sim, job_body(count=count))


@pytest.mark.parametrize("request_id", ["x", "00000000-0000-0000-0000-000000000000"])
def test_request_id_must_be_a_uuid(sim: Simulator, request_id: str) -> None:
    with pytest.raises(exceptions.BadRequest, match="valid UUID"):
        submit(sim, job_body(), request_id=request_id)


def test_a_job_runs_as_many_tasks_at_once_as_its_parallelism_allows(sim: Simulator) -> None:
    body = job_body("true", count=5)
    body["task_groups"][0]["parallelism"] = 1
    with sim._lock:
        submit_without_server(sim, body)
        for _ in range(3):
            sim.cloud.tick()
        assert len(sim.datacenter.machines) == 1
    until(sim, f"{PARENT}/jobs/job", JobState.SUCCEEDED)
    assert len(sim.datacenter.machines) == 5


def submit_without_server(sim: Simulator, body: dict[str, Any]) -> None:
    """Submit in this thread, which holds the lock of the simulator."""
    content = batch.Job.to_json(batch.Job(body)).encode()
    request = WireRequest("POST", f"/v1/{PARENT}/jobs", {"jobId": "job"}, {}, content)
    assert sim.cloud.answer_request(request).status == 200
