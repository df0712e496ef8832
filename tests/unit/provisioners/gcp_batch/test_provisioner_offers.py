"""Groups of Google Cloud Batch that request an offer, granted offers, and billing times."""

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
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import list_offers
from spotfit_localsim.clouds.gcp_batch import REGION, GcpBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch import provisioner as provisioner_module
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner
from tests.unit.provisioners.waiting import until, wait_for_state

pytest.importorskip("google.cloud.batch_v1")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

REQUEST = GroupRequest(
    token=Token("t-one"), num_workers=1, total_workers=1, run_name="Digits 1", run_id="ab" * 16
)
ZONES = (f"{REGION}-a", f"{REGION}-b")
TYPE = "g2-standard-8"
PRICES = {"*": {"spot": 1.0, "on_demand": 3.0}}


@pytest.fixture(scope="module")
def shared_sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    options = SimOptions(cloud="gcp_batch", boot_s=0.0)
    with running_simulator(tmp_path_factory.mktemp("cloud"), options) as simulator:
        yield simulator
    for cache in (calls._batch_service, provisioner_module._client_for_region):
        cache.cache_clear()


@pytest.fixture
def sim(shared_sim: Simulator) -> Iterator[Simulator]:
    yield shared_sim
    shared_sim.market.max_machines = None
    shared_sim.datacenter.close()
    shared_sim.cloud.state.jobs.clear()


def open_provisioner(sim: Simulator, **options: Any) -> GcpBatchProvisioner:
    access = GcpBatchCloud.client_access(sim.server.url)
    chosen = {"machine_type": TYPE, "prices": PRICES, **options}
    return GcpBatchProvisioner.with_options(**{**access.options, **chosen})


def offer_named(provisioner: GcpBatchProvisioner, name: str) -> Offer:
    offers = list_offers(provisioner, REQUEST).offers
    return next(one for one in offers if one.name == f"gcp_batch/{name}")


def submit(
    provisioner: GcpBatchProvisioner,
    *,
    name: str = "t-one",
    offer: Offer | None = None,
    command: str = "exec sleep 100",
) -> GroupHandle:
    """Submit a group whose machine runs `command` instead of an agent."""
    plan = provisioner.plan(replace(REQUEST, token=Token(name), offer=offer))
    container = plan.body["taskGroups"][0]["taskSpec"]["runnables"][-1]["container"]
    container |= {"entrypoint": "/bin/sh", "commands": ["-c", command]}
    handle = provisioner.submit(plan, AgentLaunchSpec("gs://b/r", new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    return handle


def test_on_demand_is_granted_and_kept_while_spot_is_refused(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, zones=ZONES)
    sim.market.max_machines = 0
    spot, on_demand = (f"{ZONES[1]}/{TYPE}/{market.value}" for market in Market)
    refused = submit(provisioner, name="t-spot", offer=offer_named(provisioner, spot))
    granted = submit(provisioner, offer=offer_named(provisioner, on_demand))
    wait_for_state(provisioner, granted, NodeState.RUNNING)
    until(lambda: "RESOURCE_POOL_EXHAUSTED" in provisioner.observe(refused).refusal)
    assert provisioner.observe(refused).nodes[0].state is NodeState.WAITING
    (machine,) = sim.datacenter.active_machines()
    assert machine.market is Market.ON_DEMAND
    # As the service describes the job, parsed by Google's library.
    policy = provisioner._client().find_job(granted.name)["allocation_policy"]  # type: ignore[index]
    assert policy["instances"][0]["policy"]["provisioning_model"] == "STANDARD"
    assert policy["location"]["allowed_locations"] == [f"zones/{ZONES[1]}"]
    assert (refused.offer, granted.offer) == (f"gcp_batch/{spot}", f"gcp_batch/{on_demand}")


def test_plan_of_an_offer_differs_only_in_model_and_zone(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, zones=ZONES)
    without = provisioner.plan(REQUEST).body
    for offer in list_offers(provisioner, REQUEST).offers:
        body = provisioner.plan(replace(REQUEST, offer=offer)).body
        policy = body["allocationPolicy"]
        assert policy["location"] == {"allowedLocations": [f"zones/{offer.zone}"]}
        (instance,) = policy["instances"]
        model = "SPOT" if offer.market is Market.SPOT else "STANDARD"
        (planned,) = without["allocationPolicy"]["instances"]
        assert instance["policy"] == {**planned["policy"], "provisioningModel": model}
        assert body["taskGroups"] == without["taskGroups"]


def test_instance_templates_are_chosen_by_market(sim: Simulator) -> None:
    options = {"machine_type": "", "instance_template": "gpu-spot"}
    provisioner = open_provisioner(sim, **options, on_demand_instance_template="gpu-standard")
    chosen = offer_named(provisioner, f"{REGION}/on_demand")
    handle = submit(provisioner, offer=chosen)
    assert handle.offer == chosen.name
    assert submit(provisioner, name="t-any").offer == f"gcp_batch/{REGION}/spot"
    plan = provisioner.plan(replace(REQUEST, offer=chosen))
    assert plan.body["allocationPolicy"]["instances"] == [{"instanceTemplate": "gpu-standard"}]
    with pytest.raises(ConfigError, match="on_demand_instance_template"):
        open_provisioner(sim, **options).plan(replace(REQUEST, offer=chosen))
    with pytest.raises(ConfigError, match="needs instance_template"):
        open_provisioner(sim, on_demand_instance_template="gpu-standard")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"provisioner": "aws_batch"}, "is one of aws_batch"),
        ({"region": "europe-west4"}, "europe-west4"),
        ({"machine_type": "a3-highgpu-8g"}, "a3-highgpu-8g"),
        ({"options": {"zones": f"{REGION}-c"}}, f"its zone is {REGION}-c"),
        ({"options": {"zones": "europe-west4-a"}}, "its zone is europe-west4-a"),
    ],
)
def test_offer_that_the_options_cannot_rent_is_rejected(
    sim: Simulator, changes: dict[str, Any], reason: str
) -> None:
    provisioner = open_provisioner(sim, zones=ZONES)
    offer = replace(list_offers(provisioner, REQUEST).offers[0], **changes)
    with pytest.raises(ConfigError, match=reason):
        provisioner.plan(replace(REQUEST, offer=offer))


def test_backend_that_chooses_names_its_offer_unless_batch_chooses_the_zone(
    sim: Simulator,
) -> None:
    names = {
        (): f"gcp_batch/{REGION}/{TYPE}/spot",
        ZONES[:1]: f"gcp_batch/{ZONES[0]}/{TYPE}/spot",
        ZONES: "",
    }
    for number, (zones, name) in enumerate(names.items()):
        provisioner = open_provisioner(sim, zones=zones)
        handle = submit(provisioner, name=f"t-{number}")
        assert handle.offer == name
        launch = AgentLaunchSpec("gs://b/r", new_run_id(), "secret")
        request = replace(REQUEST, token=Token(f"t-{number}"))
        assert provisioner.find_group(provisioner.plan(request), launch) == handle


def test_times_are_those_of_the_machine(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit(provisioner)
    (node,) = wait_for_state(provisioner, handle, NodeState.RUNNING).nodes
    (machine,) = sim.datacenter.active_machines()
    assert node.started_at_ms == pytest.approx(1000 * (machine.started_at_s or 0.0), abs=1)
    assert node.ended_at_ms is None
    sim.market.max_machines = 0
    sim.datacenter.reclaim(machine, notice=False)
    (node,) = wait_for_state(provisioner, handle, NodeState.WAITING).nodes
    assert node.started_at_ms == pytest.approx(1000 * (machine.started_at_s or 0.0), abs=1)
    assert node.ended_at_ms == pytest.approx(1000 * (machine.ended_at_s or 0.0), abs=1)


def test_finished_task_has_both_times(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit(provisioner, command="exit 0")
    (node,) = wait_for_state(provisioner, handle, NodeState.GONE).nodes
    (machine,) = (one for one in sim.datacenter.machines.values() if one.exit_code == 0)
    assert node.started_at_ms == pytest.approx(1000 * (machine.started_at_s or 0.0), abs=1)
    assert node.ended_at_ms == pytest.approx(1000 * (machine.ended_at_s or 0.0), abs=1)


def test_jobs_and_vms_have_the_labels_of_their_run(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, labels={"team": "vision"}, cost_project="X 1")
    job = provisioner._client().find_job(submit(provisioner).name)
    assert job is not None
    expected = {
        "team": "vision",
        "spotfit-run": "digits-1",
        "spotfit-run-id": REQUEST.run_id,
        "spotfit-project": "x-1",
    }
    assert expected.items() <= job["labels"].items()
    assert expected.items() <= job["allocation_policy"]["labels"].items(), "of VMs and disks"
