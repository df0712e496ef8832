"""Which checkpoints may go, and which is better than which."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from spotfit.core.errors import ConfigError
from spotfit.model.events import CheckpointCommitted
from spotfit.model.metrics import metrics_from_json
from spotfit.model.spec import Keep

_MISSING = object()
_NO_NUMBER = (0, 0.0)
_NOTHING = (1, 0.0)


class Expendable(NamedTuple):
    """A checkpoint that nobody needs any more, and the reason."""

    name: str
    why: str


def expendable(
    checkpoints: Sequence[CheckpointCommitted],
    keep: Keep,
    *,
    protected: Collection[str] = (),
) -> tuple[Expendable, ...]:
    """What of `checkpoints` (in the order of their commits) may be dropped, worst first.

    The latest never may, nor the latest that a Checkpointer can go on from, nor those in
    `protected`; so some more than `keep.last` may stay. Where there is no limit, one makes room for
    the next that is called like it. Raises `ConfigError` when a score is not a number.
    """
    if keep.last is None or not checkpoints:
        return tuple(_replaced(checkpoints, protected))
    ranked = worst_to_best(checkpoints, keep)
    latest = checkpoints[-1].name
    # A name used twice is one folder: it stays while any of its entries does.
    snapshots = [one.name for one in checkpoints if one.snapshot]
    staying = {latest, *snapshots[-1:], *protected, *(one.name for one in ranked[-keep.last :])}
    going = dict.fromkeys(one.name for one in ranked if one.name not in staying)
    return tuple(Expendable(name, _reason(keep)) for name in going)


def _replaced(
    checkpoints: Sequence[CheckpointCommitted], protected: Collection[str]
) -> Iterator[Expendable]:
    named = [(one.name, one.called) for one in checkpoints]
    last = {called: name for name, called in named}
    for name, called in named:
        if name != last[called] and name not in protected:
            yield Expendable(name, f"{last[called]} has taken its place")


def worst_to_best(
    checkpoints: Sequence[CheckpointCommitted], keep: Keep
) -> list[CheckpointCommitted]:
    """Sorted by score, or by time without one; of two equal ones the later is better.

    A score that is missing is worse than every number, and NaN is worse still, whichever way the
    score is meant. Raises `ConfigError` when a score is not a number.
    """
    if keep.score is None:
        return list(checkpoints)
    return sorted(checkpoints, key=lambda one: _worth(one, keep))


def nested(metrics: Any, path: str, default: Any = None) -> Any:
    """The value at 'a/b' in nested metrics; a key that holds the slash itself comes first."""
    if isinstance(metrics, dict):
        if path in metrics:
            return metrics[path]
        first, _, rest = path.partition("/")
        if rest and first in metrics:
            return nested(metrics[first], rest, default)
    return default


def _worth(checkpoint: CheckpointCommitted, keep: Keep) -> tuple[int, float]:
    score = metrics_from_json(nested(checkpoint.metrics, keep.score or "", _MISSING))
    if score is _MISSING:
        return _NOTHING
    if not isinstance(score, (int, float)):
        raise ConfigError(
            f"The score {keep.score!r} of checkpoint {checkpoint.name} must be a number, but it is "
            f"{score!r}.",
            do="Report it as a number, or set another checkpoint_score_attribute.",
        )
    if math.isnan(score):
        return _NO_NUMBER
    return (2, score if keep.order == "max" else -score)


def _reason(keep: Keep) -> str:
    if keep.score is None:
        return f"only the last {keep.last} stay"
    return f"only the latest and the {keep.last} best by {keep.score} ({keep.order}) stay"
