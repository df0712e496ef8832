"""A cloud over the market: groups of virtual machines, idempotent by token, with a bill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from spotfit.core.ids import Token
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
    gone,
)
from spotfit.model.world import Notice
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import Launch
from spotfit_localsim.engine import Engine, Process
from spotfit_localsim.market import Tide

NAME = "sim"


@dataclass(eq=False)
class Box:
    """One machine, as the cloud keeps it."""

    token: Token
    node: int
    slots: int
    launch: Launch
    started_at: float | None = None
    """When its price began to be due."""
    up: bool = False
    over_at: float | None = None
    over_told_at: float = 0.0
    reason: str = ""
    failed: bool = False
    notice: Notice | None = None

    @property
    def name(self) -> str:
        return f"{self.token}.{self.node}"

    @property
    def standing(self) -> bool:
        """Whether it costs money, or will."""
        return self.over_at is None

    def status(self, now: float) -> NodeStatus:
        """What the backend says of it at that moment; the truth takes a while to get there."""
        if self.over_at is not None and now >= self.over_told_at:
            return NodeStatus(NodeState.FAILED if self.failed else NodeState.GONE, self.reason)
        return NodeStatus(NodeState.RUNNING if self.up else NodeState.WAITING)

    def paid_s(self, now: float) -> float:
        """For how long it was paid."""
        if self.started_at is None:
            return 0.0
        return (now if self.over_at is None else self.over_at) - self.started_at


@dataclass(eq=False)
class Order:
    """What was asked for under one token."""

    plan: GroupPlan
    boxes: list[Box] = field(default_factory=list)


class Tenant(Protocol):
    """Who lives on the machines."""

    def boot(self, box: Box) -> None:
        """It is up: start what its launch says."""
        ...

    def evict(self, box: Box, *, told: bool) -> None:
        """It is gone; `told` if its kernel could still close its connections."""
        ...


class Cloud:
    """All groups of the world. Its verbs are exact; losing calls and answers is for the client."""

    def __init__(self, engine: Engine, tide: Tide, say: Callable[[str, str], None]) -> None:
        self.orders: dict[Token, Order] = {}
        self.requested: list[Callable[[GroupPlan], None]] = []
        """Told of every request that makes machines."""
        self.tenant: Tenant | None = None
        self._engine = engine
        self._tide = tide
        self._say = say
        self._started = 0
        """Machines that are paid."""
        for moment in tide.turns():
            engine.at(moment, self._turn)

    # --- the verbs ---------------------------------------------------------------------------

    def request(self, plan: GroupPlan, launch: Launch) -> Refusal | None:
        """Make the machines of that plan, once a token; they come when there is capacity."""
        if plan.token in self.orders:
            return None
        if self._tide.refused():
            return Refusal("the market gives nothing at the moment")
        if self._tide.market.refuses and self._free() < plan.nodes:
            return Refusal(f"no capacity for {plan.nodes} machines")
        for told in self.requested:
            told(plan)
        boxes = [Box(plan.token, node, plan.slots, launch) for node in range(plan.nodes)]
        self.orders[plan.token] = Order(plan, boxes)
        self._say("cloud", f"{plan.nodes} machines promised for {plan.token}")
        self._engine.after(0.0, self._fill)
        return None

    def status(self, token: Token, nodes: int) -> GroupStatus:
        """What is known of that group."""
        order = self.orders.get(token)
        if order is None:
            return gone(nodes)
        now = self._engine.now
        waiting = any(box.standing and box.started_at is None for box in order.boxes)
        refusal = "waiting for capacity" if waiting and self._free() <= 0 else ""
        return GroupStatus(tuple(box.status(now) for box in order.boxes), refusal)

    def release(self, token: Token) -> None:
        """End everything of that group, in a moment."""
        order = self.orders.get(token)
        if order is not None:
            self._engine.after(0.05, lambda: self._end_all(order, "released"))

    # --- fate --------------------------------------------------------------------------------

    def reclaim(self, box: Box, *, notice: bool) -> None:
        """The market wants it back: now, or in a while that is announced."""
        if not box.standing or box.notice is not None:
            return
        if not box.up or not notice:
            self.end(box, "reclaimed", told=self._tide.stream.chance(self._tide.market.told_deaths))
            return
        left_s = self._tide.market.notice_s
        box.notice = Notice("reclaimed by the market", left_s)
        self._say(box.name, f"has {left_s:.0f} s left")
        self._engine.after(left_s, lambda: self.end(box, "reclaimed as announced", told=True))

    def end(self, box: Box, reason: str, *, told: bool, failed: bool = False) -> None:
        """That machine is over; it costs nothing any more."""
        if not box.standing:
            return
        now = self._engine.now
        self._started -= box.started_at is not None
        box.over_at = now
        box.over_told_at = now + self._tide.stream.between(self._tide.market.observed_after_s)
        box.reason = reason
        box.failed = failed
        self._say(box.name, f"is over: {reason}{'' if told else ' (nobody is told)'}")
        if self.tenant is not None and box.up:
            self.tenant.evict(box, told=told)
        self._engine.after(0.0, self._fill)

    def look_again(self) -> None:
        """Capacity may have changed."""
        self._engine.after(0.0, self._fill)

    def standing(self) -> Iterator[Box]:
        """Every machine that costs money, or will."""
        return (box for order in self.orders.values() for box in order.boxes if box.standing)

    def running(self) -> list[Box]:
        """Every machine that is up."""
        return [box for box in self.standing() if box.up]

    @property
    def machine_seconds(self) -> float:
        """What is to be paid."""
        now = self._engine.now
        return sum(box.paid_s(now) for order in self.orders.values() for box in order.boxes)

    # --- capacity ----------------------------------------------------------------------------

    def _free(self) -> int:
        return self._tide.capacity(self._engine.now) - self._started

    def _fill(self) -> None:
        for box in [box for box in self.standing() if box.started_at is None]:
            if self._free() <= 0:
                break
            box.started_at = self._engine.now
            self._started += 1
            boot_s = self._tide.stream.between(self._tide.market.boot_s)
            self._engine.after(boot_s, partial(self._boot, box))

    def _boot(self, box: Box) -> None:
        if not box.standing:
            return
        box.up = True
        life_s = self._tide.life_s()
        if life_s is not None:
            self._engine.after(life_s, lambda: self._expire(box))
        if self._tide.boots_dead():
            self._say(box.name, "is up and silent")
        elif self.tenant is not None:
            self.tenant.boot(box)

    def _expire(self, box: Box) -> None:
        if self._tide.life_s() is not None:
            self.reclaim(box, notice=self._tide.stream.chance(self._tide.market.with_notice))

    def _turn(self) -> None:
        """Capacity has changed: those who have no room must go, those who wait may come."""
        over = -self._free()
        up = self.running()
        for box in self._tide.stream.sample(up, min(len(up), max(0, over))):
            self.reclaim(box, notice=False)
        self._fill()

    def _end_all(self, order: Order, reason: str) -> None:
        for box in order.boxes:
            self.end(box, reason, told=True)


class SimProvisioner:
    """The `Provisioner` of one process: `slots` workers to a machine."""

    def __init__(self, cloud: Cloud, tide: Tide, process: Process, *, slots: int) -> None:
        self._cloud = cloud
        self._tide = tide
        self._process = process
        self._slots = slots

    @property
    def name(self) -> str:
        return NAME

    @property
    def traits(self) -> Traits:
        market = self._tide.market
        return Traits(
            notice_s=market.notice_s, told_late_s=market.observed_after_s[1], notices=("sim",)
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        slots = min(self._slots, request.of)
        return GroupPlan(request.token, NAME, math.ceil(request.workers / slots), slots)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        self._go()
        refusal = self._cloud.request(plan, launch)
        self._come_back()
        return refusal or GroupHandle(plan.token, NAME, f"sim-{plan.token}", {"nodes": plan.nodes})

    def observe(self, handle: GroupHandle) -> GroupStatus:
        self._go()
        status = self._cloud.status(handle.token, int(handle.detail["nodes"]))
        self._come_back()
        return status

    def cancel(self, handle: GroupHandle) -> None:
        self._go()
        self._cloud.release(handle.token)
        self._come_back()

    def _go(self) -> None:
        self._process.touch(self._tide.stream.between(self._tide.market.latency_s) / 2)

    def _come_back(self) -> None:
        self._process.touch(self._tide.stream.between(self._tide.market.latency_s) / 2)
        if self._tide.answer_lost():
            raise ConnectionError("the cloud's answer was lost")


class Forgetful(SimProvisioner):
    """Known to be wrong: asks under a fresh name each time, so that asking twice pays twice."""

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        self._go()
        tries = sum(token.startswith(plan.token) for token in self._cloud.orders)
        fresh = Token(f"{plan.token}-{tries}" if tries else plan.token)
        refusal = self._cloud.request(GroupPlan(fresh, NAME, plan.nodes, plan.slots), launch)
        self._come_back()
        return refusal or GroupHandle(fresh, NAME, f"sim-{fresh}", {"nodes": plan.nodes})
