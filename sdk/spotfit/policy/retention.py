"""Retention: which checkpoints are dropped, and the order of checkpoints by score."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from spotfit.core.errors import ConfigError
from spotfit.model.events import CheckpointCommitted
from spotfit.model.reporting import metrics_from_json
from spotfit.model.spec import RetentionConfig

_MISSING = object()
# Sort keys below every number's (2, score): a diverged model (NaN) is worse than one without a
# score.
_NAN_SCORE = (0, 0.0)
_MISSING_SCORE = (1, 0.0)


class DroppableCheckpoint(NamedTuple):
    """A checkpoint that may be dropped, and the reason."""

    name: str
    reason: str


def checkpoints_to_drop(
    checkpoints: Sequence[CheckpointCommitted],
    retention: RetentionConfig,
    *,
    protected: Collection[str] = (),
) -> tuple[DroppableCheckpoint, ...]:
    """Return the checkpoints that may be dropped, each with the reason. Pure.

    `checkpoints` are all committed ones in commit order; `protected` has the names of those whose
    validation is pending, which are never returned. First come those whose folder was overwritten.
    With `num_to_keep` follow the excess ones, worst first; the latest one and the latest one that a
    `Checkpointer` can resume from stay, so more than `num_to_keep` may remain. Without a limit,
    those follow whose requested name was committed again.

    The leader drops them and deletes their files; the caller of `get_all_reported_checkpoints` does
    not see them. Raises `ConfigError` if a score that is compared is not a number.
    """
    existing = without_overwritten(checkpoints)
    writers = {one.folder: one.name for one in existing}
    present = {*writers.values()}
    droppable = [
        DroppableCheckpoint(one.name, f"overwritten by {writers[one.folder]}")
        for one in checkpoints
        if one.name not in present
    ]
    if retention.num_to_keep is None:
        latest = {one.requested_name: one.name for one in existing}
        droppable += [
            DroppableCheckpoint(one.name, f"replaced by {latest[one.requested_name]}")
            for one in existing
            if one.name != latest[one.requested_name]
        ]
    else:
        droppable += _beyond_limit(retention.num_to_keep, existing, retention)
    return tuple(one for one in droppable if one.name not in protected)


def without_overwritten(checkpoints: Sequence[CheckpointCommitted]) -> list[CheckpointCommitted]:
    """Return the checkpoints, in the given commit order, whose files are still their own.

    Excludes those whose folder, written by user code, belongs to a later checkpoint.
    """
    last_index = {one.folder: n for n, one in enumerate(checkpoints)}
    return [one for n, one in enumerate(checkpoints) if last_index[one.folder] == n]


def _beyond_limit(
    limit: int, checkpoints: Sequence[CheckpointCommitted], retention: RetentionConfig
) -> Iterator[DroppableCheckpoint]:
    ranked = worst_to_best(checkpoints, retention)
    snapshots = [one.name for one in checkpoints if one.is_snapshot]
    latest = [one.name for one in checkpoints[-1:]]
    retained = {*latest, *snapshots[-1:], *(one.name for one in ranked[-limit:])}
    if retention.score_attribute is None:
        reason = f"num_to_keep={limit}: only the last {limit} are kept"
    else:
        best = f"{limit} best by {retention.score_attribute} ({retention.score_order})"
        reason = f"num_to_keep={limit}: only the latest and the {best} are kept"
    for one in ranked:
        if one.name not in retained:
            yield DroppableCheckpoint(one.name, reason)


def worst_to_best(
    checkpoints: Sequence[CheckpointCommitted], retention: RetentionConfig
) -> list[CheckpointCommitted]:
    """Sort checkpoints by score; of equal scores the later one is better. Returns a new list.

    `checkpoints` are in commit order, which is the result without `score_attribute`. A missing
    score is worse than every number and NaN is worst, with either `score_order`. Raises
    `ConfigError` if a score is not a number.
    """
    if retention.score_attribute is None:
        return list(checkpoints)
    return sorted(checkpoints, key=lambda one: _score_sort_key(one, retention))


def nested_metric(metrics: Any, path: str, default: Any = None) -> Any:
    """Return the value at a path such as "eval/loss" in nested metrics; `default` if there is none.

    A key that contains the slash takes precedence. A value that is None is returned as None.
    """
    if isinstance(metrics, dict):
        if path in metrics:
            return metrics[path]
        first, _, rest = path.partition("/")
        if rest and first in metrics:
            return nested_metric(metrics[first], rest, default)
    return default


def _score_sort_key(
    checkpoint: CheckpointCommitted, retention: RetentionConfig
) -> tuple[int, float]:
    score = metrics_from_json(
        nested_metric(checkpoint.metrics, retention.score_attribute or "", _MISSING)
    )
    if score is _MISSING:
        return _MISSING_SCORE
    if not isinstance(score, (int, float)):
        raise ConfigError(
            f"The score {retention.score_attribute!r} of {checkpoint.name} must be a number, "
            f"not {score!r}.",
            do="Report a number, or set another CheckpointConfig(checkpoint_score_attribute=...).",
        )
    if math.isnan(score):
        return _NAN_SCORE
    return (2, score if retention.score_order == "max" else -score)
