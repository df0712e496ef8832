"""User-facing configuration of scaling, checkpoint retention, failure limits and logging.

Every object validates itself when it is constructed and reports all invalid values together
(`ConfigErrors`). Names, argument order and defaults follow Ray Train V2, so that migrating a script
changes only its imports; as in Ray, a deprecated argument raises `DeprecationWarning`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ConfigError, UnknownDatasetError
from spotfit.core.input_checks import (
    DEPRECATED,
    ErrorCollector,
    did_you_mean,
    parse_log_level,
    reject_deprecated_arguments,
    suggest_keywords,
)

# Ray requests an accelerator type as a tiny amount of a resource of that name: small enough that
# any number of workers fits on a machine which has the type.
_ACCELERATOR_TYPE_AMOUNT = 0.001
# A TPU host has 4 chips in every generation (cloud.google.com/tpu/docs/system-architecture), except
# that hosts of the types below hold slices of up to 8 chips completely.
_TPU_CHIPS_PER_HOST = 4
_LARGE_HOST_TPU_TYPES = ("V5LITEPOD", "V5E", "V6E")
_SINGLE_HOST_TPU_TOPOLOGIES = ("1x1", "2x2", "2x4")
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_NO_LIMIT = -1


@suggest_keywords
@dataclass
class ScalingConfig:
    """The number of workers and the resources of each worker.

    `num_workers` is a count, `(min, max)` for an elastic group, or 0 to train in this process.
    Without `resources_per_worker` a worker needs one CPU, or one GPU and no CPU with `use_gpu`.
    Raises `ConfigError` for invalid values, `ConfigErrors` for several.
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
        reject_deprecated_arguments(
            "ScalingConfig",
            {"trainer_resources": self.trainer_resources},
            replacements={"trainer_resources": "remove it, only workers use resources"},
            unset=None,
        )
        errors = ErrorCollector()
        count_valid = errors.check(lambda: _check_worker_count(self.num_workers)) is not None
        amounts_valid = (
            errors.check(lambda: _check_resource_amounts(self.resources_per_worker)) is not None
        )
        errors.check(self._check_interval)
        for name in ("use_gpu", "use_tpu"):
            if not isinstance(getattr(self, name), bool):
                errors.add(
                    ConfigError(
                        f"ScalingConfig({name}={getattr(self, name)!r}) must be True or False.",
                        do=f"Write {name}=True if each worker needs an accelerator.",
                    )
                )
        if self.placement_strategy not in _STRATEGIES:
            errors.add(
                ConfigError(
                    f"ScalingConfig(placement_strategy={self.placement_strategy!r}) is not a "
                    "valid strategy.",
                    do=f"{did_you_mean(str(self.placement_strategy), _STRATEGIES)} 'PACK' is the "
                    "default.",
                )
            )
        # The checks below compute with the counts and amounts; on invalid ones they would raise
        # TypeErrors, or report the same problem twice.
        if amounts_valid:
            errors.check(self._check_accelerators)
        if count_valid:
            errors.check(self._check_label_selector)
        if count_valid and amounts_valid:
            errors.check(self._check_tpu_slices)
        errors.raise_all()

    @property
    def elasticity_enabled(self) -> bool:
        """Whether `num_workers` is a tuple, so that rounds may run with fewer than `max_workers`.

        `(n, n)` counts as elastic, as in Ray Train.
        """
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """The smallest number of workers of a round; equal to `max_workers` unless elastic.

        0 if `num_workers` is 0: training runs in the process that calls `fit()`.
        """
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The number of workers that machines are requested for; 0 to train in the calling process.

        No round has more workers.
        """
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def worker_resources(self) -> dict[str, float]:
        """The resources of one worker by name, with defaults and without zero amounts.

        Example: {"GPU": 1, "accelerator_type:A100": 0.001}. Amounts are counts, as in Ray; an
        accelerator type is a tiny amount of a resource with that name. A new dictionary on each
        access.
        """
        if self.resources_per_worker is None:
            resources: dict[str, float] = {} if self.use_gpu or self.use_tpu else {"CPU": 1}
        else:
            resources = {name: n for name, n in self.resources_per_worker.items() if n}
        if self.use_gpu:
            resources.setdefault("GPU", 1)
        if self.use_tpu:
            # One worker per host by default. Without a topology it is a single chip.
            chips = _TPU_CHIPS_PER_HOST if self.topology else 1
            has_large_hosts = str(self.accelerator_type).upper().endswith(_LARGE_HOST_TPU_TYPES)
            if has_large_hosts and str(self.topology).lower() in _SINGLE_HOST_TPU_TOPOLOGIES:
                chips = _chips(str(self.topology))
            resources.setdefault("TPU", chips)
        if self.accelerator_type:
            type_resource = f"accelerator_type:{self.accelerator_type}"
            resources.setdefault(type_resource, _ACCELERATOR_TYPE_AMOUNT)
        return resources

    @property
    def total_resources(self) -> dict[str, float]:
        """The resources of `max_workers` workers together, by name as in `worker_resources`."""
        return {name: amount * self.max_workers for name, amount in self.worker_resources.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        """The number of CPUs of one worker; 0 if only accelerators were requested."""
        return self.worker_resources.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """The number of GPUs of one worker; 0 without `use_gpu`."""
        return self.worker_resources.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """The number of TPU chips of one worker; 0 without `use_tpu`."""
        return self.worker_resources.get("TPU", 0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """The resources of one worker by name, other than "CPU" and "GPU"; "TPU" is included."""
        return {name: n for name, n in self.worker_resources.items() if name not in ("CPU", "GPU")}

    def as_placement_group_factory(self) -> Any:
        """Always raises `DeprecationWarning`: spotfit has no placement groups.

        Kept so that scripts for Ray Train get a clear error.
        """
        raise _placement_groups_unsupported()

    @classmethod
    def from_placement_group_factory(cls, pgf: Any) -> ScalingConfig:
        """Always raises `DeprecationWarning`: spotfit has no placement groups.

        Kept so that scripts for Ray Train get a clear error.
        """
        raise _placement_groups_unsupported()

    # --- checks ------------------------------------------------------------------------------

    def _check_interval(self) -> None:
        if not _is_number(self.elastic_resize_monitor_interval_s, minimum=0):
            raise ConfigError(
                "ScalingConfig(elastic_resize_monitor_interval_s="
                f"{self.elastic_resize_monitor_interval_s}): the interval must be non-negative.",
                do="Set the seconds between two resizes of an elastic group: "
                "elastic_resize_monitor_interval_s=60.",
            )

    def _check_accelerators(self) -> None:
        explicit = self.resources_per_worker or {}
        if self.use_gpu and self.use_tpu:
            raise ConfigError(
                "Cannot specify both use_gpu and use_tpu: ScalingConfig sets both to True.",
                do="Keep the argument of the accelerator that the machines have, and remove the "
                "other.",
            )
        for name, used in (("GPU", self.use_gpu), ("TPU", self.use_tpu)):
            if explicit.get(name) and not used:
                raise ConfigError(
                    f"ScalingConfig: `use_{name.lower()}` is False but `{name}` was found in "
                    "resources_per_worker.",
                    do=f"Set use_{name.lower()}=True, or remove {name} from resources_per_worker.",
                )

    def _check_tpu_slices(self) -> None:
        if not self.use_tpu:
            return
        if not self.topology or not self.accelerator_type:
            if self.max_workers > 1:
                raise ConfigError(
                    "ScalingConfig(use_tpu=True) with more than one worker needs topology and "
                    f"accelerator_type; it has topology={self.topology!r}, "
                    f"accelerator_type={self.accelerator_type!r}.",
                    do="Name the slice, for example topology='4x4', accelerator_type='TPU-V4'.",
                )
            return
        # A TPU slice is allocated as a whole, so all of its workers must be requested.
        chips, chips_per_worker = _chips(self.topology), self.num_tpus_per_worker
        if chips % chips_per_worker:
            raise ConfigError(
                f"ScalingConfig: the {chips} chips of topology {self.topology} cannot be divided "
                f"among workers with {chips_per_worker:g} TPU each.",
                do=f"Remove TPU from resources_per_worker, or set it to a divisor of {chips}.",
            )
        workers = int(chips // chips_per_worker)
        if self.max_workers % workers or self.min_workers % workers:
            raise ConfigError(
                f"A slice of topology {self.topology} has {workers} workers; num_workers must be "
                f"a multiple of {workers}, not {self.num_workers}.",
                do="Request complete slices: one worker per host.",
            )

    def _check_label_selector(self) -> None:
        if isinstance(self.label_selector, list) and len(self.label_selector) != self.max_workers:
            raise ConfigError(
                "label_selector, given as a list, must be the same length as the number of "
                f"workers: it has {len(self.label_selector)} entries for {self.max_workers}.",
                do="Pass one dictionary for all workers, or a list with one dictionary per worker.",
            )


@suggest_keywords
@dataclass
class CheckpointConfig:
    """Which checkpoints are retained: all, the last `num_to_keep`, or the `num_to_keep` best.

    The latest checkpoint is always retained. `checkpoint_score_attribute` may be a path into nested
    metrics, such as 'eval/loss'. Raises `ConfigError` for invalid values.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    # Deprecated arguments default to a sentinel, because None is a value that a caller may pass.
    checkpoint_frequency: Any = DEPRECATED
    checkpoint_at_end: Any = DEPRECATED

    def __post_init__(self) -> None:
        deprecated = ("checkpoint_frequency", "checkpoint_at_end")
        reject_deprecated_arguments(
            "CheckpointConfig",
            {name: getattr(self, name) for name in deprecated},
            replacements=dict.fromkeys(deprecated, "call report(checkpoint=...) instead"),
        )
        errors = ErrorCollector()
        if self.num_to_keep is not None and not _is_count(self.num_to_keep, minimum=1):
            errors.add(
                ConfigError(
                    f"CheckpointConfig(num_to_keep={self.num_to_keep}): num_to_keep must be None "
                    "or at least 1.",
                    do="Write the number of checkpoints to keep, for example num_to_keep=2, or "
                    "None to keep all.",
                )
            )
        if self.checkpoint_score_order not in ("max", "min"):
            errors.add(
                ConfigError(
                    f"CheckpointConfig(checkpoint_score_order={self.checkpoint_score_order!r}): "
                    "checkpoint_score_order must be 'max' or 'min'.",
                    do="Use 'max' to keep the highest scores, 'min' to keep the lowest.",
                )
            )
        errors.raise_all()


@suggest_keywords
@dataclass
class FailureConfig:
    """How many failures of each kind a run tolerates; -1 means no limit.

    The three limits are counted separately. Raises `ConfigError` for invalid values.
    """

    max_failures: int = 0
    """Failed rounds caused by the training function or its processes."""
    fail_fast: Any = DEPRECATED
    controller_failure_limit: int = -1
    """Failed rounds caused by the platform: machines, disks, network, worker startup."""
    max_preemption_failures: int = -1
    """Rounds ended by a preemption."""
    relax_collectives_on_preemption: bool = False
    """Whether the remaining ranks may report without the ranks of a preempted node."""
    preemption_grace_s: float = 0.0
    """Seconds that the remaining ranks may continue after the preemption deadline."""

    def __post_init__(self) -> None:
        reject_deprecated_arguments(
            "FailureConfig",
            {"fail_fast": self.fail_fast},
            replacements={"fail_fast": "use max_failures=0"},
        )
        errors = ErrorCollector()
        for name in ("max_failures", "controller_failure_limit", "max_preemption_failures"):
            if not _is_count(getattr(self, name), minimum=_NO_LIMIT):
                errors.add(
                    ConfigError(
                        f"FailureConfig({name}={getattr(self, name)!r}): {name} must be an "
                        "integer >= -1.",
                        do="Give the number of failures to tolerate; -1 means no limit.",
                    )
                )
        if not _is_number(self.preemption_grace_s, minimum=0):
            errors.add(
                ConfigError(
                    f"FailureConfig(preemption_grace_s={self.preemption_grace_s}): the time must "
                    "be non-negative.",
                    do="Set the seconds that remaining workers may continue after the deadline, "
                    "for example preemption_grace_s=0.",
                )
            )
        errors.raise_all()


@suggest_keywords
@dataclass
class LoggingConfig:
    """The level of spotfit's own log, on the console and on the nodes.

    The environment variable SPOTFIT_LOG_LEVEL overrides it. Output of the training function is not
    affected. Raises `ConfigError` for an unknown level.
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        self.log_level = parse_log_level(self.log_level, owner="LoggingConfig(log_level=...)")


@suggest_keywords
@dataclass
class SyncConfig:
    """Kept so that imports of it still work; `RunConfig(sync_config=...)` rejects it."""

    sync_period: int = 300
    sync_timeout: int = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True


# The two checks below return a value other than None if they pass: `ErrorCollector.check` returns
# None for an error, and later checks depend on the outcome.
def _check_worker_count(count: Any) -> Any:
    counts = count if isinstance(count, tuple) else (count, count)
    if len(counts) == 2 and all(_is_count(n, minimum=-math.inf) for n in counts):
        low, high = counts
    else:
        raise ConfigError(
            f"ScalingConfig(num_workers={count!r}) must be an int or a tuple of two ints.",
            do="Write num_workers=4, or num_workers=(2, 8) for an elastic group.",
        )
    if low < 0:
        raise ConfigError(
            f"ScalingConfig(num_workers={count}) cannot be negative.",
            do="Write the number of workers, for example num_workers=4; num_workers=0 trains in "
            "the process that calls fit().",
        )
    if isinstance(count, tuple) and low < 1:
        raise ConfigError(
            f"ScalingConfig(num_workers={count}): min workers must be >= 1.",
            do=f"Write num_workers=(1, {max(1, high)}).",
        )
    if low > high:
        raise ConfigError(
            f"ScalingConfig(num_workers={count}): min_workers must be <= max_workers.",
            do=f"Write num_workers=({high}, {low}).",
        )
    return count


def _check_resource_amounts(resources: Any) -> Any:
    if resources is None:
        return {}
    if not isinstance(resources, dict):
        raise ConfigError(
            f"ScalingConfig(resources_per_worker={resources!r}) must be a dictionary.",
            do="Write resources_per_worker={'CPU': 2, 'GPU': 1}.",
        )
    errors = ErrorCollector()
    for name, amount in resources.items():
        if not _is_number(amount, minimum=0):
            errors.add(
                ConfigError(
                    f"ScalingConfig(resources_per_worker={{{name!r}: {amount!r}}}): the amount "
                    "must be a number >= 0.",
                    do=f"Write the amount of {name} that one worker needs: {{{name!r}: 1}}.",
                )
            )
    errors.raise_all()
    return resources


def _chips(topology: str) -> int:
    sides = topology.lower().split("x")
    if not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ConfigError(
            f"ScalingConfig(topology={topology!r}) is not a valid topology.",
            do="Write '4x4' or '2x2x2'.",
        )
    return math.prod(int(side) for side in sides)


# Also rejects NaN and infinity, which compare or multiply without an error later.
def _is_number(value: Any, *, minimum: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= minimum


def _is_count(value: Any, *, minimum: float) -> bool:
    # True and False are integers, but no counts.
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _placement_groups_unsupported() -> DeprecationWarning:
    return DeprecationWarning(
        "ScalingConfig does not support placement groups; use resources_per_worker instead."
    )


# --- Datasets -----------------------------------------------------------------------------------


TRAIN_DATASET_KEY = "train"
"""The conventional name of the training dataset in `datasets={...}`."""


def unknown_dataset_error(name: str | None, dataset_names: Iterable[str]) -> UnknownDatasetError:
    """Return the error for `get_dataset_shard(name)` with a name that the trainer does not have.

    `dataset_names` are the names in the trainer's `datasets=`, for a suggestion in the message. The
    caller raises the error.
    """
    hint = did_you_mean(str(name), dataset_names)
    return UnknownDatasetError(
        f"The trainer has no dataset {name!r}.",
        do=hint or "Pass it as the trainer's datasets={'train': ...}.",
    )
