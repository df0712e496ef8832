"""What the user writes about width, failures, checkpoints and logs. Checked when it is made.

Names, order and defaults follow Ray Train V2, so that moving a script over is a change of imports.
All mistakes of one object are told together; a deprecated argument raises `DeprecationWarning` as
an exception, as it does there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from spotfit.core.deprecated import DEPRECATED, refuse_deprecated
from spotfit.core.errors import ConfigError
from spotfit.core.levels import parse_level
from spotfit.core.mistakes import Mistakes
from spotfit.core.nearest import did_you_mean

_ACCELERATOR_SHARE = 0.001
_TPU_CHIPS_PER_HOST = 4
_TPU_OF_ONE_HOST = ("1x1", "2x2", "2x4")
"""Topologies that one host of these kinds holds whole."""
_TPU_WITH_BIG_HOSTS = ("V5LITEPOD", "V5E", "V6E")
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_NO_LIMIT = -1


@dataclass
class ScalingConfig:
    """How many workers, and what each of them needs.

    `num_workers` is a count, `(min, max)` for an elastic group, or 0 to run in this very process.
    A worker needs one CPU unless `resources_per_worker` says otherwise; with `use_gpu`, one GPU
    and no CPU.
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
        refuse_deprecated(
            "ScalingConfig",
            {"trainer_resources": self.trainer_resources},
            instead={"trainer_resources": "nothing but workers needs machines"},
            unset=None,
        )
        mistakes = Mistakes()
        counted = mistakes.check(lambda: _checked_count(self.num_workers)) is not None
        weighed = mistakes.check(lambda: _checked_amounts(self.resources_per_worker)) is not None
        mistakes.check(self._check_interval)
        mistakes.check(self._check_strategy)
        if weighed:
            mistakes.check(self._check_accelerators)
        if counted:
            mistakes.check(self._check_label_selector)
        if counted and weighed:
            mistakes.check(self._check_slices)
        mistakes.raise_all()

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
        """Everything one worker needs, defaults included and zeros left out."""
        needs = self._explicit_or_default()
        if self.use_gpu:
            needs.setdefault("GPU", 1)
        if self.use_tpu:
            needs.setdefault("TPU", self._chips_per_host())
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
        """What one worker needs besides CPUs and GPUs."""
        return {name: n for name, n in self.worker_resources.items() if name not in ("CPU", "GPU")}

    def as_placement_group_factory(self) -> Any:
        """Not offered: there are no placement groups here."""
        raise _no_placement_groups()

    @classmethod
    def from_placement_group_factory(cls, pgf: Any) -> ScalingConfig:
        """Not offered: there are no placement groups here."""
        raise _no_placement_groups()

    def _explicit_or_default(self) -> dict[str, float]:
        if self.resources_per_worker is None:
            return {} if self.use_gpu or self.use_tpu else {"CPU": 1}
        return {name: amount for name, amount in self.resources_per_worker.items() if amount}

    def _chips_per_host(self) -> int:
        if not self.topology:
            return 1
        big = str(self.accelerator_type).upper().endswith(_TPU_WITH_BIG_HOSTS)
        if big and self.topology.lower() in _TPU_OF_ONE_HOST:
            return _chips(self.topology)
        return _TPU_CHIPS_PER_HOST

    # --- checks ------------------------------------------------------------------------------

    def _check_interval(self) -> None:
        if not _is_number(self.elastic_resize_monitor_interval_s, least=0):
            raise ConfigError(
                "elastic_resize_monitor_interval_s must be non-negative, not "
                f"{self.elastic_resize_monitor_interval_s!r}.",
                do="Give the seconds between two looks at whether more workers fit.",
            )

    def _check_strategy(self) -> None:
        if self.placement_strategy not in _STRATEGIES:
            raise ConfigError(
                f"placement_strategy cannot be {self.placement_strategy!r}.",
                do=did_you_mean(str(self.placement_strategy), _STRATEGIES),
            )

    def _check_accelerators(self) -> None:
        explicit = self.resources_per_worker or {}
        if self.use_gpu and self.use_tpu:
            raise ConfigError("Cannot specify both use_gpu and use_tpu.", do="Choose one.")
        for name, used in (("GPU", self.use_gpu), ("TPU", self.use_tpu)):
            if explicit.get(name) and not used:
                raise ConfigError(
                    f"`use_{name.lower()}` is False but `{name}` was found in "
                    "resources_per_worker.",
                    do=f"Set use_{name.lower()}=True, or leave {name} out.",
                )

    def _check_slices(self) -> None:
        if not self.use_tpu:
            return
        if not self.topology or not self.accelerator_type:
            if self.max_workers > 1:
                raise ConfigError(
                    "use_tpu with more than one worker needs topology and accelerator_type.",
                    do="Say which slice, for instance topology='4x4', accelerator_type='TPU-V4'.",
                )
            return
        workers = _workers_of_a_slice(self.topology, self.num_tpus_per_worker)
        if self.max_workers % workers or self.min_workers % workers:
            raise ConfigError(
                f"A slice of topology {self.topology} has {workers} workers; num_workers must be "
                f"a multiple of that, not {self.num_workers}.",
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
        gone = ("checkpoint_frequency", "checkpoint_at_end")
        refuse_deprecated(
            "CheckpointConfig",
            {name: getattr(self, name) for name in gone},
            instead=dict.fromkeys(gone, "call report(checkpoint=...) when one is due"),
        )
        mistakes = Mistakes()
        if self.num_to_keep is not None and not _is_count(self.num_to_keep, least=1):
            mistakes.add(
                ConfigError(
                    f"num_to_keep must be None or at least 1, not {self.num_to_keep!r}.",
                    do="Give None to keep all; the latest checkpoint always stays.",
                )
            )
        if self.checkpoint_score_order not in ("max", "min"):
            mistakes.add(
                ConfigError(
                    "checkpoint_score_order must be 'max' or 'min', not "
                    f"{self.checkpoint_score_order!r}.",
                    do="'max' keeps the highest scores, 'min' the lowest.",
                )
            )
        mistakes.raise_all()


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
        refuse_deprecated(
            "FailureConfig",
            {"fail_fast": self.fail_fast},
            instead={"fail_fast": "max_failures=0 says the same"},
        )
        mistakes = Mistakes()
        for name in ("max_failures", "controller_failure_limit", "max_preemption_failures"):
            if not _is_count(getattr(self, name), least=_NO_LIMIT):
                mistakes.add(
                    ConfigError(
                        f"{name} must be a whole number, and at least -1, not "
                        f"{getattr(self, name)!r}.",
                        do="Give how many failures to survive; -1 is no limit.",
                    )
                )
        if not _is_number(self.preemption_grace_s, least=0):
            mistakes.add(
                ConfigError(
                    f"preemption_grace_s must be non-negative, not {self.preemption_grace_s!r}.",
                    do="Give the seconds that survivors may go on past the deadline.",
                )
            )
        mistakes.raise_all()


@dataclass
class LoggingConfig:
    """How much spotfit itself tells, on the console and on the machines; "ERROR" is little, "DEBUG"
    much. SPOTFIT_LOG_LEVEL overrules it. What the training function prints and logs is not touched.
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        self.log_level = parse_level(self.log_level)


@dataclass
class SyncConfig:
    """A leftover that can still be imported; `RunConfig(sync_config=...)` refuses it."""

    sync_period: int = 300
    sync_timeout: int = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True


def _checked_count(count: Any) -> Any:
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
    return count


def _checked_amounts(resources: Any) -> Any:
    if resources is None:
        return {}
    if not isinstance(resources, dict):
        raise ConfigError(
            f"resources_per_worker must be a dictionary, not {resources!r}.",
            do="Write {'CPU': 2, 'GPU': 1}.",
        )
    mistakes = Mistakes()
    for name, amount in resources.items():
        if not _is_number(amount, least=0):
            mistakes.add(
                ConfigError(
                    f"resources_per_worker[{name!r}] cannot be {amount!r}.",
                    do="Give a number that is not negative.",
                )
            )
    mistakes.raise_all()
    return resources


def _workers_of_a_slice(topology: str, chips_each: float) -> int:
    chips = _chips(topology)
    if chips % chips_each:
        raise ConfigError(
            f"The {chips} chips of topology {topology} cannot be shared by workers with "
            f"{chips_each:g} TPU each.",
            do="Leave TPU out of resources_per_worker, or choose a divisor.",
        )
    return int(chips // chips_each)


def _chips(topology: str) -> int:
    sides = topology.lower().split("x")
    if not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ConfigError(f"{topology!r} is no topology.", do="Write it as '4x4' or '2x2x2'.")
    return math.prod(int(side) for side in sides)


def _is_number(value: Any, *, least: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= least


def _is_count(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _no_placement_groups() -> DeprecationWarning:
    return DeprecationWarning("ScalingConfig knows no placement groups; use its resources instead.")
