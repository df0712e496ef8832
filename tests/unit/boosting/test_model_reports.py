"""Selection of metrics, and models as checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from spotfit.boosting.model_reports import ReportSettings, read_model, report_model
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.model.topology import Ranks
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import use_session

RESULTS = {"train-auc": 0.9, "test-auc": 0.8}


def settings(metrics: Any = None, **changes: Any) -> ReportSettings:
    defaults: dict[str, Any] = {
        "filename": "model.txt",
        "frequency": 0,
        "checkpoint_at_end": True,
        "results_postprocessing_fn": None,
    }
    return ReportSettings(metrics, **(defaults | changes))


@pytest.mark.parametrize(
    ("metrics", "selected"),
    [
        (None, RESULTS),
        ("test-auc", {"test-auc": 0.8}),
        (["test-auc"], {"test-auc": 0.8}),
        ({"score": "test-auc"}, {"score": 0.8}),
    ],
)
def test_metrics_are_selected_and_renamed(metrics: Any, selected: dict[str, float]) -> None:
    assert settings(metrics).select_metrics(RESULTS) == selected


def test_selected_metrics_are_postprocessed() -> None:
    doubled = settings(
        "test-auc",
        results_postprocessing_fn=lambda one: {name: 2 * value for name, value in one.items()},
    )
    assert doubled.select_metrics(RESULTS) == {"test-auc": 1.6}


def test_a_metric_that_was_not_evaluated_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'test-auc'"):
        settings("tst-auc").select_metrics(RESULTS)


def test_a_metric_without_evaluation_sets_is_rejected() -> None:
    with pytest.raises(ConfigError, match="Pass evaluation sets"):
        settings("test-auc").select_metrics({})


def test_checkpoints_are_due_every_few_rounds() -> None:
    every_third = settings(frequency=3)
    assert [n for n in range(1, 8) if every_third.is_checkpoint_due(n)] == [3, 6]
    assert not settings().is_checkpoint_due(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frequency": -1}, "must not be negative"),
        ({"frequency": True}, "must be an int"),
        ({"filename": "a/b"}, "is not the name of a file"),
    ],
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_rank_0_reports_the_files() -> None:
    session = LocalSession("run")
    with use_session(session):
        report_model({"auc": 1.0}, {"model.txt": b"trees"}, progress=0.5)
    assert session.metrics == {"auc": 1.0}
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    assert read_model(checkpoint, "model.txt") == b"trees"


class Peers:
    """A launcher's group in which this process has rank 1."""

    ranks = Ranks(world_rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0)

    def barrier(self) -> None: ...

    def broadcast(self, value: Any) -> Any:
        return value


def test_other_ranks_report_metrics_only() -> None:
    session = LocalSession("run", Peers())
    with use_session(session):
        report_model({"auc": 1.0}, {"model.txt": b"trees"})
    assert session.metrics == {"auc": 1.0}
    assert session.latest_checkpoint() is None


def test_a_missing_model_is_rejected_with_the_names_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "model.ubj").touch()
    with pytest.raises(NotFoundError, match=r"model\.ubj"):
        read_model(Checkpoint.from_directory(tmp_path), "model.json")
