"""Inputs of the checkpoint interval: save triggers, save costs, and observed group lifetimes.

`parse_save_trigger` parses the user's `every=`. `LifetimeHistogram` is the sufficient statistic of
a piecewise exponential lifetime model: counts and exposure per age bucket. It is small enough for
one message, is additive over rounds and fits, and is folded from the journal (docs/decisions/0027).
`policy.checkpoint_interval` computes the interval from these types.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import ErrorCollector, did_you_mean
from spotfit.core.units import parse_seconds

# The largest share of the training time that saves may take as long as no loss was observed, if the
# user sets no limit. Until then the optimum is computed from the backend's declaration, which may
# be wrong; afterwards a limit would cost more than it saves (docs/decisions/0057).
MAX_OVERHEAD_WITHOUT_LOSSES = 0.035

# Boundaries of the age buckets (10 min, 30 min, 2 h, 8 h). They grow with the age because young
# groups are lost more often: the mean lifetime on recorded markets is 2 to 8 times the median.
AGE_BUCKET_EDGES_S = (600.0, 1800.0, 7200.0, 28800.0)

SaveCondition = (
    int
    | timedelta
    | Literal["auto", "epoch", "at_notice"]
    | Literal["10s", "15s", "30s", "1m", "2m", "3m", "5m", "10m", "15m", "20m", "30m", "45m"]
    | Literal["1h", "2h", "3h", "4h", "6h", "8h", "12h", "24h"]
)
"""One condition of `Checkpointer(every=...)` for type checkers.

Any duration with a unit is valid at run time. Type checkers know the common ones only, so that they
report a misspelled keyword; write the others as `timedelta`.
"""

_KEYWORDS = ("auto", "epoch", "at_notice")
_EVERY_REMEDY = (
    'Write steps (every=500), a duration ("10m"), "auto", "epoch", or "at_notice" to save only '
    "after a preemption notice."
)
_STEPS = re.compile(r"\s*(\d+)\s*steps?\s*")
_ZERO_COUNTS = (0,) * (len(AGE_BUCKET_EDGES_S) + 1)
_ZERO_SECONDS = (0.0,) * (len(AGE_BUCKET_EDGES_S) + 1)


class SaveTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """When to save a checkpoint; the first satisfied condition triggers a save.

    A preemption notice always triggers a save. With no condition set, only a notice does.
    """

    auto: bool = False
    every_s: float | None = None
    every_steps: int | None = None
    epochs: bool = False
    """At the end of each epoch."""
    max_overhead: float | None = None
    """The largest share of the training time that `auto` may spend on saves. None: no limit after
    the first observed loss, and `MAX_OVERHEAD_WITHOUT_LOSSES` before it."""


class SaveCostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Measured costs of a save: medians over recent saves, of the slowest rank."""

    stall_s: float
    """Time for which the training loop is blocked."""
    slowdown_fraction: float
    """Relative increase of the step time while the save is in flight."""
    commit_s: float
    """Time from the snapshot to the commit."""

    @property
    def cost_per_save_s(self) -> float:
        """Training time lost per save in seconds: the stall, plus the slowdown until the commit."""
        return self.stall_s + self.slowdown_fraction * self.commit_s


class LifetimeHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """Observed lifetimes of the run's worker groups, by age bucket (`AGE_BUCKET_EDGES_S`).

    A group's age counts from its last involuntary end. Every involuntary end counts, including
    crashes of user code: a crash loses as much work as a preemption.
    """

    end_counts: tuple[int, ...] = _ZERO_COUNTS
    """Per age bucket: number of groups that ended."""
    observed_s: tuple[float, ...] = _ZERO_SECONDS
    """Per age bucket: total time for which groups were observed (exposure)."""
    announced_count: int = 0
    """Number of ends that were announced early enough to save."""
    untrained_count: int = 0
    """Number of ends before the training had started: there was nothing to save, so they say
    nothing about whether the announcements are early enough."""

    @property
    def total_count(self) -> int:
        """The number of groups that ended involuntarily, of all ages; the sum of `end_counts`."""
        return sum(self.end_counts)

    def with_observed(self, lifetime_s: float) -> LifetimeHistogram:
        """Return a copy with the exposure of a group that still runs or was ended on purpose.

        `lifetime_s` is the group's age in seconds; its end is not counted (a censored observation).
        """
        edges = (0.0, *AGE_BUCKET_EDGES_S, math.inf)
        added = (max(0.0, min(lifetime_s, end) - start) for start, end in itertools.pairwise(edges))
        exposure = zip(self.observed_s, added, strict=True)
        return replace(self, observed_s=tuple(before + more for before, more in exposure))

    def with_end(
        self, lifetime_s: float, *, saved_in_time: bool, was_training: bool = True
    ) -> LifetimeHistogram:
        """Return a copy with a group that ended involuntarily at the age of `lifetime_s` seconds.

        Adds the group's exposure, too. `saved_in_time` is True if the end was announced and the
        training state was saved after the notice; `was_training` is False if the training had not
        started, so that nothing could be saved.
        """
        counts = list(self.end_counts)
        counts[age_bucket(lifetime_s)] += 1
        return replace(
            self.with_observed(lifetime_s),
            end_counts=tuple(counts),
            announced_count=self.announced_count + (was_training and saved_in_time),
            untrained_count=self.untrained_count + (not was_training),
        )


class MarketPrior(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's declaration about its machines, used before a run has observations of its own."""

    mean_lifetime_s: float = 4 * 3600.0
    """Mean time until a machine is preempted."""
    notice_s: float = 0.0
    """Time between the preemption notice and the end of the machine; 0: there is no notice."""


class FailureModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a group's expected lifetime when its round is opened."""

    market_prior: MarketPrior = MarketPrior()
    num_nodes: int = 1
    lifetimes: LifetimeHistogram = LifetimeHistogram()
    group_age_s: float = 0.0
    """The group's age when the round is opened; > 0 after a resize, which is not a loss."""


def age_bucket(age_s: float) -> int:
    """Return the index of the age bucket that contains `age_s` seconds: 0 up to 10 min, 4 from 8 h.

    For the tuples of `LifetimeHistogram`. An edge belongs to the bucket above it.
    """
    return sum(age_s >= edge for edge in AGE_BUCKET_EDGES_S)


def parse_save_trigger(every: Any, *, max_overhead: Any = None) -> SaveTrigger:
    """Parse the arguments `every` and `max_overhead` of `Checkpointer`.

    `every` is "auto", a duration ("10m" or a timedelta), a number of steps (500 or "500 steps"),
    "epoch", "at_notice", or a list of them, where the first satisfied condition triggers a save.
    `max_overhead` is the largest share of the training time that "auto" may spend on saves, between
    0 and 1; None sets no limit (`SaveTrigger.max_overhead`).

    Raises `ConfigError` (`ConfigTypeError` for a wrong type), or `ConfigErrors` with all problems
    if there are several.
    """
    errors = ErrorCollector()
    conditions = list(every) if isinstance(every, list | tuple) else [every]
    parts = [errors.check(partial(_parse_condition, condition)) for condition in conditions]
    _check_combination(errors, every, [part for part in parts if part is not None])
    # NaN fails the comparison, and a bool is not between 0 and 1.
    is_share = isinstance(max_overhead, int | float) and 0 < max_overhead < 1
    if max_overhead is not None and not is_share:
        errors.add(
            ConfigError(
                f"Checkpointer(max_overhead={max_overhead!r}) must be between 0 and 1.",
                do="Write the fraction of the training time that saves may take "
                "(max_overhead=0.035 for 3.5 %), or leave it out: then losses decide.",
            )
        )
    errors.raise_all()
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= part
    limit = None if max_overhead is None else float(max_overhead)
    return SaveTrigger(**fields, max_overhead=limit)


def _parse_condition(condition: Any) -> dict[str, Any]:
    """Fields of `SaveTrigger` for one condition; empty for "at_notice", which is always active."""
    # bool is a subclass of int: every=True would otherwise mean "every step".
    if isinstance(condition, bool) or not isinstance(condition, str | int | timedelta):
        raise ConfigTypeError(
            f"Checkpointer(every={condition!r}) must be an int, a str or a timedelta, not "
            f"{type(condition).__name__}.",
            do=_EVERY_REMEDY,
        )
    if isinstance(condition, timedelta):
        return _check_duration(condition.total_seconds(), condition)
    # A bare number means steps; a duration always has a unit (`_parse_duration`).
    if isinstance(condition, int):
        return _parse_steps(condition)
    keyword = condition.strip().lower()
    if keyword in _KEYWORDS:
        return {"auto": {"auto": True}, "epoch": {"epochs": True}}.get(keyword, {})
    if steps := _STEPS.fullmatch(keyword):
        return _parse_steps(int(steps[1]))
    return _parse_duration(condition)


def _parse_steps(steps: int) -> dict[str, Any]:
    if steps < 1:
        raise ConfigError(
            f"Checkpointer(every={steps}): the number of steps must be >= 1.",
            do=_EVERY_REMEDY,
        )
    return {"every_steps": steps}


def _parse_duration(text: str) -> dict[str, Any]:
    if not text.strip()[:1].isdigit():
        raise ConfigError(
            f"Checkpointer(every={text!r}) is not a duration.",
            do=f"{did_you_mean(text.strip(), _KEYWORDS)} {_EVERY_REMEDY}",
        )
    if text.strip().replace(".", "", 1).isdigit():
        raise ConfigError(
            f"Checkpointer(every={text!r}) has no unit.",
            do=f'Write "{text.strip()}s" for seconds, or {text.strip()} without quotes for steps.',
        )
    every_s = parse_seconds(text, setting=f"Checkpointer(every={text!r})")
    return _check_duration(every_s, text)


def _check_duration(every_s: float, every: str | timedelta) -> dict[str, Any]:
    if every_s <= 0:
        raise ConfigError(
            f"Checkpointer(every={every!r}): the duration must be > 0.", do=_EVERY_REMEDY
        )
    return {"every_s": every_s}


# Conditions of different kinds may be combined: the first satisfied one triggers a save. Two of the
# same kind are most likely a mistake.
def _check_combination(
    errors: ErrorCollector, every: Any, conditions: Sequence[dict[str, Any]]
) -> None:
    if isinstance(every, list | tuple) and not every:
        errors.add(
            ConfigError(
                f"Checkpointer(every={every!r}) is empty: no condition for a save is set.",
                do=_EVERY_REMEDY,
            )
        )
    names = [name for part in conditions for name in part]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        descriptions = ", ".join(_FIELD_DESCRIPTIONS[name] for name in duplicates)
        errors.add(
            ConfigError(
                f"Checkpointer(every={every!r}) contains {descriptions} more than once.",
                do="Write each kind of condition once.",
            )
        )
    if "auto" in names and {"every_s", "every_steps"} & {*names}:
        errors.add(
            ConfigError(
                f'Checkpointer(every={every!r}): "auto" chooses the interval itself.',
                do='Remove "auto" or the interval; "auto" can be combined with "epoch".',
            )
        )


_FIELD_DESCRIPTIONS = {
    "auto": '"auto"',
    "every_s": "a duration",
    "every_steps": "a number of steps",
    "epochs": '"epoch"',
}
