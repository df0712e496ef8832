"""Where we mean to differ from Ray Train, each with its reason. The migration guide names all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

INTENTIONAL_DIFFERENCES: Mapping[str, str] = {
    "TrainRunContext": "it is given to callbacks, which read it; nobody makes one",
}
"""A name, or a name and its member."""


class BehaviorDifference(NamedTuple):
    """What a probe sees here, and the words of the guide that say so."""

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
    "a_report_that_is_no_dictionary": BehaviorDifference(_TRAINING_FAILED, "`report(5)`"),
    "a_group_that_may_shrink_to_nobody": BehaviorDifference(
        {"is": ["ValueError"]}, "`num_workers=(0, n)`"
    ),
    "a_score_that_is_no_number": BehaviorDifference(
        [{"is": ["ControllerError", "TrainingFailedError"]}, {"is": []}], "a score that is no"
    ),
    "mistakes_in_local_mode": BehaviorDifference(
        [True, {"is": ["KeyError"]}, {"is": ["RuntimeError"]}], "an unknown dataset"
    ),
    "dying_in_the_first_instant": BehaviorDifference(
        [_TRAINING_FAILED, "xx"], "a worker that dies in its first"
    ),
    "a_checkpoint_in_local_mode": BehaviorDifference(
        [True, True], "`get_checkpoint` with `num_workers=0`"
    ),
}
"""Probes of tests/parity/behaviour.py that see something else here than with Ray Train."""
