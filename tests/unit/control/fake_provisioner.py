"""A fake provisioner that records its calls, and background calls that complete on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.control.background_calls import BackgroundResult
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
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.testing.builders import RUN_ID

LAUNCH = AgentLaunchSpec("memory://fake", RUN_ID, "secret")


class FakeProvisioner:
    """A provisioner with one worker per machine, idempotent on tokens."""

    name = "local"

    def __init__(self, **traits: Any) -> None:
        # Its reads show every completed write, unless a test says otherwise.
        self.traits = Traits(**{"read_lag_s": 0.0, **traits})
        self.groups: dict[Token, list[NodeStatus]] = {}
        self.submitted_tokens: list[Token] = []
        self.launches: list[AgentLaunchSpec] = []
        self.observed_tokens: list[Token] = []
        self.cancelled_tokens: list[Token] = []
        self.looked_up_tokens: list[Token] = []
        self.submit_results: list[Refusal | BaseException] = []
        """Results of the next `submit` calls instead of machines."""
        self.call_error: Exception | None = None
        """Raised by `observe`, `cancel` and `find_group`."""
        self.before_look_up: Callable[[], None] = lambda: None
        """Called by `find_group`."""

    def plan(self, request: GroupRequest) -> GroupPlan:
        return GroupPlan(
            token=request.token,
            provisioner=self.name,
            num_nodes=request.num_workers,
            slots_per_node=1,
            body={"run": request.run_url},
        )

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        self.submitted_tokens.append(plan.token)
        self.launches.append(launch)
        if self.submit_results:
            answer = self.submit_results.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        self.groups.setdefault(plan.token, [NodeStatus(state=NodeState.RUNNING)] * plan.num_nodes)
        return self._handle(plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        self.before_look_up()
        self.looked_up_tokens.append(plan.token)
        if self.call_error:
            raise self.call_error
        return self._handle(plan) if plan.token in self.groups else None

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        return GroupHandle(token=plan.token, provisioner=self.name, name=f"group-{plan.token}")

    def observe(self, handle: GroupHandle) -> GroupStatus:
        self.observed_tokens.append(handle.token)
        if self.call_error:
            raise self.call_error
        nodes = self.groups.get(handle.token)
        return missing_group_status(1) if nodes is None else GroupStatus(nodes=tuple(nodes))

    def cancel(self, handle: GroupHandle) -> None:
        self.cancelled_tokens.append(handle.token)
        if self.call_error:
            raise self.call_error
        self.groups.pop(handle.token, None)

    def reclaim_node(self, token: Token, node: int) -> None:
        """Mark the machine as preempted."""
        self.groups[token][node] = NodeStatus(state=NodeState.GONE, reason="reclaimed")


class DeferredCalls:
    """Background calls that the test completes explicitly."""

    def __init__(self) -> None:
        self.pending: dict[str, Callable[[], Any]] = {}
        self.results: dict[str, BackgroundResult] = {}

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        if name in self.results:
            return self.results.pop(name)
        self.pending.setdefault(name, job)
        return None

    def send(self, name: str, job: Callable[[], Any]) -> None:
        self.pending.setdefault(name, job)

    def complete(self, *names: str) -> None:
        """Complete those calls, or all."""
        for name in names or tuple(self.pending):
            job = self.pending.pop(name)
            try:
                self.results[name] = BackgroundResult(job())
            except Exception as error:  # noqa: BLE001  # as every BackgroundCalls does
                self.results[name] = BackgroundResult(error=error)


def token_factory() -> Callable[[], str]:
    """Yields t-1, t-2, …"""
    made = iter(range(1, 1000))
    return lambda: f"t-{next(made)}"
