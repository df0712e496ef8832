"""The calls to Google, by the real library to a cloud on loopback; its complaints in our words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import env
from spotfit_localsim.wire.gcp_batch import AGENTS, PROJECT, REGION
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import Simulator, serving
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch.client import BatchClient

exceptions = pytest.importorskip("google.api_core.exceptions")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")

JOB: dict[str, Any] = {
    "taskGroups": [
        {
            "taskCount": "3",
            "taskSpec": {
                "runnables": [
                    {"container": {"imageUri": "i", "entrypoint": "sleep", "commands": ["100"]}}
                ]
            },
        }
    ]
}
REQUEST = "5b16bd1e-2e3f-4a55-b9f5-7d1f6b0a4c11"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with serving(tmp_path, SimOptions(cloud="gcp_batch", boot_s=0.0)) as simulator:
        yield simulator
    calls._service.cache_clear()


@pytest.fixture
def client(sim: Simulator) -> BatchClient:
    return BatchClient(PROJECT, REGION, sim.server.url)


@pytest.mark.parametrize("second", [REQUEST, REQUEST.replace("5", "6")])
def test_a_job_of_the_same_id_is_the_same_job(
    sim: Simulator, client: BatchClient, second: str
) -> None:
    client.create("t-1", JOB, request_id=REQUEST)
    client.create("t-1", JOB, request_id=second)
    assert len(sim.cloud.memory.jobs) == 1


def test_what_is_not_there_is_told_as_nothing(client: BatchClient) -> None:
    assert client.job("nobody") is None
    assert client.tasks("nobody") == {}
    client.cancel("nobody")


def test_tasks_come_in_pages(
    client: BatchClient, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_PAGE", 2)
    client.create("t-1", JOB, request_id=REQUEST)
    while not client.tasks("t-1"):
        sim.leave.wait(0.02)
    assert sorted(client.tasks("t-1")) == [0, 1, 2]


def test_without_credentials_it_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(ProvisionPermissionError, match="does not know who asks") as told:
        BatchClient("p", "us-central1", "https://batch.googleapis.com")
    assert "gcloud auth" in told.value.do


def test_without_a_project_it_says_where_to_set_one(sim: Simulator) -> None:
    with pytest.raises(ConfigError, match="project"):
        BatchClient("", REGION, sim.server.url)


WHO = """
import google.auth
from google.auth.transport.requests import Request
credentials, project = google.auth.default()
credentials.refresh(Request())
print(project, credentials.service_account_email, credentials.token)
"""


def test_the_service_account_of_a_simulated_machine_is_who_its_agent_is(
    sim: Simulator, client: BatchClient
) -> None:
    """As on a VM: no key anywhere, everything from the metadata server."""
    client.create("t-1", JOB, request_id=REQUEST)
    while not (up := [m for m in list(sim.site.machines.values()) if m.state == "up"]):
        sim.leave.wait(0.02)
    environment = {**env.everything(), **sim.cloud.environment(up[0])}
    told = subprocess.run(
        [sys.executable, "-c", WHO], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [PROJECT, AGENTS, "simulated"]


@pytest.mark.parametrize(
    ("code", "reason", "message", "error"),
    [
        (401, "", "x", ProvisionPermissionError),
        (403, "IAM_PERMISSION_DENIED", "x", ProvisionPermissionError),
        (400, "", "x does not have access to act as the specified service account", None),
        (429, "", "Quota 'jobs' exceeded", QuotaError),
        (400, "", "job_id is invalid", ProvisionError),
        (404, "", "Location us-nowhere1 is not found", ProvisionError),
    ],
)
def test_what_waiting_does_not_cure_is_told_apart(
    code: int, reason: str, message: str, error: type[ProvisionError] | None
) -> None:
    told = calls._translated("submit", code, reason, message)
    assert type(told) is (error or ProvisionPermissionError)
    assert message in str(told)


def test_an_api_that_is_not_enabled_is_enabled_by_a_command() -> None:
    told = calls._translated("submit", 403, "SERVICE_DISABLED", "it is disabled")
    assert told is not None
    assert "services enable" in told.do


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (429, "RATE_LIMIT_EXCEEDED", "x"),
        (429, "", "limit 'Mutate requests per minute per region'"),
        (503, "", "x"),
        (500, "", "x"),
        (504, "", "x"),
    ],
)
def test_what_may_pass_is_left_to_be_tried_again(code: int, reason: str, message: str) -> None:
    assert calls._translated("submit", code, reason, message) is None


def test_a_service_out_of_order_is_asked_once(sim: Simulator, client: BatchClient) -> None:
    """The library itself would ask for a minute, and nobody else would be served meanwhile."""
    sim.troubles.expect("unavailable", 1)
    with pytest.raises(exceptions.ServiceUnavailable):
        client.job("t-1")
    assert client.job("t-1") is None
