"""A simulated cloud on the simulated market: groups of instances, idempotent by token, with
billing.

`SimCloud.books` and `SimCloud.requests` are exact: the bill that a run computes from its journal is
compared with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec import structs

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
    missing_group_status,
)
from spotfit.model.offer import Market, Offer
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, offer_name
from spotfit_localsim.virtual.billing_check import Books
from spotfit_localsim.virtual.engine import Engine, SimProcess, wall_ms
from spotfit_localsim.virtual.market import SimMarket, SimOffer

PROVISIONER_NAME = "sim"


@dataclass(eq=False)
class SimInstance:
    """One instance."""

    token: Token
    node: int
    slots: int
    launch: AgentLaunchSpec
    offer: str = ""
    """The name of the offer that it is rented under; '' in a market without offers."""
    may_start_at: float = 0.0
    """Until then it waits, also if there is capacity."""
    billed_from: float | None = None
    """Start of the billing; None while it waits for capacity."""
    up_at: float | None = None
    """When it had booted; None before."""
    terminated_at: float | None = None
    termination_visible_at: float = 0.0
    reason: str = ""
    has_failed: bool = False
    exit_code: int | None = None
    """Exit code of its agent, if that has exited by itself."""
    has_exceeded_memory: bool = False
    notice: Notice | PreemptionRisk | None = None
    noticed_at: float | None = None
    """When it received its notice."""
    reclaimed_at: float = math.inf
    """When it is terminated after its notice."""
    start_number: int = 1
    """Counts the instances of the node, from 1."""
    is_requeued: bool = False
    """Whether the cloud starts another instance for the node after this one has terminated."""
    is_last_attempt: bool = False
    attempt: int = 0
    """Counts the billed instances of the node, from 1."""
    predecessor: SimInstance | None = None
    """The previous instance of the node."""

    @property
    def is_up(self) -> bool:
        """Whether it has booted."""
        return self.up_at is not None

    @property
    def name(self) -> str:
        retry = f"#{self.start_number}" if self.start_number > 1 else ""
        return f"{self.token}.{self.node}{retry}"

    @property
    def is_active(self) -> bool:
        """Whether it is or will be billed."""
        return self.terminated_at is None

    def status(self, now: float, *, reports_times: bool = True) -> NodeStatus:
        """Return the status that the API reports, which lags behind a termination."""
        status = self._status_without_times(now)
        billed = self if self.billed_from is not None else self.predecessor
        if not reports_times or billed is None or billed.billed_from is None:
            return status
        is_ended = billed.terminated_at is not None and now >= billed.termination_visible_at
        return structs.replace(
            status,
            started_at_ms=wall_ms(billed.billed_from),
            ended_at_ms=wall_ms(billed.terminated_at or 0.0) if is_ended else None,
            attempt=billed.attempt,
        )

    def _status_without_times(self, now: float) -> NodeStatus:
        if self.terminated_at is not None and now >= self.termination_visible_at:
            if self.is_requeued:
                return NodeStatus(state=NodeState.WAITING, reason=self.reason)
            return NodeStatus(
                state=NodeState.FAILED if self.has_failed else NodeState.GONE,
                reason=self.reason,
                exit_code=self.exit_code,
                out_of_memory=self.has_exceeded_memory,
            )
        return NodeStatus(
            state=NodeState.RUNNING if self.is_up else NodeState.WAITING,
            reason="" if self.is_up or self.predecessor is None else self.predecessor.reason,
            is_last_attempt=self.is_last_attempt,
        )

    def up_s(self, now: float) -> float:
        """Return how long it was up."""
        if self.up_at is None:
            return 0.0
        return (now if self.terminated_at is None else self.terminated_at) - self.up_at

    def billed_s(self, now: float) -> float:
        """Return the billed duration."""
        if self.billed_from is None:
            return 0.0
        return (now if self.terminated_at is None else self.terminated_at) - self.billed_from


@dataclass(eq=False)
class SimInstanceGroup:
    """The instances of one token."""

    plan: GroupPlan
    instances: list[SimInstance] = field(default_factory=list)
    """The newest instance of each node."""
    lost_instances: list[SimInstance] = field(default_factory=list)
    """Preempted instances that have a successor."""
    is_released: bool = False
    visible_at: float = 0.0
    """From when on reads show the group."""

    @property
    def offer(self) -> str:
        """The name of the offer of its instances."""
        return offer_of(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    """One instance in the books of the cloud. All times are in virtual time."""

    name: str
    token: Token
    node: int = 0
    offer: str = ""
    market: Market = Market.SPOT
    billed_from_s: float
    up_at_s: float | None = None
    """When it had booted; None if it was terminated before."""
    ended_at_s: float | None = None
    """None while it is billed."""
    noticed_at_s: float | None = None
    """When it received a preemption notice."""
    reason: str = ""
    """Why it was terminated."""

    def billed_s(self, now: float) -> float:
        """Return the time that is billed until `now`."""
        end_s = now if self.ended_at_s is None else self.ended_at_s
        return max(0.0, min(now, end_s) - self.billed_from_s)

    def is_billed_at(self, moment: float) -> bool:
        """Return whether it is billed at that time."""
        is_over = self.ended_at_s is not None and self.ended_at_s <= moment
        return self.billed_from_s <= moment and not is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRequest:
    """One request for machines that reached the cloud, without repetitions of granted ones."""

    token: Token
    at_s: float
    offer: str = ""
    market: Market = Market.SPOT
    num_nodes: int = 1
    refusal: str = ""
    """Why it was refused; '' if it was granted."""


def offer_of(plan: GroupPlan) -> str:
    """Return the name of the offer that the plan requests; '' in a market without offers."""
    return str(plan.body.get("offer", ""))


class InstanceObserver(Protocol):
    """Runs the agents on the instances."""

    def on_instance_booted(self, instance: SimInstance) -> None:
        """The instance is up: start its agent."""
        ...

    def on_instance_terminated(self, instance: SimInstance, *, closes_connections: bool) -> None:
        """The instance is terminated; `closes_connections` if its kernel closed its sockets."""
        ...


class SimCloud:
    """All groups. Its methods are exact; the provisioner simulates lost requests and responses."""

    def __init__(
        self,
        engine: Engine,
        market: SimMarket,
        log: Callable[[str, str], None],
        name: str = PROVISIONER_NAME,
    ) -> None:
        self.name = name
        """The name of its provisioner."""
        self.call_listeners: list[Callable[[str, Token], None]] = []
        """Called with the name and the token of every call that reaches the cloud."""
        self.groups: dict[Token, SimInstanceGroup] = {}
        self.request_listeners: list[Callable[[GroupPlan], None]] = []
        """Called for every request that creates instances."""
        self.observer: InstanceObserver | None = None
        self.requests: list[CloudRequest] = []
        """Every request, also the refused ones."""
        self._engine = engine
        self._market = market
        self._log = log
        self._billed_counts: Counter[str] = Counter()
        """Number of billed instances by offer."""
        for offer in market.offers.values():
            self._schedule_capacity_changes(offer)

    @property
    def are_credentials_invalid(self) -> bool:
        """Whether every call is rejected at present."""
        return self._market.are_credentials_invalid(self._engine.now)

    # --- API ---------------------------------------------------------------------------------

    def receive(self, token: Token) -> None:
        """Tell the listeners that a call about the group has arrived."""
        for listener in self.call_listeners:
            listener(self.name, token)

    def request(self, plan: GroupPlan, launch: AgentLaunchSpec) -> Refusal | None:
        """Create the instances of the plan, once per token; they wait for capacity."""
        # The token makes the request idempotent: a retry finds the instances of the first one.
        if plan.token in self.groups:
            return None
        offer = self._market.offers[offer_of(plan)]
        refusal = self._refuse(plan, offer)
        self.requests.append(
            CloudRequest(
                token=plan.token,
                at_s=self._engine.now,
                offer=offer.name,
                market=offer.config.market,
                num_nodes=plan.num_nodes,
                refusal=refusal.reason if refusal is not None else "",
            )
        )
        if refusal is not None:
            return refusal
        for listener in self.request_listeners:
            listener(plan)
        delay_s = offer.draw_grant_delay_s()
        instances = [
            SimInstance(
                plan.token,
                node,
                plan.slots_per_node,
                launch,
                offer=offer.name,
                may_start_at=self._engine.now + delay_s,
            )
            for node in range(plan.num_nodes)
        ]
        visible_at = self._engine.now + self._market.config.read_lag_s
        self.groups[plan.token] = SimInstanceGroup(plan, instances, visible_at=visible_at)
        self._log("cloud", f"accepted {plan.num_nodes} machines for {plan.token}{_under(offer)}")
        self._engine.schedule_after(delay_s, self._allocate)
        return None

    def _refuse(self, plan: GroupPlan, offer: SimOffer) -> Refusal | None:
        """The refusal of the request; None if it is granted."""
        if offer.should_refuse(self._engine.now):
            return Refusal("the market refused the request")
        if self._market.config.rejects_when_full and self._free_capacity(offer) < plan.num_nodes:
            return Refusal(f"no capacity for {plan.num_nodes} machines{_under(offer)}")
        return None

    def status(self, token: Token, nodes: int) -> GroupStatus:
        """Return the status of the group that the API reports."""
        group = self.groups.get(token)
        if group is None or not self.is_visible(token):
            return missing_group_status(nodes)
        now = self._engine.now
        # Billing starts when capacity is allocated, so an unbilled instance waits.
        waiting = any(
            instance.is_active and instance.billed_from is None for instance in group.instances
        )
        # The journal records why a group waits.
        is_full = self._free_capacity(self._market.offers[group.offer]) <= 0
        refusal = "waiting for capacity" if waiting and is_full else ""
        reports_times = self._market.config.reports_times
        return GroupStatus(
            nodes=tuple(one.status(now, reports_times=reports_times) for one in group.instances),
            refusal=refusal,
        )

    def is_visible(self, token: Token) -> bool:
        """Return whether reads show the group."""
        group = self.groups.get(token)
        return group is not None and self._engine.now >= group.visible_at

    def release(self, token: Token) -> None:
        """Terminate all instances of the group."""
        group = self.groups.get(token)
        if group is not None:

            def terminate_all() -> None:
                group.is_released = True
                for instance in group.instances:
                    self.terminate(instance, "released", closes_connections=True)

            # As a real API, the call returns before the instances are gone.
            self._engine.schedule_after(0.05, terminate_all)

    # --- preemption and termination ----------------------------------------------------------

    def reclaim(
        self, instance: SimInstance, *, with_notice: bool, at_s: float | None = None
    ) -> None:
        """Preempt the instance at once, or after a notice: at `at_s`, or after `notice_s`.

        Does nothing for on-demand instances, which are never preempted.
        """
        if not instance.is_active or instance.notice is not None:
            return
        if not self._market.offers[instance.offer].is_preemptible:
            self._log(instance.name, "is not preempted: it is rented on demand")
            return
        # An instance that has not booted runs nothing that could read a notice.
        if not instance.is_up or not with_notice:
            self.terminate(
                instance,
                "reclaimed",
                closes_connections=self._market.stream.bernoulli(
                    self._market.config.clean_close_probability
                ),
                requeues=True,
            )
            return
        notice_s = self._market.config.notice_s if at_s is None else at_s - self._engine.now
        instance.reclaimed_at = self._engine.now + notice_s if at_s is None else at_s
        instance.noticed_at = self._engine.now
        instance.notice = Notice(reason="reclaimed by the market", seconds_left=notice_s)
        self._log(instance.name, f"receives a preemption notice: {notice_s:.0f} s left")
        self._engine.schedule_at(
            instance.reclaimed_at,
            lambda: self.terminate(
                instance, "reclaimed after its notice", closes_connections=True, requeues=True
            ),
        )

    def kill_for_memory(self, instance: SimInstance) -> None:
        """Terminate an instance whose processes exceed its memory limit; it is not restarted."""
        if instance.is_active:
            instance.has_exceeded_memory = True
            self.terminate(instance, "OutOfMemory", closes_connections=True, failed=True)

    def terminate(
        self,
        instance: SimInstance,
        reason: str,
        *,
        closes_connections: bool,
        failed: bool = False,
        requeues: bool = False,
    ) -> None:
        """Terminate the instance and end its billing.

        With `requeues`, a market with `restarts_per_machine` starts another one for its node.
        """
        if not instance.is_active:
            return
        now = self._engine.now
        self._billed_counts[instance.offer] -= instance.billed_from is not None
        instance.terminated_at = now
        # The API lags behind: agents notice a loss by their connections long before.
        instance.termination_visible_at = now + self._market.stream.uniform_in(
            self._market.config.status_lag_s
        )
        instance.reason = reason
        instance.has_failed = failed
        restarts = self._market.config.restarts_per_machine
        is_held = not self.groups[instance.token].is_released
        if requeues and is_held and instance.start_number <= restarts:
            instance.is_requeued = True
            self._engine.schedule_at(
                instance.termination_visible_at, partial(self._requeue, instance)
            )
        self._log(
            instance.name, f"is terminated: {reason}{'' if closes_connections else ' (silently)'}"
        )
        # Without an agent there is nothing to terminate.
        if self.observer is not None and instance.is_up:
            self.observer.on_instance_terminated(instance, closes_connections=closes_connections)
        self._engine.schedule_after(0.0, self._allocate)

    def _requeue(self, lost: SimInstance) -> None:
        """Start another instance for the node of a preempted one."""
        group = self.groups[lost.token]
        if group.is_released:
            lost.is_requeued = False
            return
        number = lost.start_number + 1
        group.lost_instances.append(lost)
        group.instances[lost.node] = SimInstance(
            lost.token,
            lost.node,
            lost.slots,
            lost.launch,
            offer=lost.offer,
            start_number=number,
            is_last_attempt=number > self._market.config.restarts_per_machine,
            predecessor=lost,
        )
        self._log("cloud", f"restarts {lost.name}")
        self._engine.schedule_after(0.0, self._allocate)

    def schedule_allocation(self) -> None:
        """Allocate waiting instances after a change of capacity."""
        self._engine.schedule_after(0.0, self._allocate)

    def active_instances(self) -> Iterator[SimInstance]:
        """Yield every instance that is or will be billed."""
        return (
            instance
            for group in self.groups.values()
            for instance in group.instances
            if instance.is_active
        )

    def running_instances(self) -> list[SimInstance]:
        """Return every instance that is up."""
        return [instance for instance in self.active_instances() if instance.is_up]

    def billed_by_group(self) -> dict[Token, Books]:
        """Return what was billed, by group.

        An API that reports no times bills machines from when it reports them as running.
        """
        now, books = self._engine.now, {}
        reports_times = self._market.config.reports_times
        for token, group in self.groups.items():
            instances = (*group.instances, *group.lost_instances)
            billed = [one.billed_s(now) if reports_times else one.up_s(now) for one in instances]
            books[token] = Books(sum(billed), sum(one > 0 for one in billed))
        return books

    def _all_instances(self) -> Iterator[SimInstance]:
        """Every instance of every group, also those that have a successor."""
        return (
            instance
            for group in self.groups.values()
            for instance in (*group.instances, *group.lost_instances)
        )

    # --- books -------------------------------------------------------------------------------

    @property
    def machine_seconds(self) -> float:
        """Billed seconds of all instances."""
        now = self._engine.now
        return sum(instance.billed_s(now) for instance in self._all_instances())

    @property
    def billed_count(self) -> int:
        """Number of instances that were ever billed."""
        return sum(instance.billed_from is not None for instance in self._all_instances())

    def books(self) -> tuple[MachineRecord, ...]:
        """Return the record of every instance that was ever billed."""
        return tuple(
            MachineRecord(
                name=one.name,
                token=one.token,
                node=one.node,
                offer=one.offer,
                market=self._market.offers[one.offer].config.market,
                billed_from_s=one.billed_from,
                up_at_s=one.up_at,
                ended_at_s=one.terminated_at,
                noticed_at_s=one.noticed_at,
                reason=one.reason,
            )
            for one in self._all_instances()
            if one.billed_from is not None
        )

    def billed_usd_by_offer(self) -> dict[str, float]:
        """Return the cost until now of each offer that was used, each second at its own price."""
        now, costs_usd = self._engine.now, dict[str, float]()
        for one in self.books():
            usd = self._market.offers[one.offer].cost_usd(
                one.billed_from_s, now if one.ended_at_s is None else one.ended_at_s
            )
            costs_usd[one.offer] = costs_usd.get(one.offer, 0.0) + usd
        return costs_usd

    def billed_usd(self) -> float:
        """Return the cost of all instances until now; 0 in a market without offers."""
        return sum(self.billed_usd_by_offer().values())

    # --- capacity ----------------------------------------------------------------------------

    def _free_capacity(self, offer: SimOffer) -> int:
        return offer.capacity_at(self._engine.now) - self._billed_counts[offer.name]

    def _allocate(self) -> None:
        now = self._engine.now
        for instance in [
            instance for instance in self.active_instances() if instance.billed_from is None
        ]:
            offer = self._market.offers[instance.offer]
            if now < instance.may_start_at or self._free_capacity(offer) <= 0:
                continue
            instance.billed_from = now
            instance.attempt = (
                1 if instance.predecessor is None else instance.predecessor.attempt + 1
            )
            self._billed_counts[offer.name] += 1
            self._engine.schedule_after(offer.draw_boot_s(), partial(self._finish_boot, instance))

    def _finish_boot(self, instance: SimInstance) -> None:
        offer = self._market.offers[instance.offer]

        def end_lifetime() -> None:
            # The draw is a part of every seed.
            offer.draw_lifetime_s()
            # The machine keeps running once the faults have ended.
            if not self._market.are_faults_stopped:
                with_notice = self._market.stream.bernoulli(self._market.config.notice_probability)
                self.reclaim(instance, with_notice=with_notice)

        if not instance.is_active:
            return
        instance.up_at = self._engine.now
        lifetime_s = offer.draw_lifetime_s()
        if lifetime_s is not None:
            self._engine.schedule_after(lifetime_s, end_lifetime)
        if self._market.should_fail_start():
            self.terminate(
                instance, "its agent exited with code 1", closes_connections=True, failed=True
            )
            return
        # Billed, but no agent joins: only the boot timeout of the run detects it.
        if self._market.should_fail_boot():
            self._log(instance.name, "is up but its agent does not start")
        elif self.observer is not None:
            self.observer.on_instance_booted(instance)

    def _schedule_capacity_changes(self, offer: SimOffer) -> None:
        for moment in offer.capacity_change_times():
            self._engine.schedule_at(moment, partial(self._apply_capacity_change, offer))
        config = self._market.config
        if config.drop_notice_probability > 0:
            for moment in offer.capacity_drop_times():
                self._engine.schedule_at(
                    moment - config.notice_s, partial(self._announce_drop, offer, moment)
                )

    def _announce_drop(self, offer: SimOffer, at_s: float) -> None:
        """Send notices to some of the instances that the capacity at `at_s` leaves no place for."""
        stream, probability = self._market.stream, self._market.config.drop_notice_probability
        instances = [one for one in self.running_instances() if one.offer == offer.name]
        candidates = [one for one in instances if one.notice is None]
        excess = self._excess(offer, at_s)
        for instance in stream.sample(candidates, min(len(candidates), max(0, excess))):
            if stream.bernoulli(probability):
                self.reclaim(instance, with_notice=True, at_s=at_s)

    def _excess(self, offer: SimOffer, at_s: float) -> int:
        """The number of billed instances above the capacity at `at_s` that have no notice until
        then."""
        leaving = sum(
            one.offer == offer.name and one.reclaimed_at <= at_s for one in self.active_instances()
        )
        return self._billed_counts[offer.name] - leaving - offer.capacity_at(at_s)

    def _apply_capacity_change(self, offer: SimOffer) -> None:
        """Preempt instances above the new capacity, and allocate waiting ones below it."""
        now = self._engine.now
        instances = [one for one in self.running_instances() if one.reclaimed_at > now]
        if offer.name:
            # Also instances that boot: otherwise these would stay above the capacity.
            instances = [
                one
                for one in self.active_instances()
                if one.offer == offer.name and one.billed_from is not None and one.notice is None
            ]
        excess = self._excess(offer, now)
        for instance in self._market.stream.sample(instances, min(len(instances), max(0, excess))):
            self.reclaim(instance, with_notice=False)
        self._allocate()


def _under(offer: SimOffer) -> str:
    return f" under the offer {offer.name}" if offer.name else ""


class SimCloudProvisioner:
    """The `Provisioner` of one process, with `slots` workers per machine; of workers or feeders."""

    def __init__(
        self,
        cloud: SimCloud,
        market: SimMarket,
        process: SimProcess,
        *,
        slots: int,
        for_feeders: bool = False,
    ) -> None:
        self._cloud = cloud
        self._market = market
        self._process = process
        self._slots = slots
        self._for_feeders = for_feeders

    @property
    def name(self) -> str:
        return self._cloud.name

    @property
    def traits(self) -> Traits:
        market = self._market.config
        return Traits(
            notice_s=market.notice_s,
            requeues_itself=market.restarts_per_machine > 0,
            status_lag_s=market.status_lag_s[1],
            read_lag_s=market.read_lag_s,
            notice_sources=("sim",),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        """Raises `ConfigError` if the market does not have the offer in the requested network."""
        slots = min(self._slots, request.total_workers)
        return GroupPlan(
            token=request.token,
            provisioner=self.name,
            num_nodes=math.ceil(request.num_workers / slots),
            slots_per_node=slots,
            body={"offer": self._choose_offer(request)} if self._market.has_offers else {},
        )

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers with the prices in force; unknown ones if the call fails."""
        if not self._market.has_offers:
            offer = Offer(
                name=offer_name(self.name, Market.SPOT), provisioner=self.name, market=Market.SPOT
            )
            return OfferListing(offers=(offer,), remarks=("The simulated market has no prices.",))
        offers = self._market.config.offers_at(
            self._process.engine.now, self.name, for_feeders=self._for_feeders
        )
        self._simulate_latency()
        invalid = self._cloud.are_credentials_invalid
        self._simulate_latency()
        if invalid or self._market.should_lose_response():
            unknown = tuple(structs.replace(offer, price=None) for offer in offers)
            return OfferListing(offers=unknown, remarks=("The prices could not be read.",))
        return OfferListing(offers=offers)

    def _choose_offer(self, request: GroupRequest) -> str:
        """The requested offer, or the first one that the request permits."""
        offers = {
            name: one
            for name, one in self._market.offers.items()
            if one.config.for_feeders == self._for_feeders
        }
        if request.offer is None:
            # As in a real backend: the network of the run, else one that was not refused before.
            permitted = [one for one in offers.values() if request.network in ("", one.network)]
            untried = [one for one in permitted if one.network not in request.refused_networks]
            chosen = next(iter([*untried, *permitted]), None)
        else:
            chosen = offers.get(request.offer.name)
        if chosen is None or request.network not in ("", chosen.network):
            wanted = "any" if request.offer is None else repr(request.offer.name)
            raise ConfigError(
                f"{self.name} has no offer for {wanted} in the network {request.network!r}.",
                do=f"Request one of {', '.join(offers)}.",
            )
        return chosen.name

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        self._send_request(plan.token)
        refusal = self._cloud.request(plan, launch)
        self._receive_response()
        return refusal or self._handle(plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group of the token."""
        self._send_request(plan.token)
        is_known = self._cloud.is_visible(plan.token)
        self._receive_response()
        return self._handle(plan) if is_known else None

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=f"sim-{plan.token}",
            detail={"nodes": plan.num_nodes},
            network=self._market.offers[offer_of(plan)].network,
            offer=offer_of(plan),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        self._send_request(handle.token)
        status = self._cloud.status(handle.token, int(handle.detail["nodes"]))
        self._receive_response()
        return status

    def cancel(self, handle: GroupHandle) -> None:
        self._send_request(handle.token)
        self._cloud.release(handle.token)
        self._receive_response()

    def _send_request(self, token: Token) -> None:
        self._simulate_latency()
        if self._cloud.are_credentials_invalid:
            raise ProvisionPermissionError("the cloud does not recognise the credentials")
        self._cloud.receive(token)

    def _receive_response(self) -> None:
        self._simulate_latency()
        if self._market.should_lose_response():
            raise ConnectionError("the response of the cloud was lost")

    def _simulate_latency(self) -> None:
        """Let the time of half a call pass."""
        self._process.simulate_call(
            self._market.stream.uniform_in(self._market.config.latency_s) / 2
        )


class NonIdempotentProvisioner(SimCloudProvisioner):
    """A wrong provisioner for tests of the checker: every call requests a new group."""

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        self._send_request(plan.token)
        # A backend without idempotency tokens creates another group for every retry.
        attempts = sum(token.startswith(plan.token) for token in self._cloud.groups)
        new_token = Token(f"{plan.token}-{attempts}" if attempts else plan.token)
        refusal = self._cloud.request(
            GroupPlan(
                token=new_token,
                provisioner=PROVISIONER_NAME,
                num_nodes=plan.num_nodes,
                slots_per_node=plan.slots_per_node,
                body=plan.body,
            ),
            launch,
        )
        self._receive_response()
        return refusal or GroupHandle(
            token=new_token,
            provisioner=PROVISIONER_NAME,
            name=f"sim-{new_token}",
            detail={"nodes": plan.num_nodes},
        )
