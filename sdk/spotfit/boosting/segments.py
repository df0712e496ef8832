"""Segments: rounds of boosting between two checkpoints, and what a checkpoint holds beside a model.

Neither library stores the state of its random generators in a model: training that continues from
one samples other rows than training that was not interrupted. Therefore each segment is one call of
the library's `train` that begins from the serialized model, in an undisturbed run as well, with
seeds that depend on the number of rounds done (docs/decisions/0066).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.codec import DECODE_ERRORS
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.worker.training_api import TrainSession, require_session

STATE_FILENAME = "segments.msgpack"
"""The file of a `SegmentState` in a checkpoint. Not JSON, which has no NaN."""
DEFAULT_ROUNDS_PER_SEGMENT = 10

_BOOSTER_NAMES = ("booster", "boosting", "boosting_type", "boost")
_NOT_CONTINUED = ("gblinear", "rf", "random_forest")
_trained_sessions: WeakSet[TrainSession] = WeakSet()

EvaluationHistory = dict[str, dict[str, list[float]]]
"""Results of the evaluations: by name of the set and of the metric, one per round."""


class SegmentState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a training at the end of a segment, without its model."""

    rounds_done: int = 0
    """Including those of a model that the training has begun from."""
    history: EvaluationHistory = {}
    maximized: tuple[tuple[str, str], ...] = ()
    """Sets and metrics of which higher values are better. Only LightGBM reports that."""
    early_stopping: tuple[dict[str, Any], ...] = ()
    """The state of XGBoost's callbacks for early stopping, in their order."""
    best_iteration: int = 0
    """LightGBM's, which counts from 1; 0 without early stopping. XGBoost's is in the model."""
    best_score: dict[str, dict[str, float]] = {}
    """LightGBM's, by name of the set and of the metric."""
    is_finished: bool = False
    """Whether early stopping or another callback has ended the training."""

    def after_segment(
        self, rounds: int, evaluations: EvaluationHistory, **changes: Any
    ) -> SegmentState:
        """Return the state after `rounds` more rounds with these results."""
        history = extend_history(self.history, evaluations)
        return replace(self, rounds_done=self.rounds_done + rounds, history=history, **changes)


def extend_history(before: EvaluationHistory, after: EvaluationHistory) -> EvaluationHistory:
    """Return the results of both, in this order; the arguments are not changed."""
    return {
        name: {
            metric: [*before.get(name, {}).get(metric, ()), *values]
            for metric, values in metrics.items()
        }
        for name, metrics in {**before, **after}.items()
    }


def check_first_training() -> None:
    """Raise `ConfigError` if `train()` was called before in this session.

    The checkpoints of a run are those of one model: a second call would continue the first one's.
    Raises `SessionMisuseError` outside of a training function.
    """
    session = require_session("train")
    if session in _trained_sessions:
        raise ConfigError(
            "train() was called before in this training function. The second call would continue "
            "from the checkpoint of the first one and return its model.",
            do="Call train() once per training function, and train each further model in a run of "
            "its own.",
        )
    _trained_sessions.add(session)


def check_booster(params: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a kind of model that neither library can continue in segments."""
    for name in _BOOSTER_NAMES:
        if params.get(name) in _NOT_CONTINUED:
            raise ConfigError(
                f'train() does not support "{name}": "{params[name]}": such a model cannot be '
                "continued in segments.",
                do="Use the library's own train with a RayTrainReportCallback, in a training "
                "function.",
            )


def check_rounds(rounds_per_segment: Any, num_boost_round: Any) -> None:
    """Raise `ConfigError` or `ConfigTypeError` unless both are positive integers."""
    values = {"rounds_per_segment": rounds_per_segment, "num_boost_round": num_boost_round}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigTypeError(
                f"train({name}={value!r}) must be an int, not {type(value).__name__}.",
                do=f"Write a number of rounds, such as {name}=10.",
            )
        if value < 1:
            raise ConfigError(
                f"train({name}={value}) must be at least 1.",
                do=f"Write a number of rounds, such as {name}=10.",
            )


def load_segment(checkpoint: Checkpoint, filename: str) -> tuple[bytes, SegmentState]:
    """Return model and state of a checkpoint that a segment has ended with.

    Downloads the checkpoint if it is not local. Raises `ConfigError` if a file is missing or
    invalid: it was reported by other code, or with another `filename` of the model.
    """
    with checkpoint.as_directory() as directory:
        try:
            model = Path(directory, filename).read_bytes()
            encoded = Path(directory, STATE_FILENAME).read_bytes()
            return model, msgspec.msgpack.decode(encoded, type=SegmentState)
        except (FileNotFoundError, *DECODE_ERRORS) as error:
            raise ConfigError(
                f"train() cannot continue from {checkpoint}: {error}",
                do="Continue only runs that were trained with the same train() and the same "
                "filename, or give this run another name.",
            ) from error


def encode_state(state: SegmentState) -> bytes:
    """Return the content of `STATE_FILENAME`."""
    return msgspec.msgpack.encode(state)
