"""The four verbs on Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, gone
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said, tail
from spotfit_provisioners.slurm import checkup, render, states
from spotfit_provisioners.slurm.client import Slurm
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.states import Task


class SlurmProvisioner:
    """A group is one array job; its name is the group's token."""

    name = render.BACKEND
    Options: ClassVar = SlurmOptions

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options
        self._slurm = Slurm()

    @classmethod
    def with_options(cls, **options: Any) -> SlurmProvisioner:
        """From the fields of `SlurmOptions`."""
        return cls(SlurmOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.MAX_NODES,
            notice_s=self.options.grace_s,
            requeues_itself=True,
            observe_s=10.0,
            notices=("machine", "signal"),
            keeps_output=True,
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Submitted held, and released once it is the first of its name.

        Of two who ask at the same time both see both arrays: the one with the higher number
        goes, before it has begun. Who was stopped in between is helped by whoever asks next.
        """
        if not (known := self._slurm.tasks_named(plan.token)):
            environment = launch.environment(
                plan.token, 0, plan.slots, node_from=render.ARRAY_INDEX
            )
            own = self._slurm.submit(plan.body["arguments"], plan.body["script"], environment)
            known = [Task(own, 0, "PENDING", "JobHeldUser")]
            known += self._slurm.tasks_named(plan.token)
        first = min(task.job for task in known)
        for job in {task.job for task in known} - {first}:
            self._slurm.cancel(str(job))
        if any(task.job == first and task.reason.startswith("JobHeld") for task in known):
            self._slurm.release(first)
        return GroupHandle(plan.token, self.name, str(first), {"nodes": plan.nodes})

    def observe(self, handle: GroupHandle) -> GroupStatus:
        nodes = int(handle.detail["nodes"])
        tasks = self._slurm.tasks_of(handle.name) if handle.name.isdecimal() else []
        if not tasks:
            return gone(nodes, "Slurm knows no such job")
        return states.group(nodes, tasks)

    def cancel(self, handle: GroupHandle) -> None:
        if handle.name.isdecimal():
            self._slurm.cancel(handle.name)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """From the task's output file, all its lives one after the other, where this machine sees
        it; where Slurm has forgotten the job, at the place that the options name."""
        told = self._slurm.output_of(f"{handle.name}_{node}") if handle.name.isdecimal() else ""
        path = Path(told or render.output(self.options, handle.token, handle.name, node))
        if not path.is_file():
            return [Said(f"{path}, which is not on this machine")]
        return [Said(str(path), tail(path.read_text(errors="replace"), last))]

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """The controller, the partitions, who is charged, what it would say to a job of one task,
        what becomes of preempted ones, its patience, and the folder."""
        yield from checkup.examine(self.options, self._slurm)
