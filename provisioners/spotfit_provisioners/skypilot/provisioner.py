"""The four verbs on SkyPilot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding, look
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said
from spotfit_provisioners.skypilot import render, states
from spotfit_provisioners.skypilot.client import SkyClient
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from spotfit_provisioners.skypilot.states import Job

_FORGOTTEN = NodeStatus(NodeState.GONE, "SkyPilot does not remember it")
_NOTICE_S = {"aws": 120.0, "azure": 30.0, "gcp": 30.0}
"""Clouds whose machines hear of their end in time: SkyPilot itself passes no notice on."""

_FULL_NAMES = {"k8s": "kubernetes"}


class SkyPilotProvisioner:
    """A group is one job or cluster for each machine, named after the group's token."""

    name = render.BACKEND
    Options: ClassVar = SkyPilotOptions

    def __init__(self, options: SkyPilotOptions) -> None:
        self.options = options
        self._client = SkyClient(options.endpoint, patience_s=options.patience_s)

    @classmethod
    def with_options(cls, **options: Any) -> SkyPilotProvisioner:
        """From the fields of `SkyPilotOptions`."""
        return cls(SkyPilotOptions(**options))

    @property
    def traits(self) -> Traits:
        told = {infra.partition("/")[0] for infra in self.options.infra}
        clouds = [cloud for cloud in _NOTICE_S if cloud in told or not told]
        everywhere = bool(told) and told == set(clouds)
        return Traits(
            spot=self.options.spot != "never",
            max_nodes=render.MAX_NODES,
            notice_s=min(_NOTICE_S[cloud] for cloud in clouds) if everywhere else 0.0,
            requeues_itself=self.options.via == "jobs",
            observe_s=20.0,
            notices=("machine", "signal"),
            keeps_output=True,
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Look for what has that token's names first, and for requests that are under way."""
        if plan.body["via"] == "jobs":
            self._submit_jobs(plan, launch)
        else:
            self._submit_clusters(plan, launch)
        detail = {"nodes": plan.nodes, "via": plan.body["via"]}
        return GroupHandle(plan.token, self.name, plan.token, detail)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        names = _names(handle)
        if handle.detail["via"] == "jobs":
            return _told_of_jobs(names, self._client.jobs(f"{handle.name}-"))
        up = self._client.clusters(names)
        statuses = tuple(
            states.cluster(up[name]) if name in up else self._absent(name) for name in names
        )
        return GroupStatus(statuses, _no_room(statuses))

    def cancel(self, handle: GroupHandle) -> None:
        """Jobs are cancelled and their machines go; clusters are taken down."""
        if handle.detail["via"] == "jobs":
            self._cancel(self._client.jobs(f"{handle.name}-"))
            return
        names = _names(handle)
        requests = (one for name in names for one in self._client.launches(name))
        if under_way := [one.id for one in requests if one.under_way]:
            self._client.abort(under_way)
        for name in self._client.clusters(names):
            self._client.take_down(name)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """A managed job's by its controller, which keeps those of the last machine it had; a
        cluster's as long as it is there."""
        name = render.name(Token(handle.name), node)
        if handle.detail["via"] == "clusters":
            lines = self._client.printed_by_cluster(name, last)
            return [Said(f"sky logs {name}", lines)] if lines else []
        jobs = [job.id for job in self._client.jobs(name) if job.name == name and job.tells]
        told = {f"sky jobs logs {job}": self._client.printed_by_job(job, last) for job in jobs}
        return [Said(where, lines) for where, lines in told.items() if lines]

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """The API server, the clouds it has access to, and whether any has such a machine."""
        answers = look("SkyPilot's API server answers", self._client.server)
        yield answers
        if answers.well:
            yield look("SkyPilot has access to a cloud", self._check_clouds)
            yield look("a machine of this kind is in its catalog", self._try)

    def _check_clouds(self) -> str:
        enabled = self._client.clouds()
        known = {cloud.lower() for cloud in enabled}
        wanted = {infra.partition("/")[0].lower() for infra in self.options.infra}
        missing = sorted({_FULL_NAMES.get(cloud, cloud) for cloud in wanted} - known)
        if not enabled or missing:
            raise ConfigError(
                f"It has access to {', '.join(enabled) or 'none'}"
                + (f", and not to {', '.join(missing)}." if missing else "."),
                do="`sky check` says what each cloud still needs.",
            )
        return ", ".join(enabled)

    def _try(self) -> None:
        plan = self.plan(GroupRequest(Token("t-checkup"), 1, 1, run_name="checkup"))
        self._client.would_take(render.task(plan, 0, {}))

    # --- managed jobs ------------------------------------------------------------------------

    def _submit_jobs(self, plan: GroupPlan, launch: Launch) -> None:
        """Two who asked at the same time have launched two of a name: the older one stays.

        A launch that fails half-way leaves a job that nobody looks after: it is cancelled, and
        found to be over when the group is asked for again.
        """
        prefix = f"{plan.token}-"
        known = {job.name for job in self._client.jobs(prefix)}
        under_way = self._client.launching_jobs()
        missing = [n for n in range(plan.nodes) if render.name(plan.token, n) not in known]
        if missing:
            self._client.would_take(render.task(plan, 0, {}))
        requests = [
            under_way.get(render.name(plan.token, node))
            or self._client.launch_job(_task(plan, node, launch))
            for node in missing
        ]
        try:
            for request in requests:
                self._client.wait(request)
        except Exception:
            self._cancel([job for job in self._client.jobs(prefix) if job.name not in known])
            raise
        younger = _younger(self._client.jobs(prefix))
        if younger:
            log.warning("skypilot.twice", token=plan.token, jobs=[job.id for job in younger])
            self._cancel(younger)

    def _cancel(self, jobs: Sequence[Job]) -> None:
        if going := [job.id for job in jobs if not job.over]:
            self._client.cancel_jobs(going)

    # --- clusters ----------------------------------------------------------------------------

    def _submit_clusters(self, plan: GroupPlan, launch: Launch) -> None:
        """A launch takes as long as a machine takes to come, and is not waited for.

        The server does one after the other of a name; the second would find the machine there, and
        its task finds that the first has begun.
        """
        names = [render.name(plan.token, node) for node in range(plan.nodes)]
        missing = [node for node, name in enumerate(names) if not self._client.launches(name)]
        if missing:
            self._client.would_take(render.task(plan, 0, {}))
        for node in missing:
            self._client.launch_cluster(_task(plan, node, launch))

    def _absent(self, name: str) -> NodeStatus:
        """A machine whose cluster is not there (yet)."""
        launches = self._client.launches(name)
        if not launches:
            return _FORGOTTEN
        last = launches[0]
        if last.state != "FAILED":
            return states.launch(last.state)
        failure = self._client.why_failed(last.id)
        return states.launch(last.state, failure.why, no_room=failure.no_room)


def _task(plan: GroupPlan, node: int, launch: Launch) -> dict[str, Any]:
    return render.task(plan, node, launch.environment(plan.token, node, plan.slots))


def _names(handle: GroupHandle) -> list[str]:
    token = Token(handle.name)
    return [render.name(token, node) for node in range(int(handle.detail["nodes"]))]


def _told_of_jobs(names: Sequence[str], jobs: Sequence[Job]) -> GroupStatus:
    """Of two jobs of a name the older one counts: the other is on its way out."""
    oldest: dict[str, Job] = {}
    for job in jobs:
        oldest.setdefault(job.name, job)
    found = [oldest.get(name) for name in names]
    statuses = tuple(states.job(job) if job else _FORGOTTEN for job in found)
    return GroupStatus(statuses, next(filter(None, (states.refusal(j) for j in found if j)), ""))


def _younger(jobs: Sequence[Job]) -> list[Job]:
    """All but the oldest of each name."""
    seen: set[str] = set()
    younger = []
    for job in jobs:
        if job.name in seen:
            younger.append(job)
        seen.add(job.name)
    return younger


def _no_room(statuses: Sequence[NodeStatus]) -> str:
    """Why no cluster came, where no place had one."""
    told = (node.reason for node in statuses if node.state is NodeState.REFUSED)
    return next(told, "")
