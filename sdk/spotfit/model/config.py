"""What the user writes: scaling, storage, failures, checkpoints. Checked when it is made.

Names, order and defaults follow Ray Train V2, so that moving a script over is a change of imports.
A deprecated argument raises `DeprecationWarning` as an exception, as it does there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean
from spotfit.model.callbacks import UserCallback

DEPRECATED: Any = "DEPRECATED"
STORAGE_PATH = "~/spotfit_results"
_ACCELERATOR_SHARE = 0.001
_TPU_CHIPS_PER_HOST = 4
_LOG_LEVELS = ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING")


@dataclass
class ScalingConfig:
    """How many workers, and what each of them needs.

    `num_workers` is a count, `(min, max)` for an elastic group, or 0 to run in this very process.
    """

    trainer_resources: Any = None
    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: dict[str, str] | list[dict[str, str]] | None = None
    use_tpu: bool = False
    topology: str | None = None
    elastic_resize_monitor_interval_s: float = 60.0

    def __post_init__(self) -> None:
        if self.trainer_resources is not None:
            raise _deprecated("ScalingConfig", "trainer_resources", "the trainer takes none")
        _check_worker_count(self.num_workers)
        if self.elastic_resize_monitor_interval_s < 0:
            raise ConfigError(
                "elastic_resize_monitor_interval_s must be non-negative, not "
                f"{self.elastic_resize_monitor_interval_s}.",
                do="Give the seconds between two looks at whether more workers fit.",
            )
        self._drop_zero_resources()
        self._check_accelerators()
        self._check_slices()
        self._check_label_selector()

    @property
    def elasticity_enabled(self) -> bool:
        """Whether `num_workers` is a range; `(n, n)` is one, too."""
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """With fewer workers than this there is no round."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Never more workers than this."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def worker_resources(self) -> dict[str, float]:
        """Everything one worker needs, defaults included."""
        needs = self._explicit_or_default()
        if self.use_gpu:
            needs.setdefault("GPU", 1)
        if self.use_tpu:
            needs.setdefault("TPU", _TPU_CHIPS_PER_HOST if self.topology else 1)
        if self.accelerator_type:
            needs.setdefault(f"accelerator_type:{self.accelerator_type}", _ACCELERATOR_SHARE)
        return needs

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers need together, at their greatest number."""
        return {name: amount * self.max_workers for name, amount in self.worker_resources.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of one worker."""
        return self.worker_resources.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of one worker."""
        return self.worker_resources.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """TPU chips of one worker."""
        return self.worker_resources.get("TPU", 0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What one worker needs besides CPUs and accelerators."""
        known = {"CPU", "GPU", "TPU"}
        return {name: n for name, n in self.worker_resources.items() if name not in known}

    def as_placement_group_factory(self) -> Any:
        """Not offered: there are no placement groups here."""
        raise _no_placement_groups()

    @classmethod
    def from_placement_group_factory(cls, pgf: Any) -> ScalingConfig:
        """Not offered: there are no placement groups here."""
        raise _no_placement_groups()

    def _explicit_or_default(self) -> dict[str, float]:
        if self.resources_per_worker:
            return dict(self.resources_per_worker)
        return {} if self.use_gpu or self.use_tpu else {"CPU": 1}

    def _drop_zero_resources(self) -> None:
        if self.resources_per_worker is None:
            return
        for name, amount in self.resources_per_worker.items():
            if not amount >= 0 or math.isinf(amount):
                raise ConfigError(
                    f"resources_per_worker[{name!r}] cannot be {amount}.",
                    do="Give a number that is not negative.",
                )
        kept = {name: amount for name, amount in self.resources_per_worker.items() if amount}
        self.resources_per_worker = kept

    def _check_accelerators(self) -> None:
        explicit = self.resources_per_worker or {}
        if self.use_gpu and self.use_tpu:
            raise ConfigError("Cannot specify both use_gpu and use_tpu.", do="Choose one.")
        for name, used in (("GPU", self.use_gpu), ("TPU", self.use_tpu)):
            if name in explicit and not used:
                raise ConfigError(
                    f"`use_{name.lower()}` is False but `{name}` was found in "
                    "resources_per_worker.",
                    do=f"Set use_{name.lower()}=True, or leave {name} out.",
                )

    def _check_slices(self) -> None:
        if not self.use_tpu or self.max_workers <= 1:
            return
        if not self.topology or not self.accelerator_type:
            raise ConfigError(
                "use_tpu with more than one worker needs topology and accelerator_type.",
                do="Say which slice, for instance topology='4x4', accelerator_type='TPU-V4'.",
            )
        hosts = max(1, _chips(self.topology) // _TPU_CHIPS_PER_HOST)
        if self.max_workers % hosts or self.min_workers % hosts:
            raise ConfigError(
                f"A slice of topology {self.topology} has {hosts} hosts; num_workers must be a "
                f"multiple of that, not {self.num_workers}.",
                do="Ask for whole slices: one worker a host.",
            )

    def _check_label_selector(self) -> None:
        if isinstance(self.label_selector, list) and len(self.label_selector) != self.max_workers:
            raise ConfigError(
                "label_selector, given as a list, must be the same length as the number of "
                f"workers: it has {len(self.label_selector)} entries for {self.max_workers}.",
                do="Give one dictionary for all workers, or one each.",
            )


@dataclass
class CheckpointConfig:
    """Which checkpoints stay: all, the last `num_to_keep`, or that many best by a score.

    The latest one always stays. A score may be a path into nested metrics: 'eval/loss'.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    checkpoint_frequency: Any = DEPRECATED
    checkpoint_at_end: Any = DEPRECATED

    def __post_init__(self) -> None:
        for name in ("checkpoint_frequency", "checkpoint_at_end"):
            if getattr(self, name) != DEPRECATED:
                raise _deprecated("CheckpointConfig", name, "the training function reports them")
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ConfigError(
                f"num_to_keep must be None or at least 1, not {self.num_to_keep}.",
                do="Give None to keep all; the latest checkpoint always stays.",
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ConfigError(
                "checkpoint_score_order must be 'max' or 'min', not "
                f"{self.checkpoint_score_order!r}.",
                do="'max' keeps the highest scores, 'min' the lowest.",
            )


@dataclass
class FailureConfig:
    """How many failures a run survives; -1 is no limit. The three budgets are apart."""

    max_failures: int = 0
    """Of the training function and its processes."""
    fail_fast: Any = DEPRECATED
    controller_failure_limit: int = -1
    """Of placing and starting workers."""
    max_preemption_failures: int = -1
    """Machines taken away."""
    relax_collectives_on_preemption: bool = False
    preemption_grace_s: float = 0.0

    def __post_init__(self) -> None:
        if self.fail_fast != DEPRECATED:
            raise _deprecated("FailureConfig", "fail_fast", "max_failures=0 says the same")


@dataclass
class LoggingConfig:
    """How much the run tells."""

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        level = str(self.log_level).upper()
        if level not in _LOG_LEVELS:
            raise ConfigError(
                f"Invalid log_level {self.log_level!r}.", do=did_you_mean(level, _LOG_LEVELS)
            )
        self.log_level = level


@dataclass
class SyncConfig:
    """A leftover that can still be imported; `RunConfig(sync_config=...)` refuses it."""

    sync_period: int = 300
    sync_timeout: int = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True


@dataclass
class RunConfig:
    """The name of a run, where it is kept, and what it may survive.

    A run without a name gets one when it is fitted. The same name and storage path again
    continue the old run. `storage_path` is a directory or a URL (s3://, gs://, az://, file://).
    """

    name: str | None = None
    storage_path: str | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[UserCallback] | None = None
    worker_runtime_env: dict[str, Any] | None = None
    logging_config: LoggingConfig | None = None
    sync_config: Any = DEPRECATED
    verbose: Any = DEPRECATED
    stop: Any = DEPRECATED
    progress_reporter: Any = DEPRECATED
    log_to_file: Any = DEPRECATED

    def __post_init__(self) -> None:
        for name in ("sync_config", "verbose", "stop", "progress_reporter", "log_to_file"):
            if getattr(self, name) != DEPRECATED:
                raise _deprecated("RunConfig", name, "there is nothing left for it to do")
        self.name = self.name or None
        self.storage_path = _as_text(self.storage_path)
        self.failure_config = self.failure_config or FailureConfig()
        self.checkpoint_config = self.checkpoint_config or CheckpointConfig()
        self.logging_config = self.logging_config or LoggingConfig()
        self.worker_runtime_env = dict(self.worker_runtime_env or {})
        self.callbacks = _checked_callbacks(self.callbacks)
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("logging_config", LoggingConfig),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"Invalid `{name}` type: {type(getattr(self, name)).__name__}.",
                    do=f"Give a spotfit.{kind.__name__}.",
                )


def _check_worker_count(count: Any) -> None:
    if isinstance(count, tuple) and len(count) == 2 and all(isinstance(n, int) for n in count):
        low, high = count
    elif isinstance(count, int):
        low = high = count
    else:
        raise ConfigError(
            f"num_workers must be an int or a tuple of two ints, not {count!r}.",
            do="Write num_workers=4, or num_workers=(2, 8) for an elastic group.",
        )
    if low < 0:
        raise ConfigError(f"num_workers cannot be negative: {count}.", do="0 runs it in process.")
    if isinstance(count, tuple) and low < 1:
        raise ConfigError(
            f"num_workers={count}: a group that may shrink to nobody trains nothing.",
            do="Let the smallest number be at least 1.",
        )
    if low > high:
        raise ConfigError(
            f"min_workers must be <= max_workers: {count}.", do="Write (least, most)."
        )


def _chips(topology: str) -> int:
    sides = topology.lower().split("x")
    if not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ConfigError(f"{topology!r} is no topology.", do="Write it as '4x4' or '2x2x2'.")
    return math.prod(int(side) for side in sides)


def _checked_callbacks(callbacks: Sequence[Any] | None) -> list[UserCallback]:
    strangers = [one for one in callbacks or () if not isinstance(one, UserCallback)]
    if strangers:
        raise ConfigError(
            f"callbacks holds {strangers[0]!r}, which is no instance of spotfit.UserCallback.",
            do="Derive its class from UserCallback, and pass an instance.",
        )
    return list(callbacks or ())


def _as_text(path: str | PurePath | None) -> str:
    return STORAGE_PATH if path is None else str(path)


def _deprecated(owner: str, name: str, instead: str) -> DeprecationWarning:
    return DeprecationWarning(f"{owner}({name}=...) is no longer supported: {instead}.")


def _no_placement_groups() -> DeprecationWarning:
    return DeprecationWarning("ScalingConfig knows no placement groups; use its resources instead.")
