"""Groups of Azure Batch that request an offer, the offers that are granted, and billing times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import Refusal
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import list_offers
from spotfit_localsim.clouds import azure_batch as cloud
from spotfit_localsim.clouds.azure_batch import AzureBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch import provisioner as provisioner_module
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner
from tests.unit.provisioners.waiting import until, wait_for_state

pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

REQUEST = GroupRequest(
    token=Token("t-one"), num_workers=1, total_workers=1, run_name="Digits 1", run_id="ab" * 16
)
SIZE = "Standard_D4s_v5"
SPOT, ON_DEMAND = f"azure_batch/{SIZE}/spot", f"azure_batch/{SIZE}/on_demand"
PRICES = {"*": {"spot": 1.0, "on_demand": 3.0}}
AGENT = "python -m spotfit.agent"


@pytest.fixture(scope="module")
def shared_sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    options = SimOptions(cloud="azure_batch", boot_s=0.0)
    with (
        pytest.MonkeyPatch.context() as patch,
        running_simulator(tmp_path_factory.mktemp("cloud"), options) as simulator,
    ):
        patch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
        patch.setattr(cloud, "_UNUSABLE_DURATION_S", 0.0)
        patch.setattr(cloud, "_EVALUATION_INTERVAL_S", 0.04)
        patch.setattr(cloud, "_SAMPLING_INTERVAL_S", 0.02)
        yield simulator
    for cache in (
        calls._batch_service,
        calls._management_pipeline,
        provisioner_module._client_for_endpoint,
    ):
        cache.cache_clear()


@pytest.fixture
def sim(shared_sim: Simulator) -> Iterator[Simulator]:
    yield shared_sim
    shared_sim.market.max_machines = None
    shared_sim.faults.deny_permissions([])
    with shared_sim._lock:
        shared_sim.datacenter.close()
        shared_sim.cloud.state.jobs.clear()
        shared_sim.cloud.state.pools.clear()


def open_provisioner(sim: Simulator, **options: Any) -> AzureBatchProvisioner:
    access = AzureBatchCloud.client_access(sim.server.url)
    return AzureBatchProvisioner.with_options(**{**access.options, "prices": PRICES, **options})


def offer_named(provisioner: AzureBatchProvisioner, name: str) -> Offer:
    return next(one for one in list_offers(provisioner, REQUEST).offers if one.name == name)


def submit(
    provisioner: AzureBatchProvisioner,
    *,
    name: str = "t-one",
    offer: Offer | None = None,
    network: str = "",
    command: str = "sleep 100",
) -> GroupHandle | Refusal:
    """Submit a group whose machine runs `command` instead of an agent."""
    plan = provisioner.plan(replace(REQUEST, token=Token(name), offer=offer, network=network))
    task = plan.body["task"]
    task["commandLine"] = task["commandLine"].replace(AGENT, command)
    return provisioner.submit(plan, AgentLaunchSpec("az://b/r", new_run_id(), "secret"))


def submit_granted(provisioner: AzureBatchProvisioner, **arguments: Any) -> GroupHandle:
    handle = submit(provisioner, **arguments)
    assert isinstance(handle, GroupHandle)
    return handle


def test_on_demand_is_granted_and_kept_while_spot_is_refused(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    sim.market.max_machines = 0
    refused = submit_granted(provisioner, name="t-spot", offer=offer_named(provisioner, SPOT))
    granted = submit_granted(provisioner, offer=offer_named(provisioner, ON_DEMAND))
    wait_for_state(provisioner, granted, NodeState.RUNNING)
    until(lambda: "low priority nodes" in provisioner.observe(refused).refusal)
    assert provisioner.observe(refused).nodes[0].state is NodeState.WAITING
    (machine,) = sim.datacenter.active_machines()
    assert machine.market is Market.ON_DEMAND
    # As the service describes the pools, parsed by Azure's library.
    pool = provisioner._client().find_pool(granted.detail["pool"])
    assert pool is not None
    assert (pool["currentDedicatedNodes"], pool["currentLowPriorityNodes"]) == (1, 0)
    (node,) = provisioner._client()._service.list_nodes(granted.detail["pool"])
    assert node.is_dedicated is True
    assert granted.detail["pool"] != refused.detail["pool"]
    assert (refused.offer, granted.offer) == (SPOT, ON_DEMAND)


def test_pool_of_spot_nodes_has_the_same_name_with_and_without_an_offer(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    without = provisioner.plan(REQUEST).body
    spot = provisioner.plan(replace(REQUEST, offer=offer_named(provisioner, SPOT))).body
    assert spot == {**without, "other_pool": spot["other_pool"]}
    on_demand = provisioner.plan(replace(REQUEST, offer=offer_named(provisioner, ON_DEMAND))).body
    properties = on_demand["pool"]["body"]["properties"]
    assert (
        "$TargetDedicatedNodes = min(100, wanted)"
        in (properties["scaleSettings"]["autoScale"]["formula"])
    )
    assert on_demand["task"] == without["task"]
    # The same pool but for its initial size.
    assert spot["other_pool"]["path"] == on_demand["pool"]["path"]
    assert on_demand["other_pool"]["path"] == without["pool"]["path"]


def test_pools_of_both_markets_are_created_by_the_first_group(sim: Simulator) -> None:
    """By the caller of `fit()`: agents may submit jobs only."""
    provisioner = open_provisioner(sim)
    spot, on_demand = (offer_named(provisioner, name) for name in (SPOT, ON_DEMAND))
    submit_granted(provisioner, name="t-first", offer=spot)
    sim.faults.deny_permissions(["Microsoft.Batch/batchAccounts/pools/write"])
    handle = submit_granted(provisioner, offer=on_demand)
    wait_for_state(provisioner, handle, NodeState.RUNNING)
    assert len(sim.cloud.state.pools) == 2


def test_agent_that_cannot_create_the_other_pool_submits_its_group(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    submit_granted(provisioner, name="t-first")
    sim.faults.deny_permissions(["Microsoft.Batch/batchAccounts/pools/write"])
    submit_granted(provisioner, name="t-second", offer=offer_named(provisioner, SPOT))
    assert len(sim.cloud.state.pools) == 1


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"provisioner": "aws_batch"}, {}, "is one of aws_batch"),
        ({"machine_type": "Standard_ND96"}, {}, "Standard_ND96"),
        ({}, {"pool": "mine", "identity": ""}, "'mine' are spot nodes"),
    ],
)
def test_offer_that_the_options_cannot_rent_is_rejected(
    sim: Simulator, changes: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    provisioner = open_provisioner(sim, **options)
    offer = replace(offer_named(provisioner, ON_DEMAND), **changes)
    with pytest.raises(ConfigError, match=reason):
        provisioner.plan(replace(REQUEST, offer=offer))


def test_existing_pools_are_chosen_by_market(sim: Simulator) -> None:
    provisioner = open_provisioner(
        sim, pool="mine", on_demand_pool="dedicated", identity="", subnet=""
    )
    offers = list_offers(provisioner, REQUEST).offers
    pools = [
        provisioner.plan(replace(REQUEST, offer=offer)).body["job"]["poolInfo"]["poolId"]
        for offer in offers
    ]
    assert pools == ["mine", "dedicated"]
    assert [offer.network for offer in offers] == pools
    with pytest.raises(ConfigError, match="the same pool 'mine'"):
        AzureBatchOptions(pool="mine", on_demand_pool="mine")


def test_offer_of_another_region_is_rejected() -> None:
    options = {"image": "i", "pool": "mine", "on_demand_pool": "dedicated", "vm_size": SIZE}
    here = AzureBatchProvisioner.with_options(
        endpoint="https://training.westeurope.batch.azure.com", prices=PRICES, **options
    )
    offer = offer_named(here, f"azure_batch/westeurope/{SIZE}/on_demand")
    assert here.plan(replace(REQUEST, offer=offer)).body["job"]["poolInfo"]["poolId"] == "dedicated"
    there = AzureBatchProvisioner.with_options(
        endpoint="https://training.eastus.batch.azure.com", prices=PRICES, **options
    )
    with pytest.raises(ConfigError, match="westeurope"):
        there.plan(replace(REQUEST, offer=offer))


def test_nodes_of_both_markets_connect_only_through_a_subnet(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, subnet="")
    spot = submit_granted(provisioner, name="t-spot")
    chosen = offer_named(provisioner, ON_DEMAND)
    assert chosen.network not in ("", spot.network)
    refused = submit(provisioner, offer=chosen, network=spot.network)
    assert isinstance(refused, Refusal)
    assert spot.network in refused.reason
    granted = submit_granted(provisioner, offer=chosen, network=chosen.network)
    assert granted.network == chosen.network
    common = open_provisioner(sim)
    assert offer_named(common, ON_DEMAND).network == ""
    assert submit_granted(common, name="t-subnet").network == ""


def test_backend_that_chooses_names_its_offer(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_granted(provisioner)
    assert handle.offer == SPOT
    launch = AgentLaunchSpec("az://b/r", new_run_id(), "secret")
    assert provisioner.find_group(provisioner.plan(REQUEST), launch) == handle


def test_times_are_those_of_the_machine(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_granted(provisioner)
    (node,) = wait_for_state(provisioner, handle, NodeState.RUNNING).nodes
    (machine,) = sim.datacenter.active_machines()
    assert node.started_at_ms == pytest.approx(1000 * (machine.started_at_s or 0.0), abs=1)
    assert node.ended_at_ms is None
    sim.market.max_machines = 0
    sim.datacenter.reclaim(machine, notice=False)
    (node,) = wait_for_state(provisioner, handle, NodeState.WAITING).nodes
    assert (node.started_at_ms, node.ended_at_ms) == (None, None), "Batch does not report the loss"


def test_completed_task_has_both_times(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_granted(provisioner, command="exit 0")
    (node,) = wait_for_state(provisioner, handle, NodeState.GONE).nodes
    machine = list(sim.datacenter.machines.values())[-1]
    assert node.started_at_ms == pytest.approx(1000 * (machine.started_at_s or 0.0), abs=1)
    assert node.ended_at_ms == pytest.approx(1000 * (machine.ended_at_s or 0.0), abs=1)


def test_jobs_have_the_metadata_of_their_run(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, labels={"team": "vision"}, cost_project="X 1")
    job = provisioner._client().find_job(submit_granted(provisioner).name)
    assert job is not None
    metadata = {one["name"]: one["value"] for one in job["metadata"]}
    expected = {
        "team": "vision",
        "spotfit-run": "digits-1",
        "spotfit-run-id": REQUEST.run_id,
        "spotfit-project": "x-1",
    }
    assert expected.items() <= metadata.items()
