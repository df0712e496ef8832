"""The four verbs on Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, gone
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding, look
from spotfit.provision.launch import Launch
from spotfit_provisioners.slurm import render, states
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
            notices=("signal",),
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

    def examine(self) -> Iterator[Finding]:
        """The controller, what it would say to a job of one task, and its patience."""
        answers = look(
            "the controller answers",
            lambda: self._slurm.settings()["ClusterName"],
            do="`scontrol ping` says which controllers there are.",
        )
        yield answers
        if answers.well:
            yield look("a task would be taken", self._try)
            yield look("tasks are left the time that they count on", self._check_patience)

    def _try(self) -> str:
        plan = self.plan(GroupRequest(Token("t-checkup"), 1, 1, run_name="checkup"))
        return self._slurm.would_take(plan.body["arguments"], plan.body["script"])

    def _check_patience(self) -> str:
        settings = self._slurm.settings()
        wait_s = float(settings["KillWait"].split()[0])
        if wait_s < self.options.grace_s:
            raise ConfigError(
                f"Slurm kills {wait_s:.0f} s after SIGTERM, and grace_s is "
                f"{self.options.grace_s:.0f}.",
                do=f"Set SlurmOptions(grace_s={wait_s:.0f}).",
            )
        early = "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
        return f"KillWait {wait_s:.0f} s" + ("; preemption is announced" if early else "")
