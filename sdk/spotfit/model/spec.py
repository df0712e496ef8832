"""`RunSpec`: the immutable configuration of one `fit()`, stored in its `FitStarted` entry."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from spotfit.core.ids import RunId
from spotfit.model.failure_model import MarketPrior
from spotfit.model.offer import Offer


class RunTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and timeouts of a run, in seconds of each machine's own monotonic clock."""

    heartbeat_interval_s: float = 1.0
    """Interval of the heartbeats between an agent and the leader."""
    # Ten missed heartbeats. An agent never waits for the bucket or a cloud API before it sends one
    # (docs/decisions/0023), so only its machine or its network can delay them that long.
    heartbeat_timeout_s: float = 10.0
    """An agent without a message for this time counts as disconnected."""
    # One small object write per 5 s costs about 0.09 USD per day; a crashed leader is usually
    # detected by its closed port long before.
    lease_interval_s: float = 5.0
    """Interval at which the leader renews its lease object in the bucket."""
    # Four missed renewals, so that two slow writes in a row do not depose a healthy leader.
    lease_timeout_s: float = 20.0
    """A lease that does not change for this time has expired."""
    # Upper bound only: the round is closed earlier, as soon as all workers have stopped and the
    # backend has explained all losses.
    failure_settle_s: float = 0.5
    """Time to wait after the first failure of a round for its root cause."""
    stop_timeout_s: float = 10.0
    """Time for killed workers to end before the next round is opened without their node."""
    # A member that connects later is recorded as lost and replaced.
    rejoin_timeout_s: float = 5.0
    """Time for the members of the last round to connect to a new leader."""
    # Clouds notice a lost host within a minute, and report its state up to a minute late.
    restart_report_timeout_s: float = 120.0
    """Time within which a backend that restarts lost machines by itself must have reported the
    restart of one, or its end, before a replacement is requested."""
    # Large accelerator machines take up to 10 minutes to boot and to pull an image.
    boot_timeout_s: float = 900.0
    """A machine that runs without its agent joining for this time counts as lost."""
    # As long as the slowest boots, because some backends report a machine that boots as waiting.
    partial_capacity_timeout_s: float = 900.0
    """Time that machines without a round wait for further ones, up to half of it longer; then all
    are released and requested again (docs/decisions/0053). Also spot machines of a move, while the
    round runs on others (docs/decisions/0084)."""
    # A run whose request is already queued gets the capacity, if clouds grant it within minutes.
    # Doubled for every further release, up to an hour: machines that are granted meanwhile cost
    # money without any training.
    partial_capacity_pause_s: float = 300.0
    """Pause before they are requested again, from half of it to half more."""
    # A round that starts too small waits for a commit to grow, and restarts all workers then, so
    # that waiting for machines that are booting is cheaper.
    round_fill_timeout_s: float = 60.0
    """Time an elastic group with at least `min_workers` waits for further machines."""
    # Cloud APIs limit requests: while all agents are connected, the leader queries ten times less
    # often (`agent.leader`).
    observe_interval_s: float = 2.0
    """Interval at which the provisioner is asked for the status of groups."""
    upload_timeout_s: float = 600.0
    """Longest time to wait for uploads after the round they belong to has ended."""
    # Longer than usual outages of a bucket or network; a reachable leader has replaced the node
    # before.
    orphan_timeout_s: float = 900.0
    """An agent that can reach neither a leader nor the bucket for this time exits, and any process
    of a run whose journal is missing in the bucket for this time."""
    # A leader that has just died is replaced before, because its lease expires (`lease_timeout_s`).
    reach_timeout_s: float = 30.0
    """An agent that never joined exits if a leader that renews its lease does not answer for this
    time."""
    # Agents that are connected to the leader receive copies of the entries instead.
    journal_poll_interval_s: float = 1.0
    """Interval at which processes without a connection to the leader read the journal."""
    validator_wait_timeout_s: float = 300.0
    """Time a validation waits for its own machine before it may run beside the workers."""
    # Deadlines keep slack for it, while starts of machines take minutes.
    decision_interval_s: float = 30.0
    """Longest time until the leader of a run that chooses its offers decides again."""
    # Prices of spot machines change a few times a day.
    price_interval_s: float = 900.0
    """Interval at which the leader of a run that chooses its offers asks for prices."""
    validator_idle_timeout_s: float = 60.0
    """Time a machine for validations is kept while no validation is pending."""


class FailureLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tolerated failures per cause; -1 means no limit. See `FailureConfig`."""

    # The defaults of Ray Train V2: only errors of user code end a run at once.
    worker: int = 0
    platform: int = -1
    preemption: int = -1
    preemption_grace_s: float = 0.0


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints are retained. See `CheckpointConfig`."""

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"


class HangDetectionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of hang detection in seconds; 0 disables a check (docs/decisions/0022)."""

    # A heartbeat thread answers independently of the training function, so this check has no false
    # positives for long steps; ten minutes also tolerate a machine that swaps.
    worker_timeout_s: float = 600.0
    """A worker whose heartbeat thread is silent for this time counts as hung."""
    # Off by default: a hang cannot be distinguished from a long step.
    no_progress_timeout_s: float = 0.0
    """A round without a report, collective or save for this time gets a stack dump."""
    abort_on_hang: bool = False
    """Whether that round is also aborted."""
    # Long because installing the environment and importing frameworks belongs to it.
    start_timeout_s: float = 1800.0
    """A round whose workers have not called the training function by then is retried."""


class ValidationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where validations run, the resources and the default time limit of each."""

    own_machine: bool | None = None
    """True: only on a dedicated machine; False: only beside workers; None: dedicated if
    available."""
    resources: dict[str, float] = {}
    timeout_s: float | None = None
    """Time limit of validations that were requested without one; None: no limit."""


class FeederSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Feeders of the run: processes that transform datasets for the workers. See `data.Feeders`."""

    min_nodes: int = 0
    """Machines for feeders that are rented while the training runs."""
    max_nodes: int = 0
    """Machines that are rented at most, while the workers wait for rows."""
    resources: dict[str, float] = {}
    """Resources of each machine."""
    processes_per_worker: int | None = None
    """Processes beside each worker; None: depends on the processors of its machine."""
    offers: tuple[Offer, ...] = ()
    """The offers of the feeders' own backend, which workers never use; empty without one. Later
    prices are in the journal."""
    networks: tuple[str, ...] = ()
    """The networks of workers in which that backend rents machines; empty: all."""
    usd_per_hour: float | None = None
    """The highest price of a machine when the fit was started; None if it is unknown or was not
    asked for. The budget counts machines at it whose offer is unknown or has no known price."""


class CostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the run may rent, and within which limits. See `RunConfig`."""

    offers: tuple[Offer, ...] = ()
    """What the backend could rent when the fit was started; empty if it was not asked. Later prices
    are in the journal."""
    machines: dict[str, int] = {}
    """How many machines all workers need, by the name of each offer that the leader may choose;
    empty if the backend chooses."""
    deadline_ms: int | None = None
    """When the training is to be finished, by the clock of the storage in milliseconds since 1970;
    None for no deadline."""
    budget_usd: float | None = None
    """Limit of the cost of the run, including that of its earlier fits; None for no limit."""
    uses_on_demand: bool = False
    """Whether on-demand machines may be rented where the deadline requires them."""
    training_time_s: float | None = None
    """The user's estimate of the duration with all workers; once the progress was measured, the
    longer one of both counts. None if there is none."""
    start_time_s: float = 600.0
    """Time from a request for machines to the first step, used until it was measured."""

    @property
    def chooses_offers(self) -> bool:
        """Whether the leader chooses the offer of each request; else the backend chooses."""
        return bool(self.machines)


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one `fit()`: code, group size, machines and limits."""

    run_id: RunId
    name: str
    fit_id: str
    """Digest of the caller's configuration; running the same script again gives the same digest."""
    min_workers: int
    max_workers: int
    is_elastic: bool = False
    resize_interval_s: float = 60.0
    resources_per_worker: dict[str, float] = {}
    failure_limits: FailureLimits = FailureLimits()
    retention: RetentionConfig = RetentionConfig()
    framework: str = "none"
    framework_options: dict[str, Any] = {}
    preload: tuple[str, ...] = ()
    """Modules that fork servers import in addition to those of the framework, such as
    "transformers" or, for packages that import on demand, "transformers.Trainer"."""
    # Plain data: `model` must not import `code`.
    code_bundle: dict[str, Any] = {}
    """`CodeBundleRef` as plain data: object keys of the sealed function, callbacks and code."""
    default_metadata: str = ""
    """Key of the object with the metadata that every checkpoint has by default; '' for none."""
    provisioner: str = "local"
    provisioner_options: dict[str, Any] = {}
    time_budget_s: float | None = None
    """The longest duration of the fit, in all rounds and including waits for machines; None for no
    limit."""
    storage_url: str = ""
    """URL of the run's root directory, as the machines open it."""
    relax_collectives: bool = False
    collective_timeout_s: float | None = None
    collective_warn_interval_s: float = 60.0
    """Interval at which ranks waiting in a collective log which ranks are missing."""
    log_level: str = "INFO"
    has_callbacks: bool = False
    """Whether the code bundle contains callbacks with event methods."""
    has_backend_hooks: bool = False
    """Whether the code bundle contains a backend config with hooks."""
    share_devices: bool = False
    """Whether all workers of a node see all of its accelerators."""
    hang_detection: HangDetectionConfig = HangDetectionConfig()
    # In the spec, because agents, leader and driver must use the same timeouts.
    timing: RunTiming = RunTiming()
    market_prior: MarketPrior = MarketPrior()
    validation: ValidationSpec | None = None
    """None if the trainer has no `ValidationConfig`."""
    cost: CostSpec = CostSpec()
    feeders: FeederSpec | None = None
    """None: the workers transform the datasets."""
