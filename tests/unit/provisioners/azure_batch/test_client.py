"""Calls to Azure by the real library against a simulated cloud, and translation of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import env
from spotfit_localsim.clouds.azure_batch import ACCOUNT_ID, AzureBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch.client import AzureBatchClient, AzureResourceManagerClient

exceptions = pytest.importorskip("azure.core.exceptions")
pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

JOB = {"id": "t-1", "poolInfo": {"poolId": "spot"}, "onAllTasksComplete": "noaction"}
POOL = {
    "id": "spot",
    "vmSize": "Standard_D4s_v5",
    "enableAutoScale": True,
    "autoScaleFormula": "$TargetLowPriorityNodes = 2;",
}


def tasks(count: int, command: str = "sleep 100") -> list[dict[str, Any]]:
    return [{"id": str(number), "commandLine": command} for number in range(count)]


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._batch_service, calls._management_pipeline):
        cache.cache_clear()


@pytest.fixture
def client(sim: Simulator) -> AzureBatchClient:
    return AzureBatchClient(sim.server.url)


def memory_of(sim: Simulator) -> Any:
    return sim.cloud.state


def test_existing_job_id_is_not_an_error(sim: Simulator, client: AzureBatchClient) -> None:
    for _ in range(2):
        client.create_job(JOB, tasks(3))
    assert list(memory_of(sim).jobs) == ["t-1"]
    assert sorted(client.list_tasks("t-1")) == ["0", "1", "2"]


def test_job_without_tasks_is_completed_by_the_next_submission(
    sim: Simulator, client: AzureBatchClient
) -> None:
    client.create_job(JOB, tasks(1))
    memory_of(sim).jobs["t-1"].body |= {"onAllTasksComplete": "noaction"}
    client.create_job(JOB, tasks(3))
    assert len(client.list_tasks("t-1")) == 3
    assert memory_of(sim).jobs["t-1"].body["onAllTasksComplete"] == "terminatejob"


def test_tasks_are_added_in_batches_of_one_hundred(
    client: AzureBatchClient,
) -> None:
    client.create_job(JOB, tasks(201))
    assert len(client.list_tasks("t-1")) == 201


def test_adding_tasks_to_an_ended_job_is_not_an_error(
    sim: Simulator, client: AzureBatchClient
) -> None:
    client.create_job(JOB, tasks(1))
    client.terminate_job("t-1")
    client.create_job(JOB, tasks(2))
    assert list(client.list_tasks("t-1")) == ["0"]
    while (client.find_job("t-1") or {})["state"] != "completed":
        sim.stop_event.wait(0.02)
    client.terminate_job("t-1")
    client.create_job(JOB, tasks(2))


def test_missing_resources_return_none(client: AzureBatchClient) -> None:
    assert client.find_job("missing") is None
    assert client.find_pool("missing") is None
    assert client.list_tasks("missing") == {}
    assert client.list_nodes("missing") == {}
    client.terminate_job("missing")


MACHINE_CONFIGURATION = {
    "virtualMachineConfiguration": {
        "imageReference": {"publisher": "p", "offer": "o", "sku": "s"},
        "nodeAgentSkuId": "a",
    }
}


def test_pool_is_created_once(sim: Simulator, client: AzureBatchClient) -> None:
    management = AzureResourceManagerClient(sim.server.url)
    body = {
        "identity": {"type": "UserAssigned", "userAssignedIdentities": {"me": {}}},
        "properties": {
            "vmSize": "Standard_D4s_v5",
            "deploymentConfiguration": MACHINE_CONFIGURATION,
            "scaleSettings": {"autoScale": {"formula": POOL["autoScaleFormula"]}},
        },
    }
    for size in ("Standard_D4s_v5", "Standard_D8s_v5"):
        body["properties"]["vmSize"] = size
        management.create_if_absent(f"{ACCOUNT_ID}/pools/spot", body)
    pool = client.find_pool("spot")
    assert pool is not None
    assert pool["vmSize"] == "Standard_D4s_v5"
    assert pool["identity"]["userAssignedIdentities"] == [{"resourceId": "me"}]


def test_rejected_pool_is_reported_with_its_reason(sim: Simulator) -> None:
    body = {
        "properties": {
            "vmSize": "x",
            "deploymentConfiguration": MACHINE_CONFIGURATION,
            "scaleSettings": {"autoScale": {"formula": "nonsense"}},
        }
    }
    with pytest.raises(ProvisionError, match=r"create a pool.*'nonsense' is not an assignment"):
        AzureResourceManagerClient(sim.server.url).create_if_absent(
            f"{ACCOUNT_ID}/pools/spot", body
        )


def test_missing_credentials_name_the_login_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredential:
        def get_token(self, *_: Any, **__: Any) -> None:
            raise exceptions.ClientAuthenticationError("no credential is to be had")

    monkeypatch.setattr(calls, "_default_credential", NoCredential)
    client = AzureBatchClient("https://training.westeurope.batch.azure.com")
    calls._batch_service.cache_clear()
    with pytest.raises(ProvisionPermissionError, match="authentication failed") as error_info:
        client.check_access()
    assert "az login" in error_info.value.do


def test_unavailable_identity_on_a_node_is_transient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A temporary failure of a node's identity service must not end a run."""
    monkeypatch.setenv("AZ_BATCH_NODE_ID", "tvmps_1_p")
    with pytest.raises(exceptions.ClientAuthenticationError), calls._translate_errors("list jobs"):
        raise exceptions.ClientAuthenticationError("busy")


def test_http_endpoint_gets_no_credentials(monkeypatch: pytest.MonkeyPatch, sim: Simulator) -> None:
    monkeypatch.setattr(
        calls, "_default_credential", lambda: pytest.fail("credentials must not be requested")
    )
    received: list[dict[str, str]] = []
    answer = AzureBatchCloud.answer_request

    def listening(cloud: AzureBatchCloud, request: Any) -> Any:
        received.append(dict(request.headers))
        return answer(cloud, request)

    monkeypatch.setattr(AzureBatchCloud, "answer_request", listening)
    AzureBatchClient(sim.server.url).check_access()
    assert received
    assert not any("authorization" in headers for headers in received)


IDENTITY_SCRIPT = """
from azure.identity import DefaultAzureCredential
token = DefaultAzureCredential().get_token("https://batch.core.windows.net/.default")
print(token.token)
"""


def test_simulated_machine_provides_its_identity(sim: Simulator, client: AzureBatchClient) -> None:
    """As on a node: no stored key, credentials from the metadata service."""
    sim.cloud.answer_request(_post("/pools", POOL))
    client.create_job(JOB, tasks(1))
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
    assert result.stdout.strip() == "simulated"


def _post(path: str, body: Any) -> Any:
    import msgspec

    from spotfit_localsim.clouds.http_server import WireRequest

    return WireRequest("POST", path, {"api-version": "x"}, {"host": "x"}, msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, "", ProvisionPermissionError),
        (403, "AuthenticationFailed", ProvisionPermissionError),
        (403, "InsufficientAccountPermissions", ProvisionPermissionError),
        (409, "ActiveJobAndScheduleQuotaReached", QuotaError),
        (409, "PoolQuotaReached", QuotaError),
        (400, "InvalidPropertyValue", ProvisionError),
        (404, "ResourceGroupNotFound", ProvisionError),
    ],
)
def test_permanent_errors_are_distinguished(
    status: int, code: str, error: type[ProvisionError]
) -> None:
    result = calls._to_provision_error("submit", status, code, "the message")
    assert type(result) is error
    assert "the message" in str(result)


def test_wrong_key_is_distinguished_from_a_missing_role() -> None:
    raised = calls._to_provision_error("submit", 403, "AuthenticationFailed", "x")
    role = calls._to_provision_error("submit", 403, "AuthorizationFailed", "x")
    assert raised is not None
    assert role is not None
    assert "az login" in raised.do
    assert "roles" in role.do


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "ServerBusy"),
        (500, "OperationTimedOut"),
        (429, ""),
        (409, "PoolBeingDeleted"),
        (412, "ConditionNotMet"),
        (408, ""),
    ],
)
def test_transient_errors_are_retryable(status: int, code: str) -> None:
    assert calls._to_provision_error("submit", status, code, "x") is None


@pytest.mark.parametrize("kind", ["unavailable", "throttled"])
def test_client_does_not_retry_an_unavailable_service(
    sim: Simulator, client: AzureBatchClient, kind: str
) -> None:
    """The library itself would retry for minutes, and indefinitely when it adds tasks."""
    sim.faults.inject(kind, 1)
    with pytest.raises(exceptions.HttpResponseError):
        client.find_job("t-1")
    assert client.find_job("t-1") is None
    sim.faults.inject(kind, 2)
    with pytest.raises(exceptions.HttpResponseError):
        client.create_job(JOB, tasks(1))
    assert sim.faults.is_active(kind), "the library retried the request"  # type: ignore[arg-type]
