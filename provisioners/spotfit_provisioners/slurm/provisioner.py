"""`SlurmProvisioner`: submit, observe and cancel groups as array jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from spotfit.host import system
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    missing_group_status,
)
from spotfit.provision.api import AccountCheck, MachineOutput, Refusal, Traits, last_lines
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.slurm import checkup, offers, render, states
from spotfit_provisioners.slurm.client import SlurmClient
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.states import SlurmTask


class SlurmProvisioner:
    """A group is one array job whose name is the group's token."""

    name = render.BACKEND
    Options: ClassVar = SlurmOptions

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options
        self._client = SlurmClient()

    @classmethod
    def with_options(cls, **options: Any) -> SlurmProvisioner:
        """Construct from the fields of `SlurmOptions`."""
        return cls(SlurmOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.MAX_NODES,
            notice_s=self.options.grace_s,
            requeues_itself=True,
            observe_interval_s=10.0,
            # One process, slurmctld, answers sbatch, squeue and scontrol from its own memory.
            read_lag_s=0.0,
            notice_sources=("machine", "signal"),
            keeps_output=True,
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return an offer for each partition, with the prices of the option `prices`."""
        return offers.list_offers(self.options, now_s=system.wall_ms() / 1000)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Submit a held array job, and release it if it is the first one of its name.

        Of two concurrent submissions, both see both jobs and cancel the one with the higher id
        before it starts. An interrupted submission is completed by the next call.
        """
        if not (known := self._client.list_tasks_by_name(plan.token)):
            environment = launch.environment_for(
                plan.token, 0, plan.slots_per_node, node_index_variable=render.ARRAY_INDEX_VARIABLE
            )
            own = self._client.submit_held(plan.body["arguments"], plan.body["script"], environment)
            # Known even if squeue does not list the new job yet.
            known = [SlurmTask(own, 0, "PENDING", "JobHeldUser")]
            known += self._client.list_tasks_by_name(plan.token)
        # The lowest id, so that all processes select the same job.
        first = min(task.job_id for task in known)
        for job in {task.job_id for task in known} - {first}:
            self._client.cancel(str(job))
        if any(task.job_id == first and task.reason.startswith("JobHeld") for task in known):
            self._client.release(first)
        return self._handle(plan, first)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the first job whose name is the token, also if it is still held."""
        jobs = [task.job_id for task in self._client.list_tasks_by_name(plan.token)]
        return self._handle(plan, min(jobs)) if jobs else None

    def _handle(self, plan: GroupPlan, job: int) -> GroupHandle:
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=str(job),
            detail={"nodes": plan.num_nodes},
            offer=plan.body.get("offer") or offers.list_offers(self.options).default or "",
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        nodes = int(handle.detail["nodes"])
        tasks = self._client.list_job_tasks(handle.name) if handle.name.isdecimal() else []
        if not tasks:
            return missing_group_status(nodes, "Slurm does not know the job")
        return states.group_status(nodes, tasks)

    def cancel(self, handle: GroupHandle) -> None:
        if handle.name.isdecimal():
            self._client.cancel(handle.name)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the end of the task's output file, which contains all attempts."""
        known = (
            self._client.find_output_path(f"{handle.name}_{node}")
            if handle.name.isdecimal()
            else ""
        )
        # If Slurm has purged the job, its path is derived from the options.
        expected = render.output_path(self.options, handle.token, job=handle.name, node=node)
        path = Path(known or expected)
        if not path.is_file():
            return [MachineOutput(f"{path} (missing on this machine)")]
        return [MachineOutput(str(path), last_lines(path.read_text(errors="replace"), max_lines))]

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check the controller, partitions, accounting, submission and time limits."""
        yield from checkup.check_account(self.options, self._client)
