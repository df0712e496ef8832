"""The state at the end of a segment, in a checkpoint beside the model."""

import math
from pathlib import Path
from typing import Any

import pytest

from spotfit.boosting.segments import (
    STATE_FILENAME,
    SegmentState,
    check_booster,
    check_first_training,
    check_rounds,
    encode_state,
    extend_history,
    load_segment,
)
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import use_session


def write_checkpoint(directory: Path, state: SegmentState) -> Checkpoint:
    (directory / "model.txt").write_bytes(b"trees")
    (directory / STATE_FILENAME).write_bytes(encode_state(state))
    return Checkpoint.from_directory(directory)


def test_a_segment_adds_rounds_and_results() -> None:
    first = SegmentState().after_segment(2, {"test": {"auc": [0.1, 0.2]}})
    second = first.after_segment(1, {"test": {"auc": [0.3]}}, is_finished=True)
    assert (first.rounds_done, second.rounds_done, second.is_finished) == (2, 3, True)
    assert second.history == {"test": {"auc": [0.1, 0.2, 0.3]}}
    assert first.history == {"test": {"auc": [0.1, 0.2]}}, "unchanged"


def test_results_of_a_new_metric_begin_with_its_first_segment() -> None:
    assert extend_history({"a": {"x": [1.0]}}, {"a": {"y": [2.0]}, "b": {"x": [3.0]}}) == {
        "a": {"y": [2.0]},
        "b": {"x": [3.0]},
    }


def test_model_and_state_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    state = SegmentState(
        rounds_done=7,
        history={"test": {"auc": [math.inf, 0.1 + 0.2]}},
        maximized=(("test", "auc"),),
        early_stopping=({"current_rounds": 1, "maximize": None},),
    )
    assert load_segment(write_checkpoint(tmp_path, state), "model.txt") == (b"trees", state)


def test_results_that_are_not_numbers_are_kept(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, SegmentState(history={"a": {"x": [math.nan]}}))
    _, state = load_segment(checkpoint, "model.txt")
    assert math.isnan(state.history["a"]["x"][0])


@pytest.mark.parametrize("filename", ["model.txt", STATE_FILENAME])
def test_a_checkpoint_of_other_code_is_rejected(tmp_path: Path, filename: str) -> None:
    checkpoint = write_checkpoint(tmp_path, SegmentState())
    (tmp_path / filename).unlink()
    with pytest.raises(ConfigError, match="cannot continue"):
        load_segment(checkpoint, "model.txt")


def test_a_damaged_state_is_rejected(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, SegmentState())
    (tmp_path / STATE_FILENAME).write_bytes(b"\xc1")
    with pytest.raises(ConfigError, match="cannot continue"):
        load_segment(checkpoint, "model.txt")


@pytest.mark.parametrize("rounds", [0, -1, True, 2.5, "3"])
def test_invalid_numbers_of_rounds_are_rejected(rounds: Any) -> None:
    with pytest.raises(ConfigError, match="num_boost_round="):
        check_rounds(10, rounds)
    with pytest.raises(ConfigError, match="rounds_per_segment="):
        check_rounds(rounds, 10)


def test_each_session_trains_one_model() -> None:
    for session in (LocalSession("a"), LocalSession("b")):
        with use_session(session):
            check_first_training()
            with pytest.raises(ConfigError, match="called before in this training function"):
                check_first_training()


@pytest.mark.parametrize(
    ("name", "value"),
    [("booster", "gblinear"), ("boost", "rf"), ("boosting_type", "random_forest")],
)
def test_models_that_cannot_be_continued_are_rejected(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f'"{name}": "{value}"'):
        check_booster({"seed": 1, name: value})


def test_models_of_trees_can_be_continued() -> None:
    check_booster({"booster": "dart", "boosting": "gbdt"})
