"""The plainest cloud there could be: groups of machines by token, over HTTP and JSON.

It has no client library, so its provisioner is at home here, too: 60 lines that show what a
provisioner of your own has to do.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
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
from spotfit.provision.launch import COMMAND, Launch
from spotfit.provision.sizing import nodes_for
from spotfit_localsim.wire.api import Access
from spotfit_localsim.wire.http import Reply, Request
from spotfit_localsim.wire.site import Machine, Site
from spotfit_localsim.wire.trouble import Troubles

# --- the cloud ------------------------------------------------------------------------------------


class Group(msgspec.Struct):
    """What was asked for under one token: a task for each machine."""

    command: list[str]
    environments: list[dict[str, str]]
    cancelled: bool = False


class Memory(msgspec.Struct):
    groups: dict[str, Group] = {}
    warned: list[int] = []
    """Machines whose tasks got their SIGTERM."""


class PlainCloud:
    """POST, GET and DELETE /groups/<token>. Its notice is a SIGTERM."""

    Memory = Memory

    def __init__(self, site: Site, troubles: Troubles) -> None:
        self.site = site
        self.troubles = troubles
        self.memory = Memory()

    @staticmethod
    def access(url: str) -> Access:
        return Access({"url": url})

    def answer(self, request: Request) -> Reply:
        token = request.path.removeprefix("/groups/")
        if request.method == "POST":
            return self._create(token, request.json())
        if token not in self.memory.groups:
            return Reply.json({"error": "no such group"}, 404)
        if request.method == "DELETE":
            self._cancel(token)
        return Reply.json({"machines": [self._told(token, n) for n in self._numbers(token)]})

    def tick(self) -> None:
        for token, group in self.memory.groups.items():
            for number, environment in enumerate(group.environments):
                task = f"{token}/{number}"
                if not group.cancelled and self.site.of(task) is None:
                    self.site.rent(task, group.command, environment)
        for machine in self.site.standing():
            if machine.notice_s is not None and machine.number not in self.memory.warned:
                self.memory.warned.append(machine.number)
                self.site.send(machine, signal.SIGTERM)

    def environment(self, machine: Machine) -> Mapping[str, str]:
        return {}

    def metadata(self, machine: Machine, request: Request) -> Reply | None:
        return None

    def _create(self, token: str, told: dict[str, Any]) -> Reply:
        if self.troubles.strikes("credentials"):
            return Reply.json({"error": "who are you?"}, 401)
        if self.troubles.strikes("permission"):
            return Reply.json({"error": "you may not rent machines"}, 403)
        if self.troubles.strikes("quota"):
            return Reply.json({"error": "your quota is 0 machines"}, 402)
        if self.troubles.strikes("capacity"):
            return Reply.json({"error": "no machines at the moment"}, 409)
        if token not in self.memory.groups:
            self.memory.groups[token] = Group(told["command"], told["environments"])
        return Reply.json({"token": token})

    def _cancel(self, token: str) -> None:
        self.memory.groups[token].cancelled = True
        for number in self._numbers(token):
            machine = self.site.of(f"{token}/{number}")
            if machine is not None:
                self.site.stop(machine, grace_s=5.0)

    def _numbers(self, token: str) -> range:
        return range(len(self.memory.groups[token].environments))

    def _told(self, token: str, number: int) -> dict[str, Any]:
        machine = self.site.of(f"{token}/{number}")
        if machine is None:
            state = "over" if self.memory.groups[token].cancelled else "waiting"
            return {"state": state, "why": "", "code": None}
        return {"state": machine.state, "why": machine.why, "code": machine.exit_code}


# --- and its provisioner --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOptions:
    provisioner: ClassVar[str] = "plain"

    url: str = ""
    nodes: int | None = None
    """Into how many machines the whole run is cut; None: one for each worker."""


class PlainProvisioner:
    """The four verbs, over HTTP."""

    name = "plain"
    Options: ClassVar = PlainOptions

    def __init__(self, options: PlainOptions) -> None:
        if not options.url:
            raise ConfigError(
                "PlainOptions(url=…) is missing.", do="Try provisioner='sim://plain'."
            )
        self.options = options

    @classmethod
    def with_options(cls, **options: Any) -> PlainProvisioner:
        return cls(PlainOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(max_nodes=1000, notice_s=5.0, observe_s=1.0, notices=("signal",))

    def plan(self, request: GroupRequest) -> GroupPlan:
        slots = max(1, -(-request.of // (self.options.nodes or request.of)))
        nodes = nodes_for(request, slots=slots, max_nodes=1000, backend=self.name)
        return GroupPlan(request.token, self.name, nodes, slots)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        environments = [launch.environment(plan.token, n, plan.slots) for n in range(plan.nodes)]
        status, told = self._ask(
            "POST", plan.token, {"command": COMMAND, "environments": environments}
        )
        if status == 409:
            return Refusal(told["error"])
        if status != 200:
            raise _WRONG.get(status, ProvisionError)(f"The plain cloud refused: {told['error']}.")
        return GroupHandle(plan.token, self.name, plan.token, {"nodes": plan.nodes})

    def observe(self, handle: GroupHandle) -> GroupStatus:
        status, told = self._ask("GET", handle.name)
        if status == 404:
            return gone(handle.detail["nodes"])
        return GroupStatus(tuple(_status(machine) for machine in told["machines"]))

    def cancel(self, handle: GroupHandle) -> None:
        self._ask("DELETE", handle.name)

    def _ask(self, method: str, token: str, body: Any = None) -> tuple[int, Any]:
        address = urlsplit(self.options.url)
        wire = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        with contextlib.closing(wire):
            wire.request(method, f"/groups/{token}", msgspec.json.encode(body) if body else None)
            reply = wire.getresponse()
            text = reply.read()
        if reply.status >= 500:
            raise OSError(f"The plain cloud is out of order ({reply.status}).")
        return reply.status, msgspec.json.decode(text)


_WRONG: Mapping[int, type[ProvisionError]] = {
    401: ProvisionPermissionError,
    402: QuotaError,
    403: ProvisionPermissionError,
}


def _status(told: Mapping[str, Any]) -> NodeStatus:
    if told["state"] == "over":
        state = NodeState.FAILED if told["code"] not in (None, 0) else NodeState.GONE
        return NodeStatus(state, told["why"])
    return NodeStatus(NodeState.RUNNING if told["state"] == "up" else NodeState.WAITING)
