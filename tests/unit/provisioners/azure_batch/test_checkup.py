"""What Azure Batch needs is looked at one by one, against a simulated subscription."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest
from spotfit.provision.checkup import AccountCheck
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.clouds.azure_batch import IDENTITY_ID, AzureBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.azure_batch import checkup
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch import provisioner as verbs
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner

pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")

POOL = "the pool has spot nodes and scales to zero"
QUOTAS = "quotas allow a spot node"
ACCOUNT = "account_id and endpoint are the same account"
WHO = "the identity of the nodes exists"
RIGHTS = "the caller may rent machines"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._batch_service, calls._management_pipeline, verbs._client_for_endpoint):
        cache.cache_clear()


def opened(sim: Simulator, **options: Any) -> AzureBatchProvisioner:
    access = AzureBatchCloud.client_access(sim.server.url)
    return AzureBatchProvisioner.with_options(**{**access.options, **options})


def examined(sim: Simulator, **options: Any) -> dict[str, AccountCheck]:
    return {one.name: one for one in opened(sim, **options).check_account()}


def wrong(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


@pytest.fixture
def with_pool(sim: Simulator, tmp_path: Path) -> Simulator:
    """A pool that an earlier group has left."""
    provisioner = opened(sim)
    plan = provisioner.plan(
        GroupRequest(token=Token("t-0123456789ab"), num_workers=1, total_workers=1)
    )
    handle = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    provisioner.cancel(handle)
    return sim


def test_of_a_sound_account_everything_is_told(sim: Simulator) -> None:
    findings = examined(sim)
    assert not wrong(findings)
    assert all(one.conclusive for one in findings.values())
    assert "will be created" in findings[POOL].detail
    assert findings[QUOTAS].detail == "100 spot cores: 25 machines"
    assert findings[RIGHTS].detail == "5 permissions"


def test_everything_that_is_wrong_is_told_at_once(sim: Simulator) -> None:
    sim.cloud.account |= {"lowPriorityCoreQuota": 3, "poolQuota": 0}  # type: ignore[attr-defined]
    sim.faults.deny_permissions([checkup._JOB_DATA_ACTIONS[1], checkup._WRITE_POOLS_ACTION])
    told = wrong(examined(sim, identity_client_id="another"))
    mine = "11111111-1111-1111-1111-111111111111"
    assert told == {
        QUOTAS: (
            "The quota of the Batch account is 3 spot cores, but Standard_D4s_v5 has 4; no pools."
        ),
        WHO: (
            f"AzureBatchOptions(identity_client_id='another') is not the client id of "
            f"{IDENTITY_ID}, which is {mine}."
        ),
        RIGHTS: (
            "The caller lacks permissions on the Batch account or identity: "
            f"{checkup._WRITE_POOLS_ACTION}, {checkup._JOB_DATA_ACTIONS[1]}."
        ),
    }


@pytest.mark.parametrize(
    ("change", "told"),
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
def test_what_is_wrong_with_a_pool(with_pool: Simulator, change: dict[str, Any], told: str) -> None:
    (pool,) = with_pool.cloud.state.pools.values()
    pool.body |= change
    [(what, found)] = wrong(examined(with_pool)).items()
    assert what == POOL
    assert told in found


def test_a_pool_that_could_not_grow_says_why(with_pool: Simulator) -> None:
    (pool,) = with_pool.cloud.state.pools.values()
    code = "AccountLowPriorityCoreQuotaReached"
    pool.resize_errors = [{"code": code, "message": "The core quota is reached."}]
    told = wrong(examined(with_pool))
    assert told.keys() == {"the pool can grow"}
    assert told["the pool can grow"].startswith("The last resize of the Batch pool spotfit-")
    assert told["the pool can grow"].endswith(f" failed: {code}: The core quota is reached.")


def test_a_pool_that_nobody_can_make_is_missed(sim: Simulator) -> None:
    told = wrong(examined(sim, pool="mine", vm_size="", identity=""))
    assert told == {POOL: "The Batch pool 'mine' does not exist."}


def test_an_account_that_is_another_or_none_or_not_whole_is_told(sim: Simulator) -> None:
    examiner = checkup._AzureAccountChecks(opened(sim).options, opened(sim)._client)
    sim.cloud.account["provisioningState"] = "Invalid"  # type: ignore[attr-defined]
    (message,) = wrong(examined(sim)).values()
    assert message.endswith(
        "batchAccounts/spotfitsim is not ready: its provisioning state is Invalid."
    )
    elsewhere = opened(sim, endpoint="https://other.sim.batch.azure.com").options
    examiner = checkup._AzureAccountChecks(elsewhere, opened(sim)._client)
    with pytest.raises(ConfigError, match="endpoint is other"):
        examiner.check_batch_account()


def test_machines_of_a_subscription_of_ones_own_have_other_quotas(sim: Simulator) -> None:
    sim.cloud.account["poolAllocationMode"] = "UserSubscription"  # type: ignore[attr-defined]
    assert not examined(sim)[QUOTAS].conclusive


def test_what_we_may_not_see_is_not_held_to_be_wrong(sim: Simulator) -> None:
    sim.faults.deny_permissions(
        [
            "Microsoft.Batch/batchAccounts/read",
            "Microsoft.ManagedIdentity/userAssignedIdentities/read",
            "Microsoft.Authorization/permissions/read",
        ]
    )
    findings = examined(sim)
    assert not wrong(findings)
    unseen = {what for what, one in findings.items() if not one.conclusive}
    assert unseen == {ACCOUNT, QUOTAS, WHO, RIGHTS}
    without = examined(sim, account_id="", identity="", pool="mine")
    assert {what for what, one in without.items() if not one.conclusive} == unseen


def test_an_identity_that_is_not_there_is_told(sim: Simulator) -> None:
    missing = f"{IDENTITY_ID}2"
    assert wrong(examined(sim, identity=missing)) == {
        WHO: f"The managed identity {missing} does not exist."
    }


def test_who_is_not_known_hears_of_it(sim: Simulator) -> None:
    sim.faults.inject("credentials", 100)
    told = wrong(examined(sim))
    assert all("authentication failed" in found for found in told.values())
    assert POOL in told


@pytest.mark.parametrize(
    ("role", "gives"),
    [
        ({"actions": ["Microsoft.Batch/*"]}, True),
        ({"actions": ["*/read"]}, True),
        ({"actions": ["*"], "notActions": ["Microsoft.Batch/batchAccounts/pools/*"]}, False),
        ({"dataActions": ["*"]}, False),
    ],
)
def test_what_a_role_gives(role: dict[str, Any], gives: bool) -> None:
    lacking = list(
        checkup._missing_actions([role], ("Microsoft.Batch/batchAccounts/pools/read",), ())
    )
    assert (not lacking) is gives
