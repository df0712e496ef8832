"""A simulated cloud on the simulated market: groups of instances, idempotent by token, with
billing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec import structs

from spotfit.core.errors import ProvisionPermissionError
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
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.virtual.billing_check import Books
from spotfit_localsim.virtual.engine import Engine, SimProcess, wall_ms
from spotfit_localsim.virtual.market import SimMarket

PROVISIONER_NAME = "sim"


@dataclass(eq=False)
class SimInstance:
    """One instance."""

    token: Token
    node: int
    slots: int
    launch: AgentLaunchSpec
    billed_from: float | None = None
    """Start of the billing; None while it waits for capacity."""
    up_from: float | None = None
    """When it has booted."""
    terminated_at: float | None = None
    termination_visible_at: float = 0.0
    reason: str = ""
    has_failed: bool = False
    exit_code: int | None = None
    """Exit code of its agent, if that has exited by itself."""
    has_exceeded_memory: bool = False
    notice: Notice | PreemptionRisk | None = None
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
        return self.up_from is not None

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
        if self.up_from is None:
            return 0.0
        return (now if self.terminated_at is None else self.terminated_at) - self.up_from

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
        self._engine = engine
        self._market = market
        self._log = log
        self._billed_count = 0
        """Number of billed instances."""
        for moment in market.capacity_change_times():
            engine.schedule_at(moment, self._apply_capacity_change)

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
        if self._market.should_refuse():
            return Refusal("the market refused the request")
        if self._market.config.rejects_when_full and self._free_capacity() < plan.num_nodes:
            return Refusal(f"no capacity for {plan.num_nodes} machines")
        for listener in self.request_listeners:
            listener(plan)
        instances = [
            SimInstance(plan.token, node, plan.slots_per_node, launch)
            for node in range(plan.num_nodes)
        ]
        visible_at = self._engine.now + self._market.config.read_lag_s
        self.groups[plan.token] = SimInstanceGroup(plan, instances, visible_at=visible_at)
        self._log("cloud", f"accepted {plan.num_nodes} machines for {plan.token}")
        self._engine.schedule_after(0.0, self._allocate)
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
        refusal = "waiting for capacity" if waiting and self._free_capacity() <= 0 else ""
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

    def reclaim(self, instance: SimInstance, *, with_notice: bool) -> None:
        """Preempt the instance at once, or after a notice."""
        if not instance.is_active or instance.notice is not None:
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
        notice_s = self._market.config.notice_s
        instance.notice = Notice(reason="reclaimed by the market", seconds_left=notice_s)
        self._log(instance.name, f"receives a preemption notice: {notice_s:.0f} s left")
        self._engine.schedule_after(
            notice_s,
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
        self._billed_count -= instance.billed_from is not None
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

    def books(self) -> dict[Token, Books]:
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

    @property
    def machine_seconds(self) -> float:
        """Billed seconds of all instances."""
        now = self._engine.now
        return sum(
            instance.billed_s(now)
            for group in self.groups.values()
            for instance in (*group.instances, *group.lost_instances)
        )

    @property
    def billed_count(self) -> int:
        """Number of instances that were ever billed."""
        return sum(
            instance.billed_from is not None
            for group in self.groups.values()
            for instance in (*group.instances, *group.lost_instances)
        )

    # --- capacity ----------------------------------------------------------------------------

    def _free_capacity(self) -> int:
        return self._market.capacity_at(self._engine.now) - self._billed_count

    def _allocate(self) -> None:
        for instance in [
            instance for instance in self.active_instances() if instance.billed_from is None
        ]:
            if self._free_capacity() <= 0:
                break
            instance.billed_from = self._engine.now
            instance.attempt = (
                1 if instance.predecessor is None else instance.predecessor.attempt + 1
            )
            self._billed_count += 1
            boot_s = self._market.stream.uniform_in(self._market.config.boot_s)
            self._engine.schedule_after(boot_s, partial(self._finish_boot, instance))

    def _finish_boot(self, instance: SimInstance) -> None:
        def end_lifetime() -> None:
            # None after the faults have ended: the machine keeps running then.
            if self._market.draw_lifetime_s() is not None:
                with_notice = self._market.stream.bernoulli(self._market.config.notice_probability)
                self.reclaim(instance, with_notice=with_notice)

        if not instance.is_active:
            return
        instance.up_from = self._engine.now
        lifetime_s = self._market.draw_lifetime_s()
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

    def _apply_capacity_change(self) -> None:
        """Preempt instances above the new capacity, and allocate waiting ones below it."""
        excess = -self._free_capacity()
        running = self.running_instances()
        # Without notices: a trace records capacity only.
        for instance in self._market.stream.sample(running, min(len(running), max(0, excess))):
            self.reclaim(instance, with_notice=False)
        self._allocate()


class SimCloudProvisioner:
    """The `Provisioner` of one process, with `slots` workers per machine."""

    def __init__(
        self, cloud: SimCloud, market: SimMarket, process: SimProcess, *, slots: int
    ) -> None:
        self._cloud = cloud
        self._market = market
        self._process = process
        self._slots = slots

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
        slots = min(self._slots, request.total_workers)
        return GroupPlan(
            token=request.token,
            provisioner=self.name,
            num_nodes=math.ceil(request.num_workers / slots),
            slots_per_node=slots,
        )

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
        self._process.simulate_call(
            self._market.stream.uniform_in(self._market.config.latency_s) / 2
        )
        if self._cloud.are_credentials_invalid:
            raise ProvisionPermissionError("the cloud does not recognise the credentials")
        self._cloud.receive(token)

    def _receive_response(self) -> None:
        self._process.simulate_call(
            self._market.stream.uniform_in(self._market.config.latency_s) / 2
        )
        if self._market.should_lose_response():
            raise ConnectionError("the response of the cloud was lost")


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
