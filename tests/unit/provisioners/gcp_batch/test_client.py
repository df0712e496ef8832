"""Calls to Google by the real library against a simulated cloud, and translation of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import env
from spotfit_localsim.clouds.gcp_batch import AGENT_SERVICE_ACCOUNT, PROJECT, REGION
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch.client import GcpBatchClient

exceptions = pytest.importorskip("google.api_core.exceptions")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

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
    with running_simulator(tmp_path, SimOptions(cloud="gcp_batch", boot_s=0.0)) as simulator:
        yield simulator
    calls._batch_service.cache_clear()


@pytest.fixture
def client(sim: Simulator) -> GcpBatchClient:
    return GcpBatchClient(PROJECT, REGION, sim.server.url)


@pytest.mark.parametrize("second", [REQUEST, REQUEST.replace("5", "6")])
def test_existing_job_id_is_not_an_error(
    sim: Simulator, client: GcpBatchClient, second: str
) -> None:
    client.create_job("t-1", JOB, request_id=REQUEST)
    client.create_job("t-1", JOB, request_id=second)
    assert len(sim.cloud.state.jobs) == 1


def test_missing_resources_return_none(client: GcpBatchClient) -> None:
    assert client.find_job("missing") is None
    assert client.list_tasks("missing") == {}
    client.cancel_job("missing")


def test_tasks_are_read_over_all_pages(
    client: GcpBatchClient, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_PAGE_SIZE", 2)
    client.create_job("t-1", JOB, request_id=REQUEST)
    while not client.list_tasks("t-1"):
        sim.stop_event.wait(0.02)
    assert sorted(client.list_tasks("t-1")) == [0, 1, 2]


def test_missing_credentials_name_the_login_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(ProvisionPermissionError, match="authentication failed") as error_info:
        GcpBatchClient("p", "us-central1", "https://batch.googleapis.com")
    assert "gcloud auth" in error_info.value.do


def test_missing_project_names_the_option(sim: Simulator) -> None:
    with pytest.raises(ConfigError, match="project"):
        GcpBatchClient("", REGION, sim.server.url)


IDENTITY_SCRIPT = """
import google.auth
from google.auth.transport.requests import Request
credentials, project = google.auth.default()
credentials.refresh(Request())
print(project, credentials.service_account_email, credentials.token)
"""


def test_simulated_machine_provides_its_service_account(
    sim: Simulator, client: GcpBatchClient
) -> None:
    """As on a VM: no stored key, credentials from the metadata server."""
    client.create_job("t-1", JOB, request_id=REQUEST)
    while not (up := [m for m in list(sim.datacenter.machines.values()) if m.state == "up"]):
        sim.stop_event.wait(0.02)
    environment = {**env.copy_environment(), **sim.cloud.task_environment(up[0])}
    result = subprocess.run(
        [sys.executable, "-c", IDENTITY_SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [PROJECT, AGENT_SERVICE_ACCOUNT, "simulated"]


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
def test_permanent_errors_are_distinguished(
    code: int, reason: str, message: str, error: type[ProvisionError] | None
) -> None:
    result = calls._to_provision_error("submit", code, reason, message)
    assert type(result) is (error or ProvisionPermissionError)
    assert message in str(result)


def test_disabled_api_names_the_command_that_enables_it() -> None:
    result = calls._to_provision_error("submit", 403, "SERVICE_DISABLED", "it is disabled")
    assert result is not None
    assert "services enable" in result.do


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
def test_transient_errors_are_retryable(code: int, reason: str, message: str) -> None:
    assert calls._to_provision_error("submit", code, reason, message) is None


def test_client_does_not_retry_an_unavailable_service(
    sim: Simulator, client: GcpBatchClient
) -> None:
    """The library itself would retry for a minute and block other calls."""
    sim.faults.inject("unavailable", 1)
    with pytest.raises(exceptions.ServiceUnavailable):
        client.find_job("t-1")
    assert client.find_job("t-1") is None
