"""`SkyPilotProvisioner`: submit, observe and cancel groups as managed jobs or clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from spotfit.core.clock import Clock
from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host import log, system
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.provision.api import AccountCheck, MachineOutput, Refusal, Traits, run_check
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.skypilot import offers, render, states
from spotfit_provisioners.skypilot.client import SkyPilotClient
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from spotfit_provisioners.skypilot.states import SkyPilotJob, UsageInterval

_UNKNOWN_MACHINE = NodeStatus(
    state=NodeState.GONE, reason="SkyPilot does not know it", is_known=False
)
# Preemption notices of clouds, in seconds. SkyPilot itself forwards no notices, so machines read
# them from the cloud's metadata service.
_NOTICE_S = {"aws": 120.0, "azure": 30.0, "gcp": 30.0}

_SITES = set(render.ONE_NETWORK)
"""Infrastructures whose machines may mount a shared file system."""

_CLOUD_ALIASES = {"k8s": "kubernetes"}


class SkyPilotProvisioner:
    """A group is one managed job or cluster per machine, named after the group's token."""

    name = render.BACKEND
    Options: ClassVar = SkyPilotOptions

    def __init__(self, options: SkyPilotOptions) -> None:
        self.options = options
        self._clock: Clock = system.SystemClock()
        self._waiting_since_s: dict[Token, float] = {}
        """When each group was first observed to wait for capacity."""
        self._usage: dict[str, UsageInterval] = {}
        """Billing times by cluster."""
        self._usage_known: set[tuple[str, bool]] = set()
        """Clusters whose start, and whose end (True), were asked for."""
        self._client = SkyPilotClient(options.endpoint, request_timeout_s=options.request_timeout_s)

    @classmethod
    def with_options(cls, **options: Any) -> SkyPilotProvisioner:
        """Construct from the fields of `SkyPilotOptions`."""
        return cls(SkyPilotOptions(**options))

    @property
    def traits(self) -> Traits:
        configured = {infra.partition("/")[0] for infra in self.options.infra}
        # Without `infra`, any cloud may be chosen, also one without notices.
        clouds = [cloud for cloud in _NOTICE_S if cloud in configured or not configured]
        all_send_notices = bool(configured) and configured == set(clouds)
        return Traits(
            spot=self.options.spot != "never",
            max_nodes=render.MAX_NODES,
            notice_s=min(_NOTICE_S[cloud] for cloud in clouds) if all_send_notices else 0.0,
            requeues_itself=self.options.launch_mode == "jobs",
            observe_interval_s=20.0,
            # A launch is a background request of SkyPilot's server: its job appears late.
            read_lag_s=60.0,
            notice_sources=("machine", "signal"),
            shared_directories="never" if configured and not configured & _SITES else "possibly",
            keeps_output=True,
        )

    def open_client(self) -> None:
        """Import SkyPilot. Sends no request."""
        self._client.open()

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of each entry of `infra`, with prices of the catalog of this user."""
        return offers.list_offers(request, self.options, now_s=system.wall_ms() / 1000)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Launch the machines that have neither a job or cluster nor a pending request."""
        if plan.body["launch_mode"] == "jobs":
            self._submit_jobs(plan, launch)
        else:
            self._submit_clusters(plan, launch)
        return self._handle(plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group if one of its jobs, clusters or launch requests exists."""
        handle = self._handle(plan)
        names = _node_names(handle)
        if plan.body["launch_mode"] == "jobs":
            # A pending launch has no job yet that could be cancelled.
            launching = self._client.list_launching_jobs()
            for request in filter(None, map(launching.get, names)):
                self._client.wait_for(request)
            is_known = bool(self._client.list_jobs(f"{plan.token}-"))
        else:
            is_known = bool(self._client.cluster_states(names)) or any(
                self._client.list_launches(name) for name in names
            )
        return handle if is_known else None

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        detail = {"nodes": plan.num_nodes, "launch_mode": plan.body["launch_mode"]}
        network, offer = plan.body.get("network", ""), plan.body.get("offer", "")
        if plan.body.get("may_move"):
            detail["may_move"] = True
        if offer:
            detail["has_given_offer"] = True
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=plan.token,
            detail=detail,
            network=network,
            offer=offer or offers.default_offer_name(self.options, network),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        names = _node_names(handle)
        if handle.detail["launch_mode"] == "jobs":
            # The oldest job of each name; others are duplicates.
            oldest = _oldest_by_name(self._client.list_jobs(f"{handle.name}-"))
            jobs = [oldest.get(name) for name in names]
            known = tuple(states.job_status(job) if job else _UNKNOWN_MACHINE for job in jobs)
            reasons = (states.refusal_reason(job) for job in jobs if job)
            refusal = next(filter(None, reasons), "")
            return self._refuse_late(handle, GroupStatus(nodes=known, refusal=refusal))
        up = self._client.cluster_states(names)
        statuses = tuple(
            states.cluster_status(up[name]) if name in up else self._missing_cluster_status(name)
            for name in names
        )
        statuses = self._add_usage(names, statuses)
        reasons = (node.reason for node in statuses if node.state is NodeState.REFUSED)
        return GroupStatus(nodes=statuses, refusal=next(reasons, ""))

    def _refuse_late(self, handle: GroupHandle, status: GroupStatus) -> GroupStatus:
        """Refuse a group that waits in one infrastructure, so that the next offer is tried.

        SkyPilot itself would wait there indefinitely: all machines of the group have to be in one.
        """
        is_waiting = all(node.state is NodeState.WAITING for node in status.nodes)
        has_other = any(one != handle.network for one in self.options.infra)
        # The leader chose the offer, and can choose another one.
        is_bound = not handle.detail.get("has_given_offer") and not (
            has_other and handle.detail.get("may_move")
        )
        if is_bound or not is_waiting or not status.refusal:
            self._waiting_since_s.pop(handle.token, None)
            return status
        now_s = self._clock.now()
        waited_s = now_s - self._waiting_since_s.setdefault(handle.token, now_s)
        if waited_s < self.options.pending_timeout_s:
            return status
        reason = f"{handle.network} has no machines for {waited_s:.0f} s: {status.refusal}"
        refused = NodeStatus(state=NodeState.REFUSED, reason=reason)
        return GroupStatus(nodes=(refused,) * len(status.nodes), refusal=status.refusal)

    def _add_usage(
        self, names: Sequence[str], statuses: tuple[NodeStatus, ...]
    ) -> tuple[NodeStatus, ...]:
        """Add billing times of clusters. Managed jobs have none: only their controller knows them.

        SkyPilot is asked once after the start and once after the end of each machine.
        """
        due = {
            (name, node.is_terminated)
            for name, node in zip(names, statuses, strict=True)
            if node.state is NodeState.RUNNING or (node.is_terminated and node.is_known)
        }
        if due - self._usage_known:
            try:
                self._usage.update(self._client.cluster_usage(names))
                self._usage_known |= due
            # Any error of the client library: the states of the machines are more important.
            except Exception as error:  # noqa: BLE001
                log.warning("skypilot.usage_unknown", reason=str(error))
        return tuple(
            states.with_usage(node, self._usage.get(name))
            for name, node in zip(names, statuses, strict=True)
        )

    def cancel(self, handle: GroupHandle) -> None:
        """Cancel the managed jobs, or abort pending launches and tear down the clusters."""
        if handle.detail["launch_mode"] == "jobs":
            self._cancel_jobs(self._client.list_jobs(f"{handle.name}-"))
            return
        names = _node_names(handle)
        requests = (request for name in names for request in self._client.list_launches(name))
        # Before tearing down: a pending launch would create its cluster afterwards.
        if pending := [request.id for request in requests if request.is_pending]:
            self._client.abort_requests(pending)
        for name in self._client.cluster_states(names):
            self._client.tear_down(name)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output of a managed job's last machine, or of an existing cluster."""
        name = render.node_name(Token(handle.name), node)
        if handle.detail["launch_mode"] == "clusters":
            lines = self._client.read_cluster_log(name, max_lines)
            return [MachineOutput(f"sky logs {name}", lines)] if lines else []
        jobs = [job.id for job in self._client.list_jobs(name) if job.name == name and job.has_log]
        logs = {f"sky jobs logs {job}": self._client.read_job_log(job, max_lines) for job in jobs}
        return [MachineOutput(source, lines) for source, lines in logs.items() if lines]

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check the API server, its access to clouds, and the catalog."""
        answers = run_check("SkyPilot's API server answers", self._client.describe_server)
        yield answers
        if answers.passed:
            yield run_check("SkyPilot has access to a cloud", self._check_clouds)
            yield run_check("the catalog has a matching machine", self._check_catalog)

    def _check_clouds(self) -> str:
        enabled = self._client.list_clouds()
        names = {cloud.lower() for cloud in enabled}
        required = {infra.partition("/")[0].lower() for infra in self.options.infra}
        missing = sorted({_CLOUD_ALIASES.get(cloud, cloud) for cloud in required} - names)
        if not enabled or missing:
            raise ConfigError(
                f"SkyPilot has access to {', '.join(enabled) or 'no cloud'}"
                + (f", but not to {', '.join(missing)}." if missing else "."),
                do="Run `sky check`, which shows what each cloud needs, or correct "
                "SkyPilotOptions(infra=…).",
            )
        return ", ".join(enabled)

    def _check_catalog(self) -> None:
        plan = self.plan(
            GroupRequest(
                token=Token("t-checkup"), num_workers=1, total_workers=1, run_name="checkup"
            )
        )
        self._client.check_catalog(render.task_request(plan, 0, {}))

    # --- managed jobs ------------------------------------------------------------------------

    def _submit_jobs(self, plan: GroupPlan, launch: AgentLaunchSpec) -> None:
        """Launch the missing jobs, and cancel duplicates of concurrent submissions.

        The oldest job of a name is kept. If a launch fails, the jobs that it has created are
        cancelled, because no process would observe them.
        """
        prefix = f"{plan.token}-"
        known = {job.name for job in self._client.list_jobs(prefix)}
        launching = self._client.list_launching_jobs()
        missing = [n for n in range(plan.num_nodes) if render.node_name(plan.token, n) not in known]
        # Before any launch: a request that no machine fits fails here at once.
        if missing:
            self._client.check_catalog(render.task_request(plan, 0, {}))
        # A pending launch has no job yet. Its request is awaited instead of launching another one.
        requests = [
            launching.get(render.node_name(plan.token, node))
            or self._client.launch_job(_launch_task(plan, node, launch))
            for node in missing
        ]
        try:
            for request in requests:
                self._client.wait_for(request)
        except Exception:
            created = [job for job in self._client.list_jobs(prefix) if job.name not in known]
            self._cancel_jobs(created)
            raise
        jobs = self._client.list_jobs(prefix)
        oldest = _oldest_by_name(jobs)
        if duplicates := [job for job in jobs if job.id != oldest[job.name].id]:
            ids = [job.id for job in duplicates]
            log.warning("skypilot.duplicate_jobs_cancelled", token=plan.token, jobs=ids)
            self._cancel_jobs(duplicates)

    def _cancel_jobs(self, jobs: Sequence[SkyPilotJob]) -> None:
        if active := [job.id for job in jobs if not job.is_over]:
            self._client.cancel_jobs(active)

    # --- clusters ----------------------------------------------------------------------------

    def _submit_clusters(self, plan: GroupPlan, launch: AgentLaunchSpec) -> None:
        """Request the missing clusters without waiting, since a launch takes minutes.

        The server serialises launches of the same name. A duplicate launch reuses the cluster, and
        its task exits at once (see `render`).
        """
        names = [render.node_name(plan.token, node) for node in range(plan.num_nodes)]
        missing = [node for node, name in enumerate(names) if not self._client.list_launches(name)]
        if missing:
            self._client.check_catalog(render.task_request(plan, 0, {}))
        for node in missing:
            self._client.launch_cluster(_launch_task(plan, node, launch))

    def _missing_cluster_status(self, name: str) -> NodeStatus:
        """Return the status of a machine whose cluster does not exist (yet)."""
        launches = self._client.list_launches(name)
        if not launches:
            return _UNKNOWN_MACHINE
        last = launches[0]
        if last.state != "FAILED":
            return states.launch_status(last.state)
        failure = self._client.find_failure(last.id)
        return states.launch_status(
            last.state, failure.reason, is_capacity_error=failure.is_capacity_error
        )


def _launch_task(plan: GroupPlan, node: int, launch: AgentLaunchSpec) -> dict[str, Any]:
    return render.task_request(
        plan, node, launch.environment_for(plan.token, node, plan.slots_per_node)
    )


def _node_names(handle: GroupHandle) -> list[str]:
    token = Token(handle.name)
    return [render.node_name(token, node) for node in range(int(handle.detail["nodes"]))]


def _oldest_by_name(jobs: Sequence[SkyPilotJob]) -> dict[str, SkyPilotJob]:
    # The jobs are sorted by age; the last assignment of a name is the oldest one.
    return {job.name: job for job in reversed(jobs)}
