"""What Azure Batch needs is looked at one by one, against a simulated subscription."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host.dice import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest
from spotfit.provision.checkup import Finding
from spotfit.provision.launch import Launch
from spotfit_localsim.wire.azure_batch import IDENTITY, AzureBatchCloud
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import Simulator, serving
from spotfit_provisioners.azure_batch import checkup
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch import provisioner as verbs
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner

pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")

POOL = "there is a pool of spot nodes that scales to zero"
QUOTAS = "quotas leave room for a spot node"
ACCOUNT = "the account is the one that answers"
WHO = "the identity of the nodes is there"
RIGHTS = "we may rent machines"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with serving(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._service, calls._management, verbs._client_at):
        cache.cache_clear()


def opened(sim: Simulator, **options: Any) -> AzureBatchProvisioner:
    access = AzureBatchCloud.access(sim.server.url)
    return AzureBatchProvisioner.with_options(**{**access.options, **options})


def examined(sim: Simulator, **options: Any) -> dict[str, Finding]:
    return {one.what: one for one in opened(sim, **options).examine()}


def wrong(findings: dict[str, Finding]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.well)
    return {what: one.found for what, one in findings.items() if not one.well}


@pytest.fixture
def with_pool(sim: Simulator, tmp_path: Path) -> Simulator:
    """A pool that an earlier group has left."""
    provisioner = opened(sim)
    plan = provisioner.plan(GroupRequest(Token("t-0123456789ab"), 1, 1))
    handle = provisioner.submit(plan, Launch(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    provisioner.cancel(handle)
    return sim


def test_of_a_sound_account_everything_is_told(sim: Simulator) -> None:
    findings = examined(sim)
    assert not wrong(findings)
    assert all(one.seen for one in findings.values())
    assert "will be made" in findings[POOL].found
    assert findings[QUOTAS].found == "100 spot cores: 25 machines"
    assert findings[RIGHTS].found == "5 rights"


def test_everything_that_is_wrong_is_told_at_once(sim: Simulator) -> None:
    sim.cloud.account |= {"lowPriorityCoreQuota": 3, "poolQuota": 0}  # type: ignore[attr-defined]
    sim.troubles.forbid([checkup._RENTS[1], checkup._MAKES_POOLS])
    told = wrong(examined(sim, identity_client_id="another"))
    mine = "11111111-1111-1111-1111-111111111111"
    assert told == {
        QUOTAS: ("The account may have 3 spot cores, and Standard_D4s_v5 has 4; no pools."),
        WHO: f"Its client id is {mine}, and identity_client_id says another.",
        RIGHTS: f"We lack {checkup._MAKES_POOLS}, {checkup._RENTS[1]}.",
    }


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"enableAutoScale": False}, "does not scale itself"),
        ({"autoScaleFormula": "$TargetDedicatedNodes = 1;"}, "without $TargetLowPriorityNodes"),
        ({"enableInterNodeCommunication": False}, "reach each other"),
        ({"taskSlotsPerNode": 4}, "several tasks"),
        ({"virtualMachineConfiguration": {}}, "runs no containers"),
        ({"identity": None}, "no identity"),
        (
            {"identity": {"userAssignedIdentities": [{"resourceId": "/other"}]}},
            "does not give its nodes /subscriptions",
        ),
    ],
)
def test_what_is_wrong_with_a_pool(with_pool: Simulator, change: dict[str, Any], told: str) -> None:
    (pool,) = with_pool.cloud.memory.pools.values()
    pool.body |= change
    [(what, found)] = wrong(examined(with_pool)).items()
    assert what == POOL
    assert told in found


def test_a_pool_that_could_not_grow_says_why(with_pool: Simulator) -> None:
    (pool,) = with_pool.cloud.memory.pools.values()
    code = "AccountLowPriorityCoreQuotaReached"
    pool.resize_errors = [{"code": code, "message": "The core quota is reached."}]
    told = wrong(examined(with_pool))
    assert told == {"the pool gets what it asks for": f"{code}: The core quota is reached."}


def test_a_pool_that_nobody_can_make_is_missed(sim: Simulator) -> None:
    told = wrong(examined(sim, pool="mine", vm_size="", identity=""))
    assert told == {POOL: "There is no pool 'mine'."}


def test_an_account_that_is_another_or_none_or_not_whole_is_told(sim: Simulator) -> None:
    examiner = checkup._Examiner(opened(sim).options, opened(sim)._client)
    sim.cloud.account["provisioningState"] = "Invalid"  # type: ignore[attr-defined]
    assert wrong(examined(sim)) == {ACCOUNT: "The account is Invalid."}
    elsewhere = opened(sim, endpoint="https://other.sim.batch.azure.com").options
    examiner = checkup._Examiner(elsewhere, opened(sim)._client)
    with pytest.raises(ConfigError, match="endpoint says other"):
        examiner.account()


def test_machines_of_a_subscription_of_ones_own_have_other_quotas(sim: Simulator) -> None:
    sim.cloud.account["poolAllocationMode"] = "UserSubscription"  # type: ignore[attr-defined]
    assert not examined(sim)[QUOTAS].seen


def test_what_we_may_not_see_is_not_held_to_be_wrong(sim: Simulator) -> None:
    sim.troubles.forbid(
        [
            "Microsoft.Batch/batchAccounts/read",
            "Microsoft.ManagedIdentity/userAssignedIdentities/read",
            "Microsoft.Authorization/permissions/read",
        ]
    )
    findings = examined(sim)
    assert not wrong(findings)
    unseen = {what for what, one in findings.items() if not one.seen}
    assert unseen == {ACCOUNT, QUOTAS, WHO, RIGHTS}
    without = examined(sim, account_id="", identity="", pool="mine")
    assert {what for what, one in without.items() if not one.seen} == unseen


def test_an_identity_that_is_not_there_is_told(sim: Simulator) -> None:
    missing = f"{IDENTITY}2"
    assert wrong(examined(sim, identity=missing)) == {WHO: f"There is no {missing}."}


def test_who_is_not_known_hears_of_it(sim: Simulator) -> None:
    sim.troubles.expect("credentials", 100)
    told = wrong(examined(sim))
    assert all("does not know who asks" in found for found in told.values())
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
    lacking = list(checkup._lacking([role], ("Microsoft.Batch/batchAccounts/pools/read",), ()))
    assert (not lacking) is gives
