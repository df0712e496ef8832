"""The simulated cloud: idempotent submission, capacity, notices and lost responses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.offer import Market
from spotfit.model.topology import Notice
from spotfit.provision.api import Refusal
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.market import SimMarket, SimMarketConfig, SimOfferConfig
from spotfit_localsim.virtual.sim_cloud import (
    NonIdempotentProvisioner,
    SimCloud,
    SimCloudProvisioner,
    SimInstance,
)
from tests.unit.localsim.sim_harness import SimHarness

LAUNCH = AgentLaunchSpec("sim://run", RunId("r"), "secret")


class RecordingObserver:
    """Records which instances booted and terminated."""

    def __init__(self) -> None:
        self.booted: list[str] = []
        self.terminated: list[tuple[str, bool]] = []

    def on_instance_booted(self, instance: SimInstance) -> None:
        self.booted.append(instance.name)

    def on_instance_terminated(self, instance: SimInstance, *, closes_connections: bool) -> None:
        self.terminated.append((instance.name, closes_connections))


class CloudHarness:
    """A simulated cloud with a client."""

    def __init__(
        self, kind: type[SimCloudProvisioner] = SimCloudProvisioner, /, **market: Any
    ) -> None:
        self.sim = SimHarness()
        self.market = SimMarket(SimMarketConfig(**market), self.sim.rng.stream("market"))
        self.cloud = SimCloud(self.sim.engine, self.market, self.sim.record_message)
        self.observer = self.cloud.observer = RecordingObserver()
        self.kind = kind

    def run_jobs(self, *jobs: Callable[[SimCloudProvisioner], Any]) -> list[Any]:
        """Call the provisioner from a process."""
        process = self.sim.process()
        client = self.kind(self.cloud, self.market, process, slots=2)
        return self.sim.run_jobs(process, *(lambda job=job: job(client) for job in jobs))

    def submit(self) -> Any:
        return self.run_jobs(lambda client: client.submit(plan_of(client, "t1", 4), LAUNCH))[0]

    def advance(self, seconds: float) -> None:
        self.sim.engine.schedule_at(self.sim.engine.now + seconds, lambda: None)
        self.sim.engine.run(until=self.sim.engine.now + seconds)


def plan_of(client: SimCloudProvisioner, token: str, workers: int) -> Any:
    return client.plan(GroupRequest(token=Token(token), num_workers=workers, total_workers=8))


def test_repeated_submit_creates_one_group() -> None:
    harness = CloudHarness()
    assert harness.submit() == harness.submit()
    assert sorted(harness.observer.booted) == ["t1.0", "t1.1"]
    assert harness.cloud.groups.keys() == {"t1"}


def test_non_idempotent_provisioner_creates_two_groups() -> None:
    harness = CloudHarness(NonIdempotentProvisioner)
    harness.submit()
    harness.submit()
    assert len(harness.observer.booted) == 4


def test_instance_is_waiting_then_running_then_gone() -> None:
    harness = CloudHarness(boot_s=(10.0, 10.0), status_lag_s=(2.0, 2.0))
    process = harness.sim.process()
    client = SimCloudProvisioner(harness.cloud, harness.market, process, slots=2)
    handle = GroupHandle(token=Token("t1"), provisioner="sim", name="sim-t1", detail={"nodes": 1})
    harness.cloud.request(plan_of(client, "t1", 2), LAUNCH)
    states = []
    for now in (5.0, 11.0, 12.0):
        harness.advance(now - harness.sim.engine.now)
        states.append(harness.cloud.status(handle.token, 1).nodes[0].state)
        if now == 11.0:
            harness.cloud.release(handle.token)
    harness.advance(3.0)
    states.append(harness.cloud.status(handle.token, 1).nodes[0].state)
    assert states == [NodeState.WAITING, NodeState.RUNNING, NodeState.RUNNING, NodeState.GONE]
    assert harness.observer.terminated == [("t1.0", True)]
    assert harness.cloud.machine_seconds == pytest.approx(11.05)


def test_unknown_group_is_terminated() -> None:
    harness = CloudHarness()
    handle = GroupHandle(
        token=Token("never"), provisioner="sim", name="sim-never", detail={"nodes": 2}
    )
    status = harness.run_jobs(
        lambda client: client.observe(handle), lambda client: client.cancel(handle)
    )
    assert status[0].is_terminated
    assert status[1] is None


def test_lost_response_has_its_effect() -> None:
    harness = CloudHarness(lost_response_probability=1.0)
    assert isinstance(harness.submit(), ConnectionError)
    assert sorted(harness.observer.booted) == ["t1.0", "t1.1"]


def test_refused_request_creates_no_group() -> None:
    harness = CloudHarness(rejects_when_full=True, capacity=CapacityTrace("none", ((0.0, 1),)))
    assert isinstance(harness.submit(), Refusal)
    assert not harness.cloud.groups


def test_instances_follow_the_capacity() -> None:
    capacity_trace = CapacityTrace("trace", ((0.0, 1), (100.0, 2), (200.0, 0)))
    harness = CloudHarness(capacity=capacity_trace, boot_s=(1.0, 1.0))
    process = harness.sim.process()
    client = SimCloudProvisioner(harness.cloud, harness.market, process, slots=2)
    harness.cloud.request(plan_of(client, "t1", 4), LAUNCH)
    harness.advance(50.0)
    assert len(harness.observer.booted) == 1
    assert harness.cloud.status(Token("t1"), 2).refusal == "waiting for capacity"
    harness.advance(100.0)
    assert len(harness.observer.booted) == 2
    harness.advance(100.0)
    assert len(harness.observer.terminated) == 2


def test_notice_precedes_termination() -> None:
    harness = CloudHarness(notice_s=30.0)
    harness.submit()
    instance = harness.cloud.running_instances()[0]
    harness.cloud.reclaim(instance, with_notice=True)
    assert isinstance(instance.notice, Notice)
    assert instance.notice.seconds_left == 30.0
    harness.advance(29.0)
    assert instance in harness.cloud.running_instances()
    harness.advance(2.0)
    assert instance not in harness.cloud.running_instances()
    assert harness.observer.terminated == [(instance.name, True)]


def test_failed_boot_starts_no_agent() -> None:
    harness = CloudHarness(boot_failure_probability=1.0)
    harness.submit()
    assert harness.observer.booted == []
    assert len(harness.cloud.running_instances()) == 2


# --- offers ---------------------------------------------------------------------------------------

FULL = CapacityTrace("full", ((0.0, 0),))
SPOT = SimOfferConfig(name="spot", prices=((0.0, 3.6), (60.0, 7.2)), boot_s=(10.0, 10.0))
ON_DEMAND = SimOfferConfig(
    name="on_demand", market=Market.ON_DEMAND, prices=((0.0, 18.0),), boot_s=(20.0, 20.0)
)


class OfferHarness(CloudHarness):
    """A simulated cloud with offers, machines with one worker, and a client that rents them."""

    def __init__(self, *offers: SimOfferConfig, **market: Any) -> None:
        super().__init__(offers=offers or (SPOT, ON_DEMAND), latency_s=(0.0, 0.0), **market)

    def plan(self, token: str, nodes: int, **request: Any) -> Any:
        return self.client().plan(
            GroupRequest(token=Token(token), num_workers=nodes, total_workers=8, **request)
        )

    def client(self) -> SimCloudProvisioner:
        return SimCloudProvisioner(self.cloud, self.market, self.sim.process(), slots=1)

    def offer(self, name: str) -> Any:
        return next(one for one in self.market.config.offers_at(0.0, "sim") if one.name == name)

    def rent(self, token: str, nodes: int, name: str) -> Refusal | None:
        return self.cloud.request(self.plan(token, nodes, offer=self.offer(name)), LAUNCH)

    def states(self, token: str, nodes: int) -> list[NodeState]:
        return [node.state for node in self.cloud.status(Token(token), nodes).nodes]


def test_handle_has_the_offer_and_its_network() -> None:
    harness = OfferHarness()
    plan = harness.plan("t1", 1, offer=harness.offer("on_demand"))
    handle = harness.run_jobs(lambda client: client.submit(plan, LAUNCH))[0]
    assert (handle.offer, handle.network) == ("on_demand", "sim-east")
    plain_plan = CloudHarness()
    handle = plain_plan.submit()
    assert (handle.offer, handle.network) == ("", "")


def test_request_uses_the_capacity_of_its_offer_only() -> None:
    small = replace(SPOT, name="small", capacity=CapacityTrace("small", ((0.0, 1),)))
    harness = OfferHarness(SimOfferConfig(name="full", capacity=FULL), SPOT, small)
    harness.rent("t1", 2, "full")
    harness.rent("t2", 1, "spot")
    harness.rent("t3", 2, "small")
    harness.advance(60.0)
    assert harness.states("t1", 2) == [NodeState.WAITING] * 2
    assert harness.states("t2", 1) == [NodeState.RUNNING]
    assert harness.states("t3", 2) == [NodeState.RUNNING, NodeState.WAITING]
    assert harness.cloud.status(Token("t1"), 2).refusal == "waiting for capacity"
    assert [(one.offer, one.num_nodes) for one in harness.cloud.requests] == [
        ("full", 2),
        ("spot", 1),
        ("small", 2),
    ]


def test_refused_request_is_in_the_books_of_requests() -> None:
    harness = OfferHarness(SimOfferConfig(name="full", capacity=FULL), rejects_when_full=True)
    assert isinstance(harness.rent("t1", 1, "full"), Refusal)
    assert harness.cloud.requests[0].refusal == "no capacity for 1 machines under the offer full"
    assert not harness.cloud.groups


def test_drop_of_the_capacity_ends_machines_of_its_offer_only_also_while_they_boot() -> None:
    dropping = SimOfferConfig(
        name="dropping",
        capacity=CapacityTrace("drops", ((0.0, 4), (30.0, 1))),
        boot_s=(20.0, 200.0),
    )
    harness = OfferHarness(dropping, SPOT)
    harness.rent("t1", 3, "dropping")
    harness.rent("t2", 2, "spot")
    harness.advance(29.0)
    assert NodeState.WAITING in harness.states("t1", 3)
    harness.advance(10.0)
    assert harness.states("t1", 3).count(NodeState.GONE) == 2
    assert harness.states("t2", 2) == [NodeState.RUNNING] * 2


def test_request_without_an_offer_gets_the_first_one_that_it_permits() -> None:
    harness = OfferHarness(
        SimOfferConfig(name="west", region="west"),
        SimOfferConfig(name="east", region="east"),
        SimOfferConfig(name="apart", region="east", network="apart"),
    )
    assert harness.plan("t1", 1).body == {"offer": "west"}
    assert harness.plan("t1", 1, network="east").body == {"offer": "east"}
    assert harness.plan("t1", 1, refused_networks=("west", "east")).body == {"offer": "apart"}
    tried = ("west", "east", "apart")
    assert harness.plan("t1", 1, refused_networks=tried).body == {"offer": "west"}


def test_unknown_offer_and_offer_of_another_network_are_rejected() -> None:
    harness = OfferHarness(SPOT, SimOfferConfig(name="west", region="west"))
    with pytest.raises(ConfigError, match="no offer for 'gone'"):
        harness.plan("t1", 1, offer=structs.replace(harness.offer("spot"), name="gone"))
    with pytest.raises(ConfigError, match="no offer for 'west' in the network 'sim-east'"):
        harness.plan("t1", 1, offer=harness.offer("west"), network="sim-east")


def test_on_demand_machine_is_not_preempted() -> None:
    harness = OfferHarness()
    harness.rent("t1", 1, "on_demand")
    harness.rent("t2", 1, "spot")
    harness.advance(30.0)
    for instance in harness.cloud.running_instances():
        harness.cloud.reclaim(instance, with_notice=False)
    harness.advance(10.0)
    assert harness.states("t1", 1) == [NodeState.RUNNING]
    assert harness.states("t2", 1) == [NodeState.GONE]


def test_machine_is_billed_after_the_delay_of_its_grant() -> None:
    delayed = SimOfferConfig(name="delayed", grant_delay_s=(40.0, 40.0), boot_s=(5.0, 5.0))
    harness = OfferHarness(delayed, SimOfferConfig(name="full", capacity=FULL))
    harness.rent("t1", 1, "delayed")
    harness.advance(20.0)
    harness.rent("t2", 1, "full")
    harness.advance(19.0)
    assert harness.cloud.machine_seconds == 0
    assert harness.cloud.status(Token("t1"), 1).refusal == ""
    harness.advance(11.0)
    assert harness.states("t1", 1) == [NodeState.RUNNING]
    assert harness.cloud.machine_seconds == pytest.approx(10.0)


def test_cost_is_the_integral_of_the_price_over_the_billed_time() -> None:
    harness = OfferHarness()
    harness.rent("t1", 2, "spot")
    harness.rent("t2", 1, "on_demand")
    harness.advance(50.0)
    harness.cloud.terminate(
        harness.cloud.groups[Token("t1")].instances[0], "released", closes_connections=True
    )
    harness.advance(50.0)
    spot_usd = 3.6 * 50 / 3600 + (3.6 * 60 + 7.2 * 40) / 3600
    by_offer = harness.cloud.billed_usd_by_offer()
    assert by_offer == pytest.approx({"spot": spot_usd, "on_demand": 18.0 * 100 / 3600})
    assert harness.cloud.billed_usd() == pytest.approx(sum(by_offer.values()))
    assert [(one.offer, one.ended_at_s, one.up_at_s) for one in harness.cloud.books()] == [
        ("spot", 50.0, 10.0),
        ("spot", None, 10.0),
        ("on_demand", None, 20.0),
    ]


def test_listing_has_the_prices_in_force_and_no_prices_after_a_failed_call() -> None:
    request = GroupRequest(token=Token("t1"), num_workers=1, total_workers=1)

    def listed_prices(harness: OfferHarness) -> list[Any]:
        listing = harness.run_jobs(lambda client: client.offers(request))[0]
        return [one.price and one.price.usd_per_hour for one in listing.offers]

    harness = OfferHarness()
    assert listed_prices(harness) == [3.6, 18.0]
    harness.advance(100.0)
    assert listed_prices(harness) == [7.2, 18.0]
    harness.market.reject_credentials_until(1e6)
    assert listed_prices(harness) == [None, None]
    assert listed_prices(OfferHarness(lost_response_probability=1.0)) == [None, None]


def test_market_without_offers_lists_one_without_a_price() -> None:
    request = GroupRequest(token=Token("t1"), num_workers=1, total_workers=1)
    listing = CloudHarness().run_jobs(lambda client: client.offers(request))[0]
    assert [(one.name, one.price) for one in listing.offers] == [("sim/spot", None)]


# --- announced drops of the capacity --------------------------------------------------------------


@pytest.mark.parametrize("offers", [(), ("dropping",)])
def test_announced_drop_sends_notices_to_the_machines_that_are_lost(offers: tuple[str]) -> None:
    capacity = CapacityTrace("drops", ((0.0, 4), (100.0, 1)))
    harness = CloudHarness(
        offers=tuple(
            SimOfferConfig(name=name, capacity=capacity, boot_s=(5.0, 5.0)) for name in offers
        ),
        capacity=None if offers else capacity,
        boot_s=(5.0, 5.0),
        notice_s=30.0,
        drop_notice_probability=1.0,
    )
    client = SimCloudProvisioner(harness.cloud, harness.market, harness.sim.process(), slots=1)
    harness.cloud.request(plan_of(client, "t1", 3), LAUNCH)
    harness.advance(69.0)
    instances = harness.cloud.groups[Token("t1")].instances
    assert [one.notice for one in instances] == [None] * 3
    harness.advance(2.0)
    notices = [one.notice for one in instances if one.notice is not None]
    assert [one.seconds_left for one in notices if isinstance(one, Notice)] == [30.0, 30.0]
    harness.advance(28.0)
    assert len(harness.cloud.running_instances()) == 3
    harness.advance(2.0)
    assert [one.notice for one in harness.cloud.running_instances()] == [None]
    assert {one.terminated_at for one in instances} == {None, 100.0}


def test_only_a_part_of_the_machines_is_announced() -> None:
    harness = CloudHarness(
        capacity=CapacityTrace("drops", ((0.0, 300), (100.0, 100))),
        boot_s=(5.0, 5.0),
        drop_notice_probability=0.5,
    )
    client = SimCloudProvisioner(harness.cloud, harness.market, harness.sim.process(), slots=1)
    request = GroupRequest(token=Token("t1"), num_workers=300, total_workers=300)
    harness.cloud.request(client.plan(request), LAUNCH)
    harness.advance(99.0)
    instances = harness.cloud.groups[Token("t1")].instances
    assert 70 < sum(one.notice is not None for one in instances) < 130
    harness.advance(2.0)
    assert len(harness.cloud.running_instances()) == 100
    assert all(one.terminated_at == 100.0 for one in instances if one.notice is not None)


def test_drop_is_not_announced_by_default() -> None:
    harness = CloudHarness(
        capacity=CapacityTrace("drops", ((0.0, 4), (100.0, 1))), notice_probability=1.0
    )
    harness.submit()
    assert all(one.notice is None for one in harness.cloud.groups[Token("t1")].instances)
    assert len(harness.cloud.running_instances()) == 1


@pytest.mark.parametrize("reports_times", [True, False])
def test_billing_times_are_reported_with_the_status(reports_times: bool) -> None:
    harness = CloudHarness(
        boot_s=(10.0, 10.0), status_lag_s=(2.0, 2.0), reports_times=reports_times
    )
    client = SimCloudProvisioner(harness.cloud, harness.market, harness.sim.process(), slots=2)
    harness.cloud.request(plan_of(client, "t1", 2), LAUNCH)
    statuses = []
    for after_s in (5.0, 10.0, 4.0):
        harness.advance(after_s)
        statuses.append(harness.cloud.status(Token("t1"), 1).nodes[0])
        harness.cloud.release(Token("t1")) if after_s == 10.0 else None
    expected = [(wall_ms(0.0), None)] * 2 + [(wall_ms(0.0), wall_ms(15.05))]
    times = [(one.started_at_ms, one.ended_at_ms) for one in statuses]
    assert times == (expected if reports_times else [(None, None)] * 3)
    billed_s = 15.05 if reports_times else 5.05
    book = harness.cloud.billed_by_group()[Token("t1")]
    assert (round(book.billed_s, 3), book.machines) == (billed_s, 1)
