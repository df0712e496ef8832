"""`AwsBatchProvisioner`: submit, observe and cancel groups as AWS Batch jobs.

State of the queues, per provisioner object:

    state      | event                                                  | next
    -----------|--------------------------------------------------------|----------
    usable     | a group, or a part of one, waited longer than          | exhausted
               | pending_timeout_s in it                                |
    exhausted  | a waiting group starts to run, in any queue            | usable
    exhausted  | all queues are exhausted: the last one is used         | exhausted

A group that requests an offer is submitted to the queue of the offer, whatever its state is, and
refused after pending_timeout_s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from msgspec import structs

from spotfit.core.clock import Clock
from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.host import log, system
from spotfit.host.system import SystemClock
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.model.offer import Market
from spotfit.provision.api import AccountCheck, MachineOutput, Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, offer_name
from spotfit_provisioners.aws_batch import checkup, environments, offers, render, states
from spotfit_provisioners.aws_batch.client import (
    AwsAccountClient,
    AwsBatchClient,
    configured_region,
    lowest_spot_price_usd,
    spot_placement_scores,
)
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.prices.cache import PriceCache

_UNKNOWN_JOB = NodeStatus(
    state=NodeState.GONE, reason="AWS Batch does not know the job", is_known=False
)
_ENDED_STATES = ("SUCCEEDED", "FAILED")
_TERMINATION_REASON = "released by spotfit"


class AwsBatchProvisioner:
    """A group is one job named after its token; an array job has one child per machine."""

    name = render.BACKEND
    Options: ClassVar = AwsBatchOptions

    def __init__(self, options: AwsBatchOptions, clock: Clock | None = None) -> None:
        self.options = options
        self._exhausted_queues: set[tuple[str, str]] = set()
        """Region and name of queues that have exceeded `pending_timeout_s`."""
        self._markets: dict[tuple[str, str], Market | None] = {}
        """Market of the machines of each queue, by region and name; None if it has several."""
        self._clock = clock or SystemClock()
        self._prices = PriceCache()
        self._first_observed_at: dict[str, float] = {}
        self._checked_tokens: set[str] = set()
        """Groups whose duplicates were looked for after `Traits.read_lag_s`."""
        self._waiting_tokens: set[str] = set()
        """Groups observed as waiting. Only their start proves that a queue has capacity again."""

    @classmethod
    def with_options(cls, **options: Any) -> AwsBatchProvisioner:
        """Construct from the fields of `AwsBatchOptions`."""
        return cls(AwsBatchOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.MAX_NODES,
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
            notice_s=120.0,
            requeues_itself=self.options.attempts > 1,
            observe_interval_s=10.0,
            # Nothing promises that ListJobs and DescribeJobs show a job that SubmitJob has created;
            # users have seen that they do not: https://github.com/Netflix/metaflow/pull/543,
            # https://github.com/apache/airflow/pull/37552
            read_lag_s=60.0,
            notice_sources=("aws", "signal"),
            shared_directories="never",
            keeps_output=True,
            software=images.parse_image_software(self.options.image),
        )

    @staticmethod
    def resolve_defaults(options: AwsBatchOptions) -> AwsBatchOptions:
        """Return the options with the region of this process, for queues that have none."""
        if options.region or all(_parse_queue(queue)[0] for queue in _all_queues(options)):
            return options
        return replace(options, region=configured_region())

    def open_client(self) -> None:
        """Import boto3 and check that each queue has a region. Sends no request."""
        for queue in _all_queues(self.options):
            self._resolve_queue(queue)

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Submit the job, or return the group of an earlier submission.

        Of two concurrent submissions, the older job is kept and the other one terminated.
        """
        # A repeated call finds the job of the first one by its name, which is the token.
        handle = self.find_group(plan, launch)
        if handle is not None:
            return handle
        # If all queues are exhausted, the last one is used: the job waits there for capacity.
        usable = self._queues_in(plan.body.get("region", ""), plan.body["queues"])
        if not usable:
            return Refusal(
                f"no queue is in region {plan.body['region']}, as the run's machines are"
            )
        queues = self._order_queues(usable, plan.num_nodes)
        queue = next((queue for queue in queues if not self._is_exhausted(queue)), queues[-1])
        client, name = self._resolve_queue(queue)
        self._granted_offer(plan, queue)  # may raise an error, hence before the submission
        environment = launch.environment_for(
            plan.token,
            0,
            plan.slots_per_node,
            node_index_variable=render.ARRAY_INDEX_VARIABLE if plan.num_nodes > 1 else "",
        )
        # The environment contains the run key, so it is passed as an override: job definitions are
        # kept indefinitely, and shared by the runs of equal requests.
        definition = client.register_definition(plan.body["definition"])
        job_id = client.submit_job(
            render.job_request(
                plan,
                queue=name,
                definition=definition,
                environment=environment,
                share=self.options.share_identifier,
            )
        )
        own = self._handle(plan, queue, job_id=job_id)
        return self._keep_oldest(plan, launch, own)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the oldest job whose name is the token, in any queue."""
        # In all queues: an earlier process may have selected another one than this process would.
        for queue in dict.fromkeys([*plan.body["queues"], *_all_queues(self.options)]):
            client, name = self._resolve_queue(queue)
            jobs = client.list_jobs_by_name(name, plan.token)
            if jobs:
                return self._handle(plan, queue, job_id=jobs[0]["jobId"])
        return None

    def _handle(self, plan: GroupPlan, queue: str, *, job_id: str) -> GroupHandle:
        client, name = self._resolve_queue(queue)
        detail = {"nodes": plan.num_nodes, "region": client.region, "queue": name}
        if "region" in plan.body:
            detail["must_stay"] = True
        if "offer" in plan.body:
            detail["has_offer"] = True
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=job_id,
            detail=detail,
            network=client.region,
            offer=self._granted_offer(plan, queue),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        client = self._client_of(handle)
        nodes = int(handle.detail["nodes"])
        ids = render.child_job_ids(handle.name, nodes)
        descriptions = client.describe_jobs(ids)
        found = [descriptions.get(job_id) for job_id in ids]
        # Batch creates the children of an array job some time after its submission, and reads may
        # show only a part of them. Until then the parent stands for them.
        if not all(found) and nodes > 1:
            parent = client.describe_jobs([handle.name]).get(handle.name)
            found = [job or parent for job in found]
        if any(found):
            self._terminate_duplicates(handle)
        statuses = tuple(states.node_status(job) if job else _UNKNOWN_JOB for job in found)
        jobs = [job for job in found if job]
        timeout_s, now_ms = self.options.pending_timeout_s, system.wall_ms()
        reasons = (
            states.pending_reason(job, now_ms=now_ms, pending_timeout_s=timeout_s) for job in jobs
        )
        refusal = next(filter(None, reasons), "")
        waited_s = states.longest_runnable_s(jobs, now_ms=now_ms)
        has_waited = waited_s > 0 and waited_s >= timeout_s
        # Batch gives a reason only for the first job of a queue.
        if has_waited and not refusal:
            refusal = f"no machine for {waited_s:.0f} s; AWS Batch gives no reason"
        if all(status.state is NodeState.WAITING for status in statuses):
            self._waiting_tokens.add(handle.token)
            # Machines that boot are kept, as those that run.
            if has_waited and not any(job["status"] == "STARTING" for job in jobs):
                return self._try_next_queue(handle, statuses, refusal)
            return GroupStatus(nodes=statuses, refusal=refusal)
        has_started = any(status.state is NodeState.RUNNING for status in statuses)
        # A group that this object never saw waiting may have started long ago. The start of one
        # with an offer proves nothing about the other queues.
        if (
            has_started
            and handle.token in self._waiting_tokens
            and not handle.detail.get("has_offer")
        ):
            self._exhausted_queues.clear()
        self._waiting_tokens.discard(handle.token)
        # Children that run are kept; the machines that the run requests next are in another queue.
        if has_waited:
            self._exhausted_queues.add((handle.detail["region"], handle.detail["queue"]))
        return GroupStatus(nodes=statuses, refusal=refusal)

    def _try_next_queue(
        self, handle: GroupHandle, waiting: tuple[NodeStatus, ...], reason: str
    ) -> GroupStatus:
        """Refuse the group if another queue has not been tried; otherwise keep it waiting."""
        self._exhausted_queues.add((handle.detail["region"], handle.detail["queue"]))
        queue = handle.detail["queue"]
        if handle.detail.get("has_offer"):
            text = f"queue {queue} has no capacity for the requested offer ({reason})"
            return _refused(waiting, text, refusal=reason)
        # Machines of the run stand in this region, and those of another one could not reach them.
        region = handle.detail["region"] if handle.detail.get("must_stay") else ""
        queues = self._queues_in(region, self.options.queues)
        untried = [queue for queue in queues if not self._is_exhausted(queue)]
        # A queue starts the job as soon as it has capacity, so staying costs nothing.
        if not untried:
            return GroupStatus(nodes=waiting, refusal=reason)
        text = f"queue {queue} has no capacity ({reason}); the next queue is {untried[0]}"
        return _refused(waiting, text, refusal=reason)

    def _is_exhausted(self, queue: str) -> bool:
        client, name = self._resolve_queue(queue)
        return (client.region, name) in self._exhausted_queues

    def cancel(self, handle: GroupHandle) -> None:
        """Terminate the job; terminating an array job terminates its children."""
        # SIGTERM, and SIGKILL after the stop timeout of ECS, by default 30 s.
        client = self._client_of(handle)
        job = client.describe_jobs([handle.name]).get(handle.name)
        if job is None:
            # Either Batch has deleted its record, or does not show it yet.
            client.terminate_job_if_known(handle.name, _TERMINATION_REASON)
        elif job["status"] not in _ENDED_STATES:
            client.terminate_job(handle.name, _TERMINATION_REASON)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output of every attempt from CloudWatch, which lags by some seconds."""
        region = handle.detail["region"]
        job_id = render.child_job_ids(handle.name, int(handle.detail["nodes"]))[node]
        job = _client_for_region(region, self.options.endpoint).describe_jobs([job_id]).get(job_id)
        account = AwsAccountClient(region, self.options.endpoint)
        return [
            MachineOutput(
                f"attempt {number}, {self.options.log_group} {stream}",
                tuple(account.read_log(self.options.log_group, stream, max_lines)),
            )
            for number, stream in enumerate(states.log_streams(job or {}), 1)
        ]

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check credentials, queues, permissions, roles, logs and the image."""
        yield from checkup.check_account(self.options, storage, self._resolve_queue)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of the queues; the size of the request does not matter."""

        def region_of(queue: str) -> str:
            return self._resolve_queue(queue)[0].region

        return offers.list_offers(self.options, self._prices, region_of)

    # --- queues ------------------------------------------------------------------------------

    def _order_queues(self, queues: list[str], node_count: int) -> list[str]:
        """Sort the queues according to `queue_order`; prices and scores are per region."""
        types, endpoint = self.options.instance_types, self.options.endpoint
        region_of = {queue: self._resolve_queue(queue)[0].region for queue in queues}
        regions = list(dict.fromkeys(region_of.values()))
        if self.options.queue_order == "given" or len(regions) == 1:
            return queues
        if self.options.queue_order == "price":
            prices = {region: lowest_spot_price_usd(region, types, endpoint) for region in regions}
            return sorted(queues, key=lambda queue: prices[region_of[queue]])
        scores = spot_placement_scores(regions, types, node_count, endpoint)
        return sorted(queues, key=lambda queue: -scores.get(region_of[queue], 0))

    def _queues_in(self, region: str, queues: Sequence[str]) -> list[str]:
        """Return the queues in that region, or all for ''."""
        return [one for one in queues if region in ("", self._resolve_queue(one)[0].region)]

    def _market(self, queue: str) -> Market | None:
        """Return the market of an entry of the options; None if its machines are of several."""
        client, name = self._resolve_queue(queue)
        key = (client.region, name)
        if key not in self._markets:
            declared = Market.ON_DEMAND if queue in self.options.on_demand_queues else Market.SPOT
            try:
                types = client.environment_types(name)
            except ProvisionPermissionError:
                types = frozenset()
            self._markets[key] = environments.market_of(types, declared)
        return self._markets[key]

    def _granted_offer(self, plan: GroupPlan, queue: str) -> str:
        """Return the name of the offer of the queue; '' if its machines are on several markets.

        Raises `ConfigError` if they are on another market than the requested offer.
        """
        client, name = self._resolve_queue(queue)
        market, requested = self._market(queue), plan.body.get("offer")
        if market is None:
            return ""
        if requested is None or queue not in plan.body["queues"]:
            return offer_name(self.name, market, client.region, queue)
        if requested["market"] != market:
            raise ConfigError(
                f"The offer {requested['name']} cannot be rented: the compute environments of the "
                f"job queue {name!r} have {market.value} machines.",
                do="Use AwsBatchOptions(queues=…) for queues with environments of type SPOT, and "
                "on_demand_queues for those with environments of type EC2.",
            )
        return str(requested["name"])

    def _resolve_queue(self, queue: str) -> tuple[AwsBatchClient, str]:
        """Return the client of the queue's region, and the queue's name without the region."""
        region, name = _parse_queue(queue)
        return _client_for_region(region or self.options.region, self.options.endpoint), name

    def _keep_oldest(
        self, plan: GroupPlan, launch: AgentLaunchSpec, own: GroupHandle
    ) -> GroupHandle:
        """Return the group to keep of those with the token; terminate `own` if it is another one.

        Needed because `submit_job` has no idempotency token, so two concurrent submissions create
        two jobs. Every process keeps the oldest job of the first listed queue. The lookup may not
        show the own job yet, whose id Batch has returned: it counts as the youngest then.
        """
        oldest = self.find_group(plan, launch)
        if oldest is None or oldest.name == own.name:
            return own
        self._terminate_duplicate(self._client_of(own), plan.token, own.name)
        return oldest

    def _terminate_duplicates(self, handle: GroupHandle) -> None:
        """Terminate other jobs of the token, once, when the lookup shows every one of them.

        The handle is that of the journal: no process manages the machines of the others.
        """
        first_observed_at = self._first_observed_at.setdefault(handle.token, self._clock.now())
        is_due = self._clock.now() - first_observed_at >= self.traits.read_lag_s
        if not is_due or handle.token in self._checked_tokens:
            return
        self._checked_tokens.add(handle.token)
        jobs = [
            (client, job)
            for queue in _all_queues(self.options)
            for client, name in [self._resolve_queue(queue)]
            for job in client.list_jobs_by_name(name, handle.token)
        ]
        for client, job in jobs:
            if job["jobId"] != handle.name and job["status"] not in _ENDED_STATES:
                self._terminate_duplicate(client, handle.token, job["jobId"])

    def _terminate_duplicate(self, client: AwsBatchClient, token: str, job_id: str) -> None:
        log.warning("aws_batch.duplicate_job_terminated", token=token, job=job_id)
        client.terminate_job(job_id, "duplicate of a concurrent submission; another job is kept")

    def _client_of(self, handle: GroupHandle) -> AwsBatchClient:
        return _client_for_region(handle.detail["region"], self.options.endpoint)


def _refused(waiting: tuple[NodeStatus, ...], reason: str, *, refusal: str) -> GroupStatus:
    # With the times of an attempt that has ended: it was billed.
    nodes = tuple(structs.replace(one, state=NodeState.REFUSED, reason=reason) for one in waiting)
    return GroupStatus(nodes=nodes, refusal=refusal)


def _all_queues(options: AwsBatchOptions) -> tuple[str, ...]:
    return (*options.queues, *options.on_demand_queues)


def _parse_queue(queue: str) -> tuple[str, str]:
    """Return region and name of 'spot', 'eu-west-1:spot' or an ARN; region '' is the default."""
    if queue.startswith("arn:"):
        return queue.split(":")[3], queue  # arn:partition:service:region:account:resource
    region, _, name = queue.rpartition(":")
    return region, name


# Cached for the process: creating a boto3 client loads the service's model, which is slow.
@cache
def _client_for_region(region: str, endpoint: str) -> AwsBatchClient:
    return AwsBatchClient(region, endpoint)
