"""Groups of AWS Batch that request an offer, the offers that are granted, and billing times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id, wall_ms
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.offer import Market, Offer
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import list_offers
from spotfit_localsim.clouds.aws_batch import REGION, AwsBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.aws_batch import client as calls
from spotfit_provisioners.aws_batch import provisioner as provisioner_module
from spotfit_provisioners.aws_batch.provisioner import AwsBatchProvisioner
from tests.unit.provisioners.waiting import until, wait_for_state

pytest.importorskip("boto3")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

SPOT, ON_DEMAND = f"aws_batch/{REGION}/spot/spot", f"aws_batch/{REGION}/on-demand/on_demand"
REQUEST = GroupRequest(
    token=Token("t-one"), num_workers=1, total_workers=1, run_name="Digits 1", run_id="ab" * 16
)
PRICES = {"*": {"spot": 1.0, "on_demand": 3.0}}


# One for all tests: a client of Batch is costly to create.
@pytest.fixture(scope="module")
def shared_sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    for cache in (calls._client, provisioner_module._client_for_region):
        cache.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "something")
        options = SimOptions(cloud="aws_batch", boot_s=0.0)
        with running_simulator(tmp_path_factory.mktemp("cloud"), options) as simulator:
            yield simulator
    for cache in (calls._client, provisioner_module._client_for_region):
        cache.cache_clear()


@pytest.fixture
def sim(shared_sim: Simulator) -> Iterator[Simulator]:
    yield shared_sim
    shared_sim.market.options = shared_sim.options
    shared_sim.market.max_machines = shared_sim.market.max_on_demand_machines = None
    cloud_of(shared_sim).queue_overrides.clear()
    shared_sim.faults.deny_permissions([])
    shared_sim.datacenter.close()
    cloud_of(shared_sim).state.jobs.clear()


def cloud_of(sim: Simulator) -> AwsBatchCloud:
    assert isinstance(sim.cloud, AwsBatchCloud)
    return sim.cloud


def open_provisioner(sim: Simulator, **options: Any) -> AwsBatchProvisioner:
    access = AwsBatchCloud.client_access(sim.server.url)
    return AwsBatchProvisioner.with_options(**{**access.options, "prices": PRICES, **options})


def offer_named(provisioner: AwsBatchProvisioner, name: str) -> Offer:
    return next(one for one in list_offers(provisioner, REQUEST).offers if one.name == name)


def submit(
    provisioner: AwsBatchProvisioner,
    *,
    name: str = "t-one",
    offer: Offer | None = None,
    workers: int = 1,
) -> GroupHandle:
    """Submit a group whose machine sleeps instead of running an agent."""
    request = replace(REQUEST, token=Token(name), offer=offer)
    plan = provisioner.plan(replace(request, num_workers=workers, total_workers=workers))
    command = ["/bin/sh", "-c", "exec sleep 100"]
    plan.body["definition"]["containerProperties"]["command"] = command
    handle = provisioner.submit(plan, AgentLaunchSpec("s3://b/r", new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    return handle


def test_every_queue_has_an_offer_and_its_plan_names_only_this_queue(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, queues=("spot", "other"))
    offers = list_offers(provisioner, REQUEST).offers
    assert [one.name for one in offers] == [SPOT, f"aws_batch/{REGION}/other/spot", ON_DEMAND]
    without = provisioner.plan(REQUEST).body
    assert without["queues"] == ["spot", "other"]
    for offer in offers:
        body = provisioner.plan(replace(REQUEST, offer=offer)).body
        assert body["queues"] == [offer.options["queue"]]
        assert body["definition"] == without["definition"]


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"options": {}}, "without a queue in", "on_demand_queues"),
        ({"options": {"queue": "spot"}}, "without 'spot'", "type EC2"),
        ({"market": Market.SPOT}, "without 'on-demand'", "queues="),
        ({"provisioner": "gcp_batch"}, "is one of gcp_batch", "list_offers"),
        ({"machine_type": "p5.48xlarge"}, "p5.48xlarge", "list_offers"),
    ],
)
def test_offer_that_the_options_cannot_rent_is_rejected(
    sim: Simulator, changes: dict[str, Any], reason: str, remedy: str
) -> None:
    provisioner = open_provisioner(sim)
    offer = replace(offer_named(provisioner, ON_DEMAND), **changes)
    with pytest.raises(ConfigError, match=reason) as raised:
        provisioner.plan(replace(REQUEST, offer=offer))
    assert remedy in str(raised.value)


def test_on_demand_is_granted_and_kept_while_spot_is_refused(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, queues=("spot", "other"))
    sim.market.max_machines = 0
    refused = submit(provisioner, name="t-spot", offer=offer_named(provisioner, SPOT))
    granted = submit(provisioner, offer=offer_named(provisioner, ON_DEMAND))
    status = wait_for_state(provisioner, refused, NodeState.REFUSED)
    assert "queue spot has no capacity for the requested offer" in status.nodes[0].reason
    assert "INSUFFICIENT_INSTANCE_CAPACITY" in status.refusal
    wait_for_state(provisioner, granted, NodeState.RUNNING)
    (machine,) = sim.datacenter.active_machines()
    assert machine.market is Market.ON_DEMAND
    assert machine.environment["AWS_BATCH_CE_NAME"] == "on-demand"
    assert provisioner.observe(granted).nodes[0].state is NodeState.RUNNING
    assert {job.queue for job in cloud_of(sim).state.jobs.values()} == {"spot", "on-demand"}
    assert (refused.offer, granted.offer) == (SPOT, ON_DEMAND)


def test_refused_restart_keeps_the_times_of_the_attempt_that_was_billed(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit(provisioner, offer=offer_named(provisioner, SPOT))
    wait_for_state(provisioner, handle, NodeState.RUNNING)
    (machine,) = sim.datacenter.active_machines()
    sim.market.max_machines = 0
    sim.datacenter.reclaim(machine, notice=False)
    (node,) = wait_for_state(provisioner, handle, NodeState.REFUSED).nodes
    assert machine.started_at_s is not None
    assert machine.ended_at_s is not None
    billed = (machine.started_at_s, machine.ended_at_s)
    assert (node.started_at_ms, node.ended_at_ms) == tuple(int(1000 * one) for one in billed)


def test_refused_on_demand_group_leaves_its_queue_to_the_run(sim: Simulator) -> None:
    """The run decides what else it requests: no machines of another market."""
    sim.market.max_on_demand_machines = 0
    provisioner = open_provisioner(sim)
    handle = submit(provisioner, offer=offer_named(provisioner, ON_DEMAND))
    status = wait_for_state(provisioner, handle, NodeState.REFUSED)
    assert "queue on-demand has no capacity" in status.nodes[0].reason
    assert not list(sim.datacenter.active_machines())


def test_partly_granted_group_keeps_its_machines_while_they_boot(sim: Simulator) -> None:
    sim.market.max_on_demand_machines = 1
    sim.market.options = SimOptions(cloud="aws_batch", boot_s=0.3)
    provisioner = open_provisioner(sim)
    offer = offer_named(provisioner, ON_DEMAND)
    handle = submit(provisioner, offer=offer, workers=2)
    observed: list[list[NodeState]] = []

    def is_partly_running() -> bool:
        observed.append(sorted(node.state for node in provisioner.observe(handle).nodes))
        return NodeState.RUNNING in observed[-1]

    until(is_partly_running)
    assert observed[-1] == [NodeState.RUNNING, NodeState.WAITING]
    assert all(NodeState.REFUSED not in states for states in observed)


def test_refused_offer_does_not_exhaust_other_queues(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, queues=("spot", "other"))
    sim.market.max_machines = 0
    refused = submit(provisioner, name="t-spot", offer=offer_named(provisioner, SPOT))
    wait_for_state(provisioner, refused, NodeState.REFUSED)
    following = submit(provisioner, name="t-any")
    assert (following.detail["queue"], following.offer) == (
        "other",
        f"aws_batch/{REGION}/other/spot",
    )
    again = submit(provisioner, name="t-again", offer=offer_named(provisioner, SPOT))
    assert again.detail["queue"] == "spot", "an offer is not replaced by another one"


def test_backend_that_chooses_names_the_offer_of_its_queue(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    assert submit(provisioner).offer == SPOT
    sim.faults.deny_permissions(["batch:DescribeJobQueues"])
    assert submit(open_provisioner(sim), name="t-two").offer == SPOT, "as in the options"


def test_queue_of_several_markets_has_no_offer(sim: Simulator) -> None:
    prefix = f"arn:aws:batch:{REGION}:000000000000:compute-environment"
    cloud_of(sim).queue_overrides["spot"] = {
        "computeEnvironmentOrder": [
            {"order": 2, "computeEnvironment": f"{prefix}/on-demand"},
            {"order": 1, "computeEnvironment": f"{prefix}/spot"},
        ]
    }
    provisioner = open_provisioner(sim)
    sim.market.max_machines = 0
    handle = submit(provisioner)
    assert handle.offer == ""
    wait_for_state(provisioner, handle, NodeState.RUNNING)
    assert [one.market for one in sim.datacenter.active_machines()] == [Market.ON_DEMAND]


def test_queue_with_other_machines_than_the_offer_is_rejected(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, on_demand_queues=("other",))
    offer = offer_named(provisioner, f"aws_batch/{REGION}/other/on_demand")
    with pytest.raises(ConfigError, match="'other' have spot machines"):
        submit(provisioner, offer=offer)
    assert not cloud_of(sim).state.jobs


def test_group_is_found_in_every_queue(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    handle = submit(provisioner, offer=offer_named(provisioner, ON_DEMAND))
    launch = AgentLaunchSpec("s3://b/r", new_run_id(), "secret")
    found = provisioner.find_group(provisioner.plan(REQUEST), launch)
    assert found is not None
    assert (found.name, found.offer) == (handle.name, ON_DEMAND)


def test_times_are_those_of_the_machine(sim: Simulator) -> None:
    provisioner = open_provisioner(sim)
    before_ms = wall_ms()
    handle = submit(provisioner)
    (node,) = wait_for_state(provisioner, handle, NodeState.RUNNING).nodes
    (machine,) = sim.datacenter.active_machines()
    assert machine.started_at_s is not None
    assert node.started_at_ms == int(1000 * machine.started_at_s)
    assert before_ms - 1000 <= node.started_at_ms <= wall_ms() + 1000
    assert node.ended_at_ms is None
    sim.market.max_machines = 0
    sim.datacenter.reclaim(machine, notice=False)
    (node,) = wait_for_state(provisioner, handle, NodeState.WAITING).nodes
    times = (int(1000 * machine.started_at_s), int(1000 * (machine.ended_at_s or 0.0)))
    assert (node.started_at_ms, node.ended_at_ms) == times, "those of the last attempt"
    provisioner.cancel(handle)
    (node,) = wait_for_state(provisioner, handle, NodeState.GONE).nodes
    assert (node.started_at_ms, node.ended_at_ms) == times


def test_jobs_have_the_tags_of_their_run(sim: Simulator) -> None:
    provisioner = open_provisioner(sim, tags={"team": "vision"}, cost_project="X 1")
    handle = submit(provisioner)
    client, _ = provisioner._resolve_queue("spot")
    job = client.describe_jobs([handle.name])[handle.name]
    expected = {
        "team": "vision",
        "spotfit:run": "digits-1",
        "spotfit:run-id": REQUEST.run_id,
        "spotfit:project": "x-1",
        "spotfit:queue": "spot",
    }
    assert expected.items() <= job["tags"].items()
    assert job["propagateTags"] is True, "to the ECS task, by which AWS divides the cost"
    sim.faults.deny_permissions(["batch:TagResource"])
    with pytest.raises(ProvisionPermissionError, match="batch:TagResource"):
        submit(provisioner, name="t-two")
