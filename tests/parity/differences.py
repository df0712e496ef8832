"""Intended differences from Ray Train with their reasons. The migration guide lists all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

INTENTIONAL_DIFFERENCES: Mapping[str, str] = {
    "TrainRunContext": "it is passed to callbacks, which read it and never create one",
}
"""A name, or a name and its member."""


class BehaviorDifference(NamedTuple):
    """The result of a probe, and the text of the guide that documents it."""

    expected: Any
    guide: str


_TRAINING_FAILED = {"is": ["TrainingFailedError", "WorkerGroupError"]}

BEHAVIOR_DIFFERENCES: Mapping[str, BehaviorDifference] = {
    "metrics_without_a_checkpoint": BehaviorDifference([{"loss": 1}, None, []], "`Result.metrics`"),
    "a_name_used_twice": BehaviorDifference(
        [[{"n": 1}], ["file0"]], "a `checkpoint_dir_name` that was used"
    ),
    "a_score_that_is_missing_where_least_is_best": BehaviorDifference(
        [{"rank": 0, "score": 1}, {"rank": 0, "score": 0}], "a checkpoint without the score"
    ),
    "numbers_of_numpy_in_the_metrics_of_a_checkpoint": BehaviorDifference(None, "numbers of numpy"),
    "report_without_a_dictionary": BehaviorDifference(_TRAINING_FAILED, "`report(5)`"),
    "elastic_group_with_minimum_0": BehaviorDifference(
        {"is": ["ValueError"]}, "`num_workers=(0, n)`"
    ),
    "non_numeric_score": BehaviorDifference(
        [{"is": ["ControllerError", "TrainingFailedError"]}, {"is": []}], "a score that is no"
    ),
    "invalid_calls_in_local_mode": BehaviorDifference(
        [True, {"is": ["KeyError"]}, {"is": ["RuntimeError"]}], "an unknown dataset"
    ),
    "worker_that_exits_immediately": BehaviorDifference(
        [_TRAINING_FAILED, "xx"], "a worker that dies in its first"
    ),
    "a_checkpoint_in_local_mode": BehaviorDifference(
        [True, True], "`get_checkpoint` with `num_workers=0`"
    ),
}
"""Probes of tests/parity/behaviour.py with different results than with Ray Train."""
