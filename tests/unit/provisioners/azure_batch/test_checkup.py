"""Checks of an Azure subscription, against a simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest
from spotfit.provision.api import AccountCheck
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.clouds.azure_batch import IDENTITY_ID, AzureBatchCloud
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.azure_batch import checkup
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch import provisioner as verbs
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner

pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

POOL = "the pool has spot nodes and scales to zero"
QUOTAS = "quotas allow a spot node"
ACCOUNT = "account_id and endpoint are the same account"
NODE_IDENTITY = "the identity of the nodes exists"
CALLER_PERMISSIONS = "the caller may rent machines"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._batch_service, calls._management_pipeline, verbs._client_for_endpoint):
        cache.cache_clear()


def open_provisioner(sim: Simulator, **options: Any) -> AzureBatchProvisioner:
    access = AzureBatchCloud.client_access(sim.server.url)
    return AzureBatchProvisioner.with_options(**{**access.options, **options})


def run_checks(sim: Simulator, **options: Any) -> dict[str, AccountCheck]:
    return {one.name: one for one in open_provisioner(sim, **options).check_account()}


def failed_checks(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


@pytest.fixture
def with_pool(sim: Simulator, tmp_path: Path) -> Simulator:
    """A pool of an earlier group."""
    provisioner = open_provisioner(sim)
    plan = provisioner.plan(
        GroupRequest(token=Token("t-0123456789ab"), num_workers=1, total_workers=1)
    )
    handle = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    provisioner.cancel(handle)
    return sim


def test_sound_account_passes_all_checks(sim: Simulator) -> None:
    findings = run_checks(sim)
    assert not failed_checks(findings)
    assert all(one.conclusive for one in findings.values())
    assert "will be created" in findings[POOL].detail
    assert findings[QUOTAS].detail == (
        "100 spot cores: 25 machines; 100 dedicated cores: 25 on-demand machines"
    )
    assert findings[CALLER_PERMISSIONS].detail == "5 permissions"


def test_requests_to_resource_manager_have_no_version_that_is_retired(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API versions of Microsoft.Batch before 2025-06-01 are announced to be retired.

    https://github.com/Azure/Batch/issues/140
    """
    versions: dict[str, str] = {}
    answer = sim.cloud.answer_request

    def record(request: WireRequest) -> WireResponse:
        if "/Microsoft.Batch/" in request.path:
            versions[f"{request.method} {request.path}"] = request.query["api-version"]
        return answer(request)

    monkeypatch.setattr(sim.cloud, "answer_request", record)
    run_checks(sim)
    provisioner = open_provisioner(sim)
    plan = provisioner.plan(
        GroupRequest(token=Token("t-0123456789ab"), num_workers=1, total_workers=1)
    )
    provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    # The doctor uses older versions of other services, such as that of permissions.
    batch = {what: one for what, one in versions.items() if "Microsoft.Authorization" not in what}
    assert {what.partition(" ")[0] for what in batch} == {"GET", "PUT"}
    assert {what: one for what, one in batch.items() if one < "2025-06-01"} == {}


def test_on_demand_pool_must_have_dedicated_nodes(with_pool: Simulator) -> None:
    (pool,) = with_pool.cloud.state.pools
    failed = failed_checks(run_checks(with_pool, pool="other", on_demand_pool=pool))
    assert list(failed) == ["the on-demand pool has dedicated nodes and scales to zero"]
    assert "has a formula without $TargetDedicatedNodes" in next(iter(failed.values()))


def test_all_failed_checks_are_reported_together(sim: Simulator) -> None:
    sim.cloud.account |= {"lowPriorityCoreQuota": 3, "poolQuota": 0}  # type: ignore[attr-defined]
    sim.faults.deny_permissions([checkup._JOB_DATA_ACTIONS[1], checkup._WRITE_POOLS_ACTION])
    result = failed_checks(run_checks(sim, identity_client_id="another"))
    principal_id = "11111111-1111-1111-1111-111111111111"
    assert result == {
        QUOTAS: (
            "The quota of the Batch account of AzureBatchOptions is 3 spot cores, but "
            "Standard_D4s_v5 has 4; no pools."
        ),
        NODE_IDENTITY: (
            "AzureBatchOptions(identity_client_id='another') is not the client id of "
            f"{IDENTITY_ID}, which is {principal_id}."
        ),
        CALLER_PERMISSIONS: (
            "The account of your Azure credentials lacks permissions on the Batch account or "
            "identity: "
            f"{checkup._WRITE_POOLS_ACTION}, {checkup._JOB_DATA_ACTIONS[1]}."
        ),
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"enableAutoScale": False}, "has no autoscaling"),
        ({"autoScaleFormula": "$TargetDedicatedNodes = 1;"}, "without $TargetLowPriorityNodes"),
        ({"enableInterNodeCommunication": False}, "has no inter-node communication"),
        ({"taskSlotsPerNode": 4}, "several tasks"),
        ({"virtualMachineConfiguration": {}}, "does not run containers"),
        ({"identity": None}, "no identity"),
        (
            {"identity": {"userAssignedIdentities": [{"resourceId": "/other"}]}},
            "does not assign /subscriptions",
        ),
    ],
)
def test_unsuitable_pool_properties_are_reported(
    with_pool: Simulator, change: dict[str, Any], expected: str
) -> None:
    (pool,) = with_pool.cloud.state.pools.values()
    pool.body |= change
    [(what, found)] = failed_checks(run_checks(with_pool)).items()
    assert what == POOL
    assert expected in found


def test_resize_errors_of_the_pool_are_reported(with_pool: Simulator) -> None:
    (pool,) = with_pool.cloud.state.pools.values()
    code = "AccountLowPriorityCoreQuotaReached"
    pool.resize_errors = [{"code": code, "message": "The core quota is reached."}]
    result = failed_checks(run_checks(with_pool))
    assert result.keys() == {"the pool can grow"}
    assert result["the pool can grow"].startswith("The last resize of the Batch pool spotfit-")
    assert result["the pool can grow"].endswith(f" failed: {code}: The core quota is reached.")


def test_missing_pool_without_creation_options_is_reported(sim: Simulator) -> None:
    result = failed_checks(run_checks(sim, pool="existing", vm_size="", identity=""))
    assert result == {POOL: "The Batch pool 'existing' does not exist."}


def test_invalid_or_mismatched_account_id_is_reported(sim: Simulator) -> None:
    checks = checkup._AzureAccountChecks(
        open_provisioner(sim).options, open_provisioner(sim)._client
    )
    sim.cloud.account["provisioningState"] = "Invalid"  # type: ignore[attr-defined]
    (message,) = failed_checks(run_checks(sim)).values()
    assert message.endswith(
        "batchAccounts/spotfitsim is not ready: its provisioning state is Invalid."
    )
    other_options = open_provisioner(sim, endpoint="https://other.sim.batch.azure.com").options
    checks = checkup._AzureAccountChecks(other_options, open_provisioner(sim)._client)
    with pytest.raises(ConfigError, match="endpoint is other"):
        checks.check_batch_account()


def test_user_subscription_mode_uses_subscription_quotas(sim: Simulator) -> None:
    sim.cloud.account["poolAllocationMode"] = "UserSubscription"  # type: ignore[attr-defined]
    assert not run_checks(sim)[QUOTAS].conclusive


def test_denied_queries_are_inconclusive(sim: Simulator) -> None:
    sim.faults.deny_permissions(
        [
            "Microsoft.Batch/batchAccounts/read",
            "Microsoft.ManagedIdentity/userAssignedIdentities/read",
            "Microsoft.Authorization/permissions/read",
        ]
    )
    findings = run_checks(sim)
    assert not failed_checks(findings)
    unseen = {what for what, one in findings.items() if not one.conclusive}
    assert unseen == {ACCOUNT, QUOTAS, NODE_IDENTITY, CALLER_PERMISSIONS}
    without = run_checks(sim, account_id="", identity="", pool="existing")
    assert {what for what, one in without.items() if not one.conclusive} == unseen


def test_missing_identity_is_reported(sim: Simulator) -> None:
    missing = f"{IDENTITY_ID}2"
    assert failed_checks(run_checks(sim, identity=missing)) == {
        NODE_IDENTITY: f"The managed identity {missing} does not exist."
    }


def test_missing_credentials_are_reported(sim: Simulator) -> None:
    sim.faults.inject("credentials", 100)
    result = failed_checks(run_checks(sim))
    assert all("authentication failed" in found for found in result.values())
    assert POOL in result


@pytest.mark.parametrize(
    ("role", "is_granted"),
    [
        ({"actions": ["Microsoft.Batch/*"]}, True),
        ({"actions": ["*/read"]}, True),
        ({"actions": ["*"], "notActions": ["Microsoft.Batch/batchAccounts/pools/*"]}, False),
        ({"dataActions": ["*"]}, False),
    ],
)
def test_role_actions_are_matched(role: dict[str, Any], is_granted: bool) -> None:
    missing_actions = list(
        checkup._missing_actions([role], ("Microsoft.Batch/batchAccounts/pools/read",), ())
    )
    assert (not missing_actions) is is_granted
