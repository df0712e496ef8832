"""A cloud on paper: it remembers what it was asked, and gives what the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.control.errands import Done
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
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import Launch
from spotfit.testing.builders import RUN

LAUNCH = Launch("memory://paper", RUN, "secret")


class PaperCloud:
    """One worker a machine; a token asked for twice is one group."""

    name = "local"

    def __init__(self, **traits: Any) -> None:
        self.traits = Traits(**traits)
        self.groups: dict[Token, list[NodeStatus]] = {}
        self.submits: list[Token] = []
        self.launches: list[Launch] = []
        self.observed: list[Token] = []
        self.cancelled: list[Token] = []
        self.answers: list[Refusal | BaseException] = []
        """What the next calls of `submit` get instead of machines."""
        self.broken: Exception | None = None
        """What `observe` and `cancel` raise."""

    def plan(self, request: GroupRequest) -> GroupPlan:
        return GroupPlan(request.token, self.name, request.workers, 1, {"run": request.run_url})

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        self.submits.append(plan.token)
        self.launches.append(launch)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        self.groups.setdefault(plan.token, [NodeStatus(NodeState.RUNNING)] * plan.nodes)
        return GroupHandle(plan.token, self.name, f"group-{plan.token}")

    def observe(self, handle: GroupHandle) -> GroupStatus:
        self.observed.append(handle.token)
        if self.broken:
            raise self.broken
        nodes = self.groups.get(handle.token)
        return gone(1) if nodes is None else GroupStatus(tuple(nodes))

    def cancel(self, handle: GroupHandle) -> None:
        self.cancelled.append(handle.token)
        if self.broken:
            raise self.broken
        self.groups.pop(handle.token, None)

    def lose(self, token: Token, node: int) -> None:
        """That machine is reclaimed."""
        self.groups[token][node] = NodeStatus(NodeState.GONE, "reclaimed")


class Slow:
    """Errands that are done when the test says so."""

    def __init__(self) -> None:
        self.under_way: dict[str, Callable[[], Any]] = {}
        self.done: dict[str, Done] = {}

    def run(self, name: str, job: Callable[[], Any]) -> Done | None:
        if name in self.done:
            return self.done.pop(name)
        self.under_way.setdefault(name, job)
        return None

    def send(self, name: str, job: Callable[[], Any]) -> None:
        self.under_way.setdefault(name, job)

    def finish(self, *names: str) -> None:
        """Those errands (or all) are done now."""
        for name in names or tuple(self.under_way):
            job = self.under_way.pop(name)
            try:
                self.done[name] = Done(job())
            except Exception as error:  # noqa: BLE001  # as every Errands does
                self.done[name] = Done(error=error)


def tokens() -> Callable[[], str]:
    """t-1, t-2, …"""
    made = iter(range(1, 1000))
    return lambda: f"t-{next(made)}"
