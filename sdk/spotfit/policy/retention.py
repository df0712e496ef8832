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
    the next that is called like it. What was written over goes, whatever is kept. Raises
    `ConfigError` when a score is not a number.
    """
    left = standing(checkpoints)
    surplus = _replaced(left) if keep.last is None else _beyond(keep.last, left, keep)
    going = (*_overwritten(checkpoints), *surplus)
    return tuple(one for one in going if one.name not in protected)


def standing(checkpoints: Sequence[CheckpointCommitted]) -> list[CheckpointCommitted]:
    """Without those that were written over: a user has put a later one into the same folder."""
    last = {one.folder: n for n, one in enumerate(checkpoints)}
    return [one for n, one in enumerate(checkpoints) if last[one.folder] == n]


def _overwritten(checkpoints: Sequence[CheckpointCommitted]) -> Iterator[Expendable]:
    now = {one.folder: one.name for one in checkpoints}
    for one in checkpoints:
        if one.name not in now.values():
            yield Expendable(one.name, f"{now[one.folder]} was written over it")


def _replaced(checkpoints: Sequence[CheckpointCommitted]) -> Iterator[Expendable]:
    last = {one.called: one.name for one in checkpoints}
    for one in checkpoints:
        if one.name != last[one.called]:
            yield Expendable(one.name, f"{last[one.called]} has taken its place")


def _beyond(
    limit: int, checkpoints: Sequence[CheckpointCommitted], keep: Keep
) -> Iterator[Expendable]:
    ranked = worst_to_best(checkpoints, keep)
    snapshots = [one.name for one in checkpoints if one.snapshot]
    last = [one.name for one in checkpoints[-1:]]
    staying = {*last, *snapshots[-1:], *(one.name for one in ranked[-limit:])}
    for one in ranked:
        if one.name not in staying:
            yield Expendable(one.name, _reason(keep))


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
