"""RayTrainReportCallback of XGBoost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

xgboost = pytest.importorskip("xgboost")

import numpy  # noqa: E402

from spotfit.checkpoint.committed import CheckpointReport  # noqa: E402
from spotfit.worker.local_session import LocalSession  # noqa: E402
from spotfit.worker.training_api import use_session  # noqa: E402
from spotfit.xgboost import RayTrainReportCallback  # noqa: E402


class Recorder(LocalSession):
    """Records whether each report has a checkpoint."""

    def __init__(self) -> None:
        super().__init__("run")
        self.reports: list[bool] = []

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        self.reports.append(False)
        super().report_metrics(metrics, dir_name)

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        super().report_checkpoint(metrics, report)
        self.reports[-1] = True  # it reports the metrics as well


def run(rounds: int, **options: Any) -> tuple[Recorder, Any]:
    labels = numpy.arange(20) % 2
    rows = xgboost.DMatrix(numpy.arange(40.0).reshape(20, 2), label=labels)
    session = Recorder()
    with use_session(session):
        model = xgboost.train(
            {"objective": "binary:logistic"},
            rows,
            rounds,
            evals=[(rows, "train")],
            verbose_eval=False,
            callbacks=[RayTrainReportCallback(**options)],
        )
    return session, model


@pytest.mark.parametrize(
    ("rounds", "options", "reports"),
    [
        (3, {}, [False, False, False, True]),
        (3, {"checkpoint_at_end": False}, [False] * 3),
        (4, {"frequency": 2}, [False, True, False, True]),
        (3, {"frequency": 2}, [False, True, False, True]),
        (3, {"frequency": 2, "checkpoint_at_end": False}, [False, True, False]),
    ],
)
def test_checkpoints_are_reported_as_in_ray(
    rounds: int, options: dict[str, Any], reports: list[bool]
) -> None:
    session, _ = run(rounds, **options)
    assert session.reports == reports
    assert list(session.metrics or {}) == ["train-logloss"]


@pytest.mark.parametrize("filename", ["model.ubj", "model.json"])
def test_the_reported_model_can_be_read(filename: str) -> None:
    session, model = run(3, filename=filename)
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    loaded = RayTrainReportCallback.get_model(checkpoint, filename)
    assert loaded.save_raw() == model.save_raw()
    with checkpoint.as_directory() as directory:
        is_json = Path(directory, filename).read_bytes().startswith(b'{"')
    assert is_json is (filename == "model.json")
