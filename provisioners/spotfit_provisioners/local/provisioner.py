"""`LocalProvisioner`: submit, observe and cancel groups as processes of this machine."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.host import env, system
from spotfit.host.machine import devices, python_version
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    Software,
    missing_group_status,
)
from spotfit.model.offer import Market
from spotfit.provision.api import MachineOutput, Refusal, Traits, last_lines
from spotfit.provision.launch import AgentLaunchSpec, count_nodes
from spotfit.provision.offers import OfferListing, select_offer
from spotfit_provisioners.local import machine_pool, prewarm, processes
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalGroup, LocalNode
from spotfit_provisioners.prices.given import (
    given_market,
    own_machine_listing,
    own_machine_offer,
)

_NOTICE_SOURCES = ("file", "signal")
_OBSERVE_INTERVAL_S = 0.1  # observing a group takes less than a millisecond
# The connection of a killed process closes before the process is seen as ended.
_STATUS_LAG_S = 1.0
# Without a waiting machine: the start of Python and its imports, on a busy computer.
_START_TIME_S = 10.0


class LocalProvisioner:
    """A group is a directory with one subdirectory per node; agents outlive their submitter."""

    name = "local"
    Options: ClassVar = LocalOptions

    def __init__(self, options: LocalOptions | None = None, **fields: Any) -> None:
        """Construct from options, or from the fields of `LocalOptions`."""
        self.options = options or LocalOptions(**fields)
        # Without the option: the root of the machine in which this process runs, or the default.
        root = self.options.root or env.lookup(machine_pool.ROOT_ENV)
        self._cloud_dir = LocalCloudDir(Path(root).absolute()) if root else LocalCloudDir.default()

    @classmethod
    def with_options(cls, **options: Any) -> LocalProvisioner:
        """Construct from the fields of `LocalOptions`."""
        return cls(LocalOptions(**options))

    @property
    def traits(self) -> Traits:
        python = python_version() if self.options.python == "here" else self.options.python
        # `spot` stays True: tests simulate preemptions on this backend.
        return Traits(
            notice_s=self.options.notice_s,
            start_time_s=_START_TIME_S,
            observe_interval_s=_OBSERVE_INTERVAL_S,
            status_lag_s=_STATUS_LAG_S,
            read_lag_s=0.0,
            notice_sources=_NOTICE_SOURCES,
            shared_directories="always",
            keeps_output=True,
            software=Software(
                python=python,
                implementation=sys.implementation.name,
                is_callers=self.options.python == "here",
            ),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        """Return nodes of the size that `options.nodes` gives for the whole run."""
        select_offer(
            request,
            _list_offers(self.options).offers,
            do="This computer has one offer; list it again after changes of "
            "LocalOptions(prices=…).",
        )
        slots = max(1, math.ceil(request.total_workers / self.options.nodes))
        _check_gpus(slots, request.resources_per_worker.get("GPU", 0.0))
        nodes = count_nodes(
            request, slots=slots, max_nodes=self.traits.max_nodes, backend=self.name
        )
        return GroupPlan(
            token=request.token, provisioner=self.name, num_nodes=nodes, slots_per_node=slots
        )

    def prewarm(
        self, plan: GroupPlan, framework: str, preload: Sequence[str] = ()
    ) -> AbstractContextManager[None]:
        """Start the machines in advance, so that they import the framework meanwhile.

        `preload` has further modules to import, as in `RunSpec.preload`. Starts none if machines
        run already, which may be waiting for a run, or if capacity is missing.
        """
        has_machines = any(machine.is_alive for machine in self._cloud_dir.machines())
        nodes = 0 if has_machines or self._capacity_refusal(plan.num_nodes) else plan.num_nodes
        return prewarm.warm_machines(
            self._cloud_dir, nodes, [str(plan.slots_per_node), framework, *preload]
        )

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return one offer, with the price of the option `prices`."""
        return _list_offers(self.options, now_s=system.wall_ms() / 1000)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Create the group and start its machines; complete an interrupted submission."""
        group = self._cloud_dir.group(launch.run_id, plan.token)
        with self._cloud_dir.lock():
            if not group.exists:
                if refusal := self._capacity_refusal(plan.num_nodes):
                    return refusal
                group.create([self._assignment(plan, launch, n) for n in range(plan.num_nodes)])
            # Also for an existing group: an earlier call may have ended before it started all.
            for node in group.nodes():
                if node.machine() is None:
                    self._start(node)
        return self._handle(plan, launch)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group whose directory exists."""
        exists = self._cloud_dir.group(launch.run_id, plan.token).exists
        return self._handle(plan, launch) if exists else None

    def _handle(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle:
        name = f"{launch.run_id}/{plan.token}"
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=name,
            detail={"nodes": plan.num_nodes},
            offer=_list_offers(self.options).offers[0].name,
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """Return which processes run. Also removes the directories of ended machines."""
        group = self._group(handle)
        if not group.exists:
            return missing_group_status(handle.detail["nodes"])
        for node in group.nodes():
            machine = node.machine()
            if machine is not None and not machine.is_alive:
                node.mark_stopped()
                self._cloud_dir.remove_machine(machine)
        return GroupStatus(
            nodes=tuple(group.node(n).status() for n in range(handle.detail["nodes"]))
        )

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output file of the node, which is kept until the group is cancelled."""
        group = self._group(handle)
        path = group.node(node).output_path
        if not group.exists or not path.exists():
            return []
        return [MachineOutput(str(path), last_lines(path.read_text(errors="replace"), max_lines))]

    def cancel(self, handle: GroupHandle) -> None:
        """Kill the machines with all their descendants, except the machine of the caller."""
        group = self._group(handle)
        if not group.exists:
            return
        # Locked, so that no machine is started or reassigned to another run in the meantime.
        with self._cloud_dir.lock():
            for node in group.nodes():
                machine = node.machine()
                if machine is not None and machine != processes.current_process():
                    processes.kill_process_tree(machine)
                    self._cloud_dir.remove_machine(machine)
            group.remove()

    def _group(self, handle: GroupHandle) -> LocalGroup:
        run, _, token = handle.name.partition("/")
        return self._cloud_dir.group(RunId(run), Token(token))

    def _capacity_refusal(self, nodes: int) -> Refusal | None:
        override = self._cloud_dir.capacity()
        capacity = self.options.capacity if override is None else override
        if capacity is None:
            return None
        existing = [node for group in self._cloud_dir.groups() for node in group.nodes()]
        free = capacity - sum(not node.status().is_terminated for node in existing)
        if nodes <= free:
            return None
        return Refusal(f"{nodes} nodes were requested; {max(0, free)} of {capacity} are free")

    def _assignment(
        self, plan: GroupPlan, launch: AgentLaunchSpec, number: int
    ) -> Mapping[str, Any]:
        node = self._cloud_dir.group(launch.run_id, plan.token).node(number)
        inherited = machine_pool.inherited_environment()
        environment = {
            **launch.environment_for(plan.token, number, plan.slots_per_node),
            # Its machines are preempted one by one, although they share this computer.
            "SPOTFIT_INSTANCE": f"{plan.token}/{number}",
            **machine_pool.ownership_variables(self._cloud_dir, inherited),
            "SPOTFIT_NOTICES": ",".join(_NOTICE_SOURCES),
            "SPOTFIT_NOTICE_FILE": str(node.notice_path),
            "SPOTFIT_SCRATCH": str(node.scratch_path),
        }
        if self.options.loopback and sys.platform == "linux":
            # Linux accepts all addresses of 127.0.0.0/8 without setup.
            digest = hashlib.sha256(f"{plan.token}/{number}".encode()).digest()
            environment["SPOTFIT_HOST"] = f"127.0.{1 + digest[0] % 254}.{1 + digest[1] % 254}"
        return {
            "environment": environment,
            "agent": self.options.agent,
            "owner": str(machine_pool.owner_process()),
            "digest": machine_pool.environment_digest(inherited),
            "idle_s": self.options.idle_s,
        }

    def _start(self, node: LocalNode) -> None:
        """Assign the node to a prewarmed or waiting machine, or start a new one."""
        # Machines outlive runs, not their owner. A machine cannot dismiss those of its owner.
        owner, environment = machine_pool.owner_process(), machine_pool.inherited_environment()
        if owner == processes.current_process():
            machine_pool.dismiss_at_exit(self._cloud_dir)
        digest = machine_pool.environment_digest(environment)
        if prewarm.assign_warm_machine(node, digest) or machine_pool.assign_waiting_machine(
            node, owner, digest
        ):
            return
        node.renew_assignment()
        machine = processes.start_detached(
            [*prewarm.MACHINE_COMMAND, str(node.path)],
            environment=environment,
            directory=self._cloud_dir.path,
            output=node.output_path,
        )
        # Claimed for the machine, which may not have done so yet: the next observation must not
        # start another one. None: it has ended already, and the node is lost after
        # `START_TIMEOUT_S`.
        if machine is not None:
            node.claim(machine)


def _list_offers(options: LocalOptions, *, now_s: float = 0.0) -> OfferListing:
    """Return the one offer. `now_s` is the time of the given price, since 1970-01-01 UTC."""
    # Without a price it is spot: tests simulate preemptions.
    market = given_market(options.prices, "", default=Market.SPOT)
    offer = own_machine_offer(options.provisioner, options.prices, market, now_s=now_s)
    return own_machine_listing([offer], default=offer.name)


def _check_gpus(slots: int, gpus_per_worker: float) -> None:
    """Raise `ConfigError` if the workers of a node need more GPUs than this machine has."""
    needed, present = slots * gpus_per_worker, len(devices())
    if needed > present:
        raise ConfigError(
            f"Provisioner 'local' runs {slots} workers with {gpus_per_worker:g} GPUs each on one "
            f"node; this machine has {present} GPUs.",
            do="Use fewer workers, ScalingConfig(use_gpu=False) or machines with GPUs. If the "
            "GPUs exist, check that nvidia-smi lists them, or name them in SPOTFIT_DEVICES.",
        )
