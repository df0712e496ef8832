"""Retention: which checkpoints are dropped, and the order by score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.model.events import CheckpointCommitted
from spotfit.model.reporting import metrics_to_json
from spotfit.model.spec import RetentionConfig
from spotfit.policy.retention import (
    checkpoints_to_drop,
    nested_metric,
    without_overwritten,
    worst_to_best,
)


def committed(name: str, **metrics: Any) -> CheckpointCommitted:
    return CheckpointCommitted(name=name, round=1, report_index=0, metrics=metrics, ranks=(0,))


def scored(*scores: Any) -> list[CheckpointCommitted]:
    return [committed(f"c{n}", score=score) for n, score in enumerate(scores)]


def names(checkpoints: Sequence[Any]) -> list[str]:
    return [one.name for one in checkpoints]


def test_without_a_limit_nothing_is_dropped() -> None:
    assert checkpoints_to_drop(scored(1, 2, 3), RetentionConfig()) == ()


def test_without_a_limit_a_reused_name_replaces_the_previous_checkpoint() -> None:
    again = [replace(committed(f"last@1-{n}"), report_index=n) for n in (2, 3)]
    retained = [committed("last"), committed("other"), *again]
    going = checkpoints_to_drop(retained, RetentionConfig())
    assert names(going) == ["last", "last@1-2"]
    assert going[0].reason == "replaced by last@1-3"
    assert names(checkpoints_to_drop(retained, RetentionConfig(), protected={"last"})) == [
        "last@1-2"
    ]
    assert names(checkpoints_to_drop(retained, RetentionConfig(num_to_keep=3))) == ["last"], (
        "num_to_keep alone decides"
    )


def test_without_a_score_the_oldest_are_dropped() -> None:
    going = checkpoints_to_drop(scored(9, 8, 7), RetentionConfig(num_to_keep=2))
    assert [one.name for one in going] == ["c0"]
    assert going[0].reason == "num_to_keep=2: only the last 2 are kept"


def test_the_latest_snapshot_is_retained() -> None:
    """Checkpoints saved by user code must not displace the training state."""
    snapshots = [replace(committed(name), is_snapshot=True) for name in ("s1", "s2")]
    retained = [*snapshots, committed("own1"), committed("own2")]
    assert names(checkpoints_to_drop(retained, RetentionConfig(num_to_keep=1))) == ["s1", "own1"]


def test_with_a_score_the_worst_are_dropped() -> None:
    assert names(
        checkpoints_to_drop(
            scored(1, 3, 2, 5), RetentionConfig(num_to_keep=2, score_attribute="score")
        )
    ) == [
        "c0",
        "c2",
    ]
    assert names(
        checkpoints_to_drop(
            scored(1, 3, 2, 0.5),
            RetentionConfig(num_to_keep=2, score_attribute="score", score_order="min"),
        )
    ) == [
        "c1",
        "c2",
    ]


def test_the_latest_is_retained_whatever_its_score() -> None:
    assert (
        names(
            checkpoints_to_drop(
                scored(5, 6, 1), RetentionConfig(num_to_keep=2, score_attribute="score")
            )
        )
        == []
    )
    assert names(
        checkpoints_to_drop(
            scored(5, 6, 1), RetentionConfig(num_to_keep=1, score_attribute="score")
        )
    ) == ["c0"]


def test_protected_checkpoints_are_retained() -> None:
    assert names(
        checkpoints_to_drop(scored(1, 2, 3, 4), RetentionConfig(num_to_keep=1), protected={"c1"})
    ) == [
        "c0",
        "c2",
    ]


CUSTOM = [
    replace(committed("custom", score=9), custom_folder="custom"),
    committed("other", score=5),
    replace(committed("custom@1-2", score=1), report_index=2, custom_folder="custom"),
]


@pytest.mark.parametrize(
    "keep",
    [
        RetentionConfig(),
        RetentionConfig(num_to_keep=3),
        RetentionConfig(num_to_keep=1, score_attribute="score"),
        RetentionConfig(num_to_keep=9, score_attribute="score", score_order="min"),
    ],
)
def test_an_overwritten_checkpoint_is_always_dropped(
    keep: RetentionConfig,
) -> None:
    assert checkpoints_to_drop(CUSTOM, keep) == (("custom", "overwritten by custom@1-2"),)
    assert names(without_overwritten(CUSTOM)) == ["other", "custom@1-2"]
    assert "custom" not in names(checkpoints_to_drop(CUSTOM, keep, protected={"custom"}))


def test_an_overwritten_checkpoint_does_not_count_against_the_limit() -> None:
    assert names(
        checkpoints_to_drop(CUSTOM, RetentionConfig(num_to_keep=2, score_attribute="score"))
    ) == ["custom"]


def test_a_reused_folder_is_retained_with_its_latest_checkpoint() -> None:
    twice = [committed("same"), committed("other"), committed("same")]
    assert names(checkpoints_to_drop(twice, RetentionConfig(num_to_keep=1))) == ["other"]


def test_a_score_may_be_nested() -> None:
    nest = [committed("a", eval={"loss": 2}), committed("b", eval={"loss": 1})]
    assert names(worst_to_best(nest, RetentionConfig(score_attribute="eval/loss"))) == ["b", "a"]
    assert nested_metric({"eval/loss": 5, "eval": {"loss": 6}}, "eval/loss") == 5


@pytest.mark.parametrize("order", ["max", "min"])
def test_a_missing_score_is_worst_except_for_nan(order: Any) -> None:
    nan = committed("nan", score={"__float__": "nan"})
    low = committed("low", score={"__float__": "-inf"})
    ranked = worst_to_best(
        [low, committed("missing"), nan],
        RetentionConfig(score_attribute="score", score_order=order),
    )
    assert names(ranked) == ["nan", "missing", "low"]
    assert b'{"__float__":"nan"}' in metrics_to_json({"score": math.nan})


def test_of_equal_scores_the_later_is_better() -> None:
    assert names(worst_to_best(scored(1, 1, 1), RetentionConfig(score_attribute="score"))) == [
        "c0",
        "c1",
        "c2",
    ]


@pytest.mark.parametrize("score", ["0.9", None, [1], {"a": 1}])
def test_a_score_that_is_not_a_number_raises(score: Any) -> None:
    with pytest.raises(ValueError, match="'score' of c0 must be a number"):
        checkpoints_to_drop(
            scored(score, 1), RetentionConfig(num_to_keep=1, score_attribute="score")
        )
