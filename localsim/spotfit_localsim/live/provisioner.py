"""This machine as a cloud: every node is an agent's process, with a directory and an address."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from spotfit.core.ids import RunId, Token
from spotfit.host import env
from spotfit.host.machine import python_version
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, gone
from spotfit.model.software import Software
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said, tail
from spotfit.provision.sizing import nodes_for
from spotfit_localsim.live import pool, processes, warm
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.places import Group, Node, Root

_NOTICES = ("file", "signal")
_OBSERVE_S = 0.1
"""Looking costs less than a millisecond here, and nothing else."""
_TOLD_LATE_S = 1.0
"""A killed process hangs up before it is seen to be dead."""


class LocalProvisioner:
    """Starts agents as processes that outlive whoever asked for them."""

    name = "local"
    Options: ClassVar = LocalOptions

    def __init__(self, options: LocalOptions | None = None, **given: Any) -> None:
        """With options, or with the fields of `LocalOptions` one by one."""
        self.options = options or LocalOptions(**given)
        self._root = _root_of(self.options)

    @classmethod
    def with_options(cls, **options: Any) -> LocalProvisioner:
        """From the fields of `LocalOptions`."""
        return cls(LocalOptions(**options))

    @property
    def traits(self) -> Traits:
        """It reclaims as a spot market would, if a reclaimer is set on it."""
        return Traits(
            notice_s=self.options.notice_s,
            observe_s=_OBSERVE_S,
            told_late_s=_TOLD_LATE_S,
            notices=_NOTICES,
            keeps_output=True,
            runs=Software(self._python(), sys.implementation.name),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        """As many nodes as the workers need, each as big as a node of the whole run."""
        slots = max(1, math.ceil(request.of / self.options.nodes))
        most = self.traits.max_nodes
        nodes = nodes_for(request, slots=slots, max_nodes=most, backend=self.name)
        return GroupPlan(request.token, self.name, nodes, slots)

    def warming(self, plan: GroupPlan, framework: str) -> AbstractContextManager[None]:
        """Begin the machines before it is known what they are to do: they import meanwhile.

        None are begun where some are up already, which may be waiting for a run, nor where there
        is no room for them.
        """
        standing = any(machine.alive for machine in self._root.machines())
        nodes = 0 if standing or self._short_of(plan.nodes) else plan.nodes
        return warm.machines(self._root, nodes, plan.slots, framework)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Start the machines, or those of them that a first call did not come to start."""
        group = self._root.group(launch.run_id, plan.token)
        with self._root.locked():
            if not group.exists:
                if short := self._short_of(plan.nodes):
                    return short
                group.create([self._assignment(plan, launch, n) for n in range(plan.nodes)])
            for node in group.nodes():
                if node.machine() is None:
                    self._start(node)
        name = f"{launch.run_id}/{plan.token}"
        return GroupHandle(plan.token, self.name, name, {"nodes": plan.nodes})

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """Look which processes are alive; directories of dead machines are removed in passing."""
        group = self._group(handle)
        if not group.exists:
            return gone(handle.detail["nodes"])
        for node in group.nodes():
            machine = node.machine()
            if machine is not None and not machine.alive:
                self._root.forget(machine)
        return GroupStatus(tuple(group.node(n).status() for n in range(handle.detail["nodes"])))

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """From the machine's directory, which is kept until its group is let go."""
        group = self._group(handle)
        path = group.node(node).output
        if not group.exists or not path.exists():
            return []
        return [Said(str(path), tail(path.read_text(errors="replace"), last))]

    def cancel(self, handle: GroupHandle) -> None:
        """Kill the machines and all they have started; the caller's own ends by itself."""
        group = self._group(handle)
        if not group.exists:
            return
        with self._root.locked():  # no machine can leave for another run meanwhile
            for node in group.nodes():
                _end(node)
        group.remove()

    def _python(self) -> str:
        return python_version() if self.options.python == "here" else self.options.python

    def _group(self, handle: GroupHandle) -> Group:
        run, _, token = handle.name.partition("/")
        return self._root.group(RunId(run), Token(token))

    def _short_of(self, nodes: int) -> Refusal | None:
        told = self._root.capacity()
        there_are = self.options.capacity if told is None else told
        if there_are is None:
            return None
        standing = [node for group in self._root.groups() for node in group.nodes()]
        free = there_are - sum(not node.status().over for node in standing)
        if nodes <= free:
            return None
        return Refusal(f"{nodes} nodes were asked for; {max(0, free)} of {there_are} are free")

    def _assignment(self, plan: GroupPlan, launch: Launch, number: int) -> Mapping[str, Any]:
        node = self._root.group(launch.run_id, plan.token).node(number)
        inherited = pool.environment()
        told = {
            **launch.environment(plan.token, number, plan.slots),
            **pool.belonging(self._root, inherited),
            "SPOTFIT_NOTICES": ",".join(_NOTICES),
            "SPOTFIT_NOTICE_FILE": str(node.notice),
            "SPOTFIT_SCRATCH": str(node.scratch),
        }
        if self.options.loopback and sys.platform == "linux":
            told["SPOTFIT_HOST"] = _address(plan.token, number)
        return {
            "environment": told,
            "agent": self.options.agent,
            "owner": str(pool.owner()),
            "digest": pool.digest(inherited),
            "idle_s": self.options.idle_s,
        }

    def _start(self, node: Node) -> None:
        owner, environment = pool.owner(), pool.environment()
        if owner == processes.here():
            pool.dismiss_at_exit(self._root)
        digest = pool.digest(environment)
        if warm.take(node, digest) or pool.take(node, owner, digest):
            return
        machine = processes.start_detached(
            [*warm.MACHINE, str(node.path)],
            environment=environment,
            directory=self._root.path,
            output=node.output,
        )
        if machine is not None:
            node.claim(machine)


def _root_of(options: LocalOptions) -> Root:
    """As the options say, or that of the machine this process is, or this user's."""
    told = options.root or env.lookup(pool.ROOT)
    return Root(Path(told).absolute()) if told else Root.default()


def _address(token: Token, number: int) -> str:
    """One of loopback's own, the same for the same node."""
    digest = hashlib.sha256(f"{token}/{number}".encode()).digest()
    return f"127.0.{1 + digest[0] % 254}.{1 + digest[1] % 254}"


def _end(node: Node) -> None:
    machine = node.machine()
    if machine is not None and machine != processes.here():
        processes.kill(machine)
        node.root.forget(machine)
