"""Retention: what may go is the worst, never the latest; what cannot be compared is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.model.events import CheckpointCommitted
from spotfit.model.metrics import metrics_to_json
from spotfit.model.spec import Keep
from spotfit.policy.retention import expendable, nested, standing, worst_to_best


def committed(name: str, **metrics: Any) -> CheckpointCommitted:
    return CheckpointCommitted(name, 1, 0, metrics, (0,))


def scored(*scores: Any) -> list[CheckpointCommitted]:
    return [committed(f"c{n}", score=score) for n, score in enumerate(scores)]


def names(checkpoints: Sequence[Any]) -> list[str]:
    return [one.name for one in checkpoints]


def test_without_a_limit_nothing_goes() -> None:
    assert expendable(scored(1, 2, 3), Keep()) == ()


def test_without_a_limit_one_makes_room_for_the_next_that_is_called_like_it() -> None:
    again = [replace(committed(f"last@1-{n}"), report=n) for n in (2, 3)]
    kept = [committed("last"), committed("other"), *again]
    going = expendable(kept, Keep())
    assert names(going) == ["last", "last@1-2"]
    assert going[0].why == "last@1-3 has taken its place"
    assert names(expendable(kept, Keep(), protected={"last"})) == ["last@1-2"]
    assert names(expendable(kept, Keep(last=3))) == ["last"], "then that alone decides"


def test_without_a_score_the_oldest_go() -> None:
    going = expendable(scored(9, 8, 7), Keep(last=2))
    assert [one.name for one in going] == ["c0"]
    assert going[0].why == "only the last 2 stay"


def test_the_latest_that_a_checkpointer_can_go_on_from_stays() -> None:
    """Reports of the user's own beside it must not cost the state of the training."""
    snapshots = [replace(committed(name), snapshot=True) for name in ("s1", "s2")]
    kept = [*snapshots, committed("own1"), committed("own2")]
    assert names(expendable(kept, Keep(last=1))) == ["s1", "own1"]


def test_with_a_score_the_worst_go() -> None:
    assert names(expendable(scored(1, 3, 2, 5), Keep(2, "score"))) == ["c0", "c2"]
    assert names(expendable(scored(1, 3, 2, 0.5), Keep(2, "score", "min"))) == ["c1", "c2"]


def test_the_latest_stays_however_bad_it_is() -> None:
    assert names(expendable(scored(5, 6, 1), Keep(2, "score"))) == []
    assert names(expendable(scored(5, 6, 1), Keep(1, "score"))) == ["c0"]


def test_what_is_being_validated_stays() -> None:
    assert names(expendable(scored(1, 2, 3, 4), Keep(1), protected={"c1"})) == ["c0", "c2"]


MINE = [
    replace(committed("mine", score=9), at="mine"),
    committed("other", score=5),
    replace(committed("mine@1-2", score=1), report=2, at="mine"),
]


@pytest.mark.parametrize("keep", [Keep(), Keep(3), Keep(1, "score"), Keep(9, "score", "min")])
def test_what_a_user_has_written_over_is_gone_however_much_is_kept_and_however_good(
    keep: Keep,
) -> None:
    assert expendable(MINE, keep) == (("mine", "mine@1-2 was written over it"),)
    assert names(standing(MINE)) == ["other", "mine@1-2"]
    assert "mine" not in names(expendable(MINE, keep, protected={"mine"}))


def test_what_was_written_over_takes_nobodys_place() -> None:
    assert names(expendable(MINE, Keep(2, "score"))) == ["mine"]


def test_a_folder_used_twice_stays_while_one_of_its_entries_does() -> None:
    twice = [committed("same"), committed("other"), committed("same")]
    assert names(expendable(twice, Keep(last=1))) == ["other"]


def test_a_score_may_lie_deeper() -> None:
    nest = [committed("a", eval={"loss": 2}), committed("b", eval={"loss": 1})]
    assert names(worst_to_best(nest, Keep(score="eval/loss"))) == ["b", "a"]
    assert nested({"eval/loss": 5, "eval": {"loss": 6}}, "eval/loss") == 5


@pytest.mark.parametrize("order", ["max", "min"])
def test_missing_is_worse_than_any_number_and_nan_is_worse_still(order: Any) -> None:
    nan = committed("nan", score={"__float__": "nan"})
    low = committed("low", score={"__float__": "-inf"})
    ranked = worst_to_best([low, committed("missing"), nan], Keep(score="score", order=order))
    assert names(ranked) == ["nan", "missing", "low"]
    assert b'{"__float__":"nan"}' in metrics_to_json({"score": math.nan})


def test_of_two_equal_ones_the_later_is_better() -> None:
    assert names(worst_to_best(scored(1, 1, 1), Keep(score="score"))) == ["c0", "c1", "c2"]


@pytest.mark.parametrize("score", ["0.9", None, [1], {"a": 1}])
def test_a_score_that_is_no_number_is_an_error(score: Any) -> None:
    with pytest.raises(ValueError, match="'score' of checkpoint c0 must be a number"):
        expendable(scored(score, 1), Keep(1, "score"))
