"""Calls to AWS by boto3 against a simulated cloud, and translation of errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit_localsim.clouds.aws_batch import REGION
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.aws_batch import client as calls
from spotfit_provisioners.aws_batch.client import AwsBatchClient, caller_arn, lowest_spot_price_usd

pytest.importorskip("boto3")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    calls._client.cache_clear()
    with running_simulator(tmp_path, SimOptions(cloud="aws_batch")) as simulator:
        yield simulator
    calls._client.cache_clear()


@pytest.fixture
def client(sim: Simulator) -> AwsBatchClient:
    return AwsBatchClient(REGION, sim.server.url)


def test_job_definition_is_registered_once(client: AwsBatchClient) -> None:
    definition = {
        "jobDefinitionName": "spotfit-1",
        "type": "container",
        "containerProperties": {
            "image": "i",
            "command": ["true"],
            "resourceRequirements": [
                {"type": "VCPU", "value": "1"},
                {"type": "MEMORY", "value": "2048"},
            ],
        },
    }
    assert client.register_definition(definition) == client.register_definition(definition)


def test_child_jobs_are_not_listed_as_jobs(client: AwsBatchClient) -> None:
    """Moto lists child jobs under the name of their parent."""

    class Pages:
        def get_paginator(self, _operation: str) -> Pages:
            return self

        def paginate(self, **_arguments: object) -> Iterator[dict[str, list[dict[str, object]]]]:
            yield {"jobSummaryList": [{"jobId": one, "createdAt": 1} for one in ("a:0", "a:1")]}
            yield {
                "jobSummaryList": [{"jobId": "b", "createdAt": 2}, {"jobId": "a", "createdAt": 1}]
            }

    client._batch = Pages()
    assert [job["jobId"] for job in client.list_jobs_by_name("spot", "t-one")] == ["a", "b"]


def test_identity_and_spot_prices_are_queried(sim: Simulator) -> None:
    assert caller_arn(REGION, sim.server.url).endswith(":user/sim")
    assert lowest_spot_price_usd(REGION, ["g5.xlarge"], sim.server.url) == 0.4321, (
        "the latest price"
    )


def test_missing_credentials_name_a_remedy(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ProvisionPermissionError, match="authentication failed") as error_info:
        caller_arn(REGION, sim.server.url)
    assert "get-caller-identity" in error_info.value.do


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_the_region_of_the_environment_is_used(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls._client.cache_clear()
    monkeypatch.setenv(variable, "eu-north-1")
    assert AwsBatchClient("", "http://127.0.0.1:1").region == "eu-north-1"
    calls._client.cache_clear()


def test_missing_region_names_the_option() -> None:
    calls._client.cache_clear()
    with pytest.raises(ConfigError, match="region"):
        AwsBatchClient("", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        ("ExpiredToken", "x", ProvisionPermissionError),
        ("AuthFailure", "x", ProvisionPermissionError),
        ("AccessDeniedException", "x", ProvisionPermissionError),
        ("ServiceQuotaExceededException", "x", QuotaError),
        ("ClientException", "You have exceeded your limit", QuotaError),
        ("ClientException", "JobQueue spot does not exist", ProvisionError),
    ],
)
def test_permanent_errors_are_distinguished(
    code: str, message: str, error: type[ProvisionError]
) -> None:
    result = calls._to_provision_error("submit", code, message)
    assert type(result) is error
    assert message in str(result)


@pytest.mark.parametrize(
    "code", ["TooManyRequestsException", "ServerException", "ThrottlingException"]
)
def test_transient_errors_are_retryable(code: str) -> None:
    assert calls._to_provision_error("submit", code, "x") is None
