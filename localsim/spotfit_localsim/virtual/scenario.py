"""The configuration of a simulation: workload, market, faults and scheduled events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spotfit.model.spec import (
    CostSpec,
    FailureLimits,
    FeederSpec,
    HangDetectionConfig,
    RetentionConfig,
    RunTiming,
)
from spotfit_localsim.virtual.cost_invariants import CostBounds
from spotfit_localsim.virtual.faults import NO_FAULTS, FaultConfig, FloatRange
from spotfit_localsim.virtual.market import SimMarketConfig
from spotfit_localsim.virtual.workload import Workload


@dataclass(frozen=True, slots=True)
class AtTime:
    """Triggers a number of seconds after the start."""

    after_s: float


@dataclass(frozen=True, slots=True)
class AtStep:
    """Triggers when the training first reaches the step."""

    step: int


@dataclass(frozen=True, slots=True)
class AtNetworkChange:
    """Triggers a number of seconds after a leader of another network was elected; only once."""

    after_s: float
    number: int = 1
    """Counts the changes of the run, from 1; the first leader is none."""


@dataclass(frozen=True, slots=True)
class AtMoveClosed:
    """Triggers a number of seconds after a round was closed to move to other machines; once."""

    after_s: float
    number: int = 1
    """Counts the moves of the run, from 1."""


Trigger = AtTime | AtStep | AtNetworkChange | AtMoveClosed
TargetSelector = Literal["leader", "follower", "any", "all"]


@dataclass(frozen=True, slots=True)
class ReclaimMachine:
    """Preempt machines."""

    trigger: Trigger
    target: TargetSelector = "any"
    with_notice: bool = False


@dataclass(frozen=True, slots=True)
class FreezeAgent:
    """Suspend agent processes; they do not notice it."""

    trigger: Trigger
    duration_s: float
    target: TargetSelector = "leader"


@dataclass(frozen=True, slots=True)
class CrashAgent:
    """Kill agent processes, and terminate their machines."""

    trigger: Trigger
    target: TargetSelector = "leader"


@dataclass(frozen=True, slots=True)
class KillForMemory:
    """Kill machines because their processes exceed the memory limit of their container."""

    trigger: Trigger
    target: TargetSelector = "any"


@dataclass(frozen=True, slots=True)
class RaiseInAgent:
    """Let agents raise an exception, an error in spotfit: they store it and exit."""

    trigger: Trigger
    target: TargetSelector = "leader"
    interval_s: float | None = None
    """If set, it is repeated at this interval until the run ends."""


@dataclass(frozen=True, slots=True)
class IsolateHost:
    """Cut machines off from the other machines in one or both directions; the bucket stays
    reachable."""

    trigger: Trigger
    duration_s: float
    target: TargetSelector = "leader"
    blocks_outbound: bool = True
    blocks_inbound: bool = True


@dataclass(frozen=True, slots=True)
class CancelRun:
    """Cancel the run."""

    trigger: Trigger


@dataclass(frozen=True, slots=True)
class InvalidCredentials:
    """Let the cloud reject the credentials of every call for `duration_s`."""

    trigger: Trigger
    duration_s: float


@dataclass(frozen=True, slots=True)
class BucketOutage:
    """Fail all store requests for `duration_s`."""

    trigger: Trigger
    duration_s: float


@dataclass(frozen=True, slots=True)
class BucketStall:
    """Let all store requests hang for `duration_s`."""

    trigger: Trigger
    duration_s: float


ScenarioEvent = (
    ReclaimMachine
    | FreezeAgent
    | CrashAgent
    | KillForMemory
    | RaiseInAgent
    | IsolateHost
    | CancelRun
    | InvalidCredentials
    | BucketOutage
    | BucketStall
)


@dataclass(frozen=True, slots=True)
class SimNetworkConfig:
    """The network between the machines."""

    is_firewalled: bool = False
    """Whether a firewall drops all packets between machines, also after `faults_duration_s`."""
    latency_s: FloatRange = (0.0005, 0.003)
    resets_per_hour: float = 0.0
    """Rate at which a connection is reset."""
    partitions_per_hour: float = 0.0
    """Rate at which a machine is cut off from the others."""
    partition_s: FloatRange = (1.0, 30.0)


@dataclass(frozen=True, slots=True)
class LaptopConfig:
    """The machine on which `fit()` was called."""

    dies_at_s: float | None = None
    sweep_interval_s: float | None = 90.0
    """Interval of the sweep commands once the laptop is off; None for no sweeps."""
    sweep_duration_s: float = 45.0
    """Duration of each sweep."""
    sweeps_from_start: bool = False
    """Whether sweeps run from the start, concurrently with the laptop."""


@dataclass(frozen=True, slots=True)
class NextFit:
    """A second `fit()` of the run on another cloud, which starts once the first one has ended."""

    called_at_s: float
    """When another laptop calls it."""
    provisioner: str = "sim-b"
    num_workers: int | None = None
    """None for the number of the first fit."""


@dataclass(frozen=True)
class Scenario:
    """A simulation setup; everything that it leaves open is drawn from the seed."""

    name: str
    num_workers: int = 4
    min_workers: int | None = None
    """Makes the group elastic."""
    slots_per_machine: int = 2
    """Workers per machine."""
    resize_interval_s: float = 20.0
    workload: Workload = field(default_factory=Workload)
    market: SimMarketConfig = field(default_factory=SimMarketConfig)
    faults: FaultConfig = NO_FAULTS
    network: SimNetworkConfig = field(default_factory=SimNetworkConfig)
    failure_limits: FailureLimits = field(default_factory=FailureLimits)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    hang_detection: HangDetectionConfig = field(default_factory=HangDetectionConfig)
    timing: RunTiming = field(default_factory=RunTiming)
    time_budget_s: float | None = None
    # Not part of the hash: it has a dictionary.
    cost: CostSpec = field(default_factory=CostSpec, hash=False)
    """Its deadline is virtual time in milliseconds: the clock of the bucket is exact, and shows
    1970-01-01 at the start."""
    feeders: FeederSpec | None = field(default=None, hash=False)
    cost_limits: CostBounds | None = None
    """What `cost_invariants` permit; None: these are not checked."""
    laptop: LaptopConfig = field(default_factory=LaptopConfig)
    next_fit: NextFit | None = None
    events: tuple[ScenarioEvent, ...] = ()
    wall_clock_error_s: float | None = None
    """Largest error of the wall clock of each process; None for some seconds."""
    # NTP clients slew by at most 500 ppm.
    clock_skew: float = 0.0005
    """Largest relative rate error of the machines' clocks."""
    faults_duration_s: float = 300.0
    """Time after which the market, the bucket and the network work without faults."""
    # Several lease and boot timeouts in sequence.
    completion_timeout_s: float = 900.0
    """The run must end within this time after `faults_duration_s`."""
    # A sweep interval and some failed calls of the cloud API.
    release_timeout_s: float = 120.0
    """Machines must be released within this time after the end of the run."""
    # Checked at the end: a scenario that must fail and finishes shows a defect as well.
    expected_outcome: Literal["finished", "failed", "cancelled"] = "finished"
    may_exceed_time_budget: bool = False
    """Whether the time budget may also end the run, with the outcome "cancelled"."""
    may_exhaust_budget: bool = False
    """Whether the budget in `cost` may also end the run, with any outcome but "failed"."""
