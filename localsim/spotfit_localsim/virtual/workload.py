"""A simulated training: what its ranks do in each step, and the expected result.

The model state is a chain of hashes with one link per step, independent of the number of workers.
A lost or repeated step therefore changes every later state, and the result of a run can be compared
with that of the reference run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spotfit.model.events import ValidationRequest
from spotfit_localsim.virtual.faults import FloatRange

CrashKind = Literal["raises", "dies", "hangs"]
CheckpointNaming = Literal["generated", "by_step", "fixed"]


@dataclass(frozen=True, slots=True)
class UserCrash:
    """A failure of the user's code: the rank fails in that step, the first `times` times."""

    step: int
    rank: int = 0
    kind: CrashKind = "raises"
    times: int = 1


@dataclass(frozen=True, slots=True)
class ValidationWorkload:
    """How checkpoints are validated."""

    fraction: float = 1.0
    """The fraction of checkpoints that are validated."""
    duration_s: FloatRange = (0.5, 10.0)
    failure_probability: float = 0.1
    """The fraction of validations that raise."""
    hang_probability: float = 0.1
    """The fraction of validations that hang."""
    timeout_s: float = 30.0
    own_machine: bool | None = None


@dataclass(frozen=True, slots=True)
class FeederFaults:
    """How the feeders of other machines transform slices of a dataset."""

    slice_s: FloatRange = (0.01, 0.3)
    """Duration of a slice."""
    failure_probability: float = 0.0
    """The fraction of slices for which the feeder returns an exception."""
    hang_probability: float = 0.0
    """The fraction of slices after which the feeder returns nothing any more."""


@dataclass(frozen=True, slots=True)
class CacheFaults:
    """The cache of a dataset on each machine, and what damages its files."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    damage_probability: float = 0.0
    """That a file is damaged or deleted when a worker of its machine starts."""


@dataclass(frozen=True, slots=True)
class DatasetWorkload:
    """The dataset that the ranks train on, repeatedly."""

    unit_rows: tuple[int, ...] = (7, 0, 12, 1, 30, 5, 9)
    """Rows of its units."""
    row_bytes: int = 100
    """Encoded size of a row: windows of large rows have few of them."""
    seed: int = 0
    batch_rows: int = 24
    """Rows of a step of all ranks or, if not `is_global`, of each rank."""
    is_global: bool = True
    shuffle: Literal["none", "units", "rows"] = "rows"
    buffer_rows: int | None = None
    """Rows that a rank shuffles in memory; None: no `local_shuffle_buffer_size`."""
    augments: bool = False
    """Whether a function of the user adds random numbers to the rows."""
    prefetch_batches: int = 1
    drop_last: bool = False
    counts_steps: bool = False
    """Whether batches count when they were trained on, as with `Checkpointer(loader=shard)`."""
    feeders: FeederFaults = FeederFaults()
    """Used if the scenario has machines for feeders, and the rows are augmented."""
    cache: CacheFaults | None = None
    """The cache of the rows before the augmentation; None: there is none."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The training function."""

    steps: int = 40
    step_s: FloatRange = (0.3, 0.6)
    full_size: int = 0
    """Number of workers with which a step takes `step_s`; with fewer ones it takes longer in
    proportion. 0: it takes as long with any number."""
    start_s: FloatRange = (0.1, 1.0)
    report_every: int = 2
    save_every: int = 8
    """Steps between two checkpoints; 0 for no checkpoints."""
    upload_s: FloatRange = (0.1, 1.5)
    all_ranks_save: bool = True
    """Whether every rank uploads files, or only rank 0."""
    uploads_in_background: bool = False
    """Whether ranks continue training while the agent's uploader uploads."""
    uses_snapshots: bool = False
    """Whether ranks save as `Checkpointer` does: to shared memory, with a replica on a peer."""
    snapshot_stall_s: FloatRange = (0.001, 0.05)
    """Duration of the copy to shared memory."""
    replication_s: FloatRange = (0.01, 0.5)
    """Duration of a transfer to or from the peer."""
    rollback_probability: float = 0.0
    """Probability that the training restores the latest checkpoint after a save."""
    saves_on_notice: bool = True
    saves_at_end: bool = False
    """Whether ranks with `uses_snapshots` save their last steps after their return."""
    extra_steps: int = 0
    """Steps that the last of several ranks makes after the others have returned."""
    awaits_reports: bool = False
    """Whether rank 0 waits for its reports before it returns."""
    checkpoint_naming: CheckpointNaming = "generated"
    """'generated': by spotfit; 'by_step': by the user, equal names in every attempt; 'fixed': by
    the user,
    always the same name.
    """
    uses_barriers: bool = False
    """Whether ranks synchronize before each checkpoint."""
    peer_error_probability: float = 0.5
    """Probability that a rank detects a lost peer by itself and raises."""
    peer_error_delay_s: FloatRange = (0.001, 8.0)
    exit_s: FloatRange = (0.005, 0.3)
    """Time that a killed worker takes to exit."""
    data_wait_share: float = 0.0
    """Share of its time for which each rank waits for rows without machines for feeders."""
    share_per_feeder: float = 0.0
    """How much less with each such machine."""
    dataset: DatasetWorkload | None = None
    crashes: tuple[UserCrash, ...] = ()
    validations: ValidationWorkload | None = None

    def slowdown(self, workers: int) -> float:
        """Return how many times longer a step takes with that number of workers."""
        return self.full_size / workers if self.full_size else 1.0

    def checkpoint_name(self, step: int) -> str | None:
        """Return the name that the user's code gives to the checkpoint of a step, or None."""
        return {"generated": None, "by_step": f"step-{step}", "fixed": "last"}[
            self.checkpoint_naming
        ]


@dataclass(frozen=True, slots=True)
class ModelState:
    """The model after a number of steps."""

    step: int = 0
    link: str = "seed"

    def advance(self, rows: str = "") -> ModelState:
        """Return the state one step later, after a step on these rows."""
        # SHA-1 because it is fast; nothing here is secret.
        link = hashlib.sha1(f"{self.link} {self.step + 1}{rows}".encode(), usedforsecurity=False)
        return ModelState(self.step + 1, link.hexdigest()[:16])


def validation_score(step: int) -> int:
    """Return the score of a checkpoint of that step."""
    return step * 7 % 11


class TrainingHistory(Protocol):
    """The model states that a training on a dataset has passed through."""

    def has(self, state: ModelState) -> bool: ...

    def train(self, before: ModelState, batches: Sequence[Any]) -> ModelState:
        """Record a step of all ranks, by rank; return the state after it."""
        ...

    def world_sizes_by_epoch(self, state: ModelState) -> dict[int, list[int]]:
        """Return the number of ranks of each step that led to the state, by epoch."""
        ...

    def check_end(self, state: ModelState) -> None:
        """Check the last epoch of the training."""
        ...


class ReferenceRun:
    """The training without faults."""

    def __init__(self) -> None:
        self._states = [ModelState()]

    def state_at(self, step: int) -> ModelState:
        """Return the model after `step` steps without lost or repeated steps."""
        # States are kept: every check asks for one of them.
        while len(self._states) <= step:
            self._states.append(self._states[-1].advance())
        return self._states[step]


@dataclass
class SimTraining:
    """The progress of the workload in one simulation."""

    workload: Workload
    reference: ReferenceRun = field(default_factory=ReferenceRun)
    """The states of a training without a dataset, and random numbers of steps."""
    history: TrainingHistory | None = None
    """The states of a training on a dataset, whose rows were checked."""
    crash_counts: dict[UserCrash, int] = field(default_factory=dict)
    memory_kill_count: int = 0
    """Machines that were killed because they exceeded their memory limit."""
    max_step: int = 0
    """The highest step that was executed."""
    executed_steps: int = 0
    """Executed steps of all rounds, including repeated ones."""
    snapshot_steps: dict[int, set[int]] = field(default_factory=dict)
    """Steps that are in memory, by round, without those that were rolled back."""
    reported_steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """The step that rank 0 has reported, by round and report index."""
    reported_progress: dict[tuple[int, int], float] = field(default_factory=dict)
    """The share of the work that was done at that report, from 0 to 1."""
    step_listeners: list[Callable[[int], None]] = field(default_factory=list)
    """Called with every step that is executed for the first time."""

    def progress_at(self, step: int) -> float:
        """Return the share of the work that is done after `step` steps, from 0 to 1."""
        # Extra steps of one rank are no further progress.
        return min(1.0, step / self.workload.steps)

    def record_report(self, position: tuple[int, int], step: int) -> None:
        """Record that rank 0 has made the report of that round and index after `step` steps."""
        self.reported_steps[position] = step
        self.reported_progress[position] = self.progress_at(step)

    def record_step(self, step: int) -> None:
        """Record that the group has executed the step."""
        self.executed_steps += 1
        # Repeated steps are progress of their round, but not of the run.
        if step > self.max_step:
            self.max_step = step
            for listener in self.step_listeners:
                listener(step)

    def validation_request(self, step: int) -> ValidationRequest | None:
        """Return the validation request of that step, or None; equal on all ranks and attempts."""
        plan = self.workload.validations
        # Derived from the state's hash instead of a random stream: ranks draw at different times.
        # Steps are repeated after a loss: the same step must draw the same number again.
        drawn = int(self.reference.state_at(step).link[:4], 16) / 0x10000 if step else 1.0
        return ValidationRequest() if plan is not None and drawn < plan.fraction else None

    def should_roll_back(self, round_: int, report: int) -> bool:
        """Return whether the training restores after that report; equal on all ranks."""
        drawn = (
            int(
                hashlib.sha1(f"{round_} {report}".encode(), usedforsecurity=False).hexdigest()[:4],
                16,
            )
            / 0x10000
        )
        # Derived, not drawn from a stream: all ranks must decide alike.
        return drawn < self.workload.rollback_probability

    def record_rollback(self, round_: int) -> None:
        """Record that all ranks have rolled back, which discards the snapshots so far."""
        self.snapshot_steps = {
            number: steps for number, steps in self.snapshot_steps.items() if number > round_
        }

    def take_crash(self, step: int, rank: int) -> UserCrash | None:
        """Return the failure that the rank has in this step, and count it; None for none."""
        for crash in self.workload.crashes:
            matches = crash.step == step and crash.rank == rank
            # Counted over all rounds: a crash is not repeated when its step is.
            if matches and self.crash_counts.get(crash, 0) < crash.times:
                self.crash_counts[crash] = self.crash_counts.get(crash, 0) + 1
                return crash
        return None

    @property
    def crash_count(self) -> int:
        """The number of failures of the user's code so far."""
        return sum(self.crash_counts.values())

    def is_correct(self, state: ModelState) -> bool:
        """Return whether a training without faults may have this state."""
        # With a dataset, the rows of a step depend on the number of ranks.
        if self.history is not None:
            return state.step == 0 or self.history.has(state)
        return self.reference.state_at(state.step) == state
