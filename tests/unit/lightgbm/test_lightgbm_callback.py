"""RayTrainReportCallback of LightGBM, without LightGBM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spotfit.checkpoint.committed import CheckpointReport
from spotfit.core.errors import ConfigError
from spotfit.frameworks.lightgbm import lightgbm_config
from spotfit.lightgbm import RayTrainReportCallback
from spotfit.lightgbm.lightgbm_callback import named_results
from spotfit.model.topology import Ranks
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import use_session


class Recorder(LocalSession):
    """Records whether each report has a checkpoint."""

    def __init__(self, peers: Any = None) -> None:
        super().__init__("run", peers)
        self.reports: list[bool] = []

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        self.reports.append(False)
        super().report_metrics(metrics, dir_name)

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        super().report_checkpoint(metrics, report)
        self.reports[-1] = True  # it reports the metrics as well


class Model:
    """A booster."""

    def model_to_string(self, num_iteration: int) -> str:
        return f"all {num_iteration}"


def run(
    rounds: int, callback: RayTrainReportCallback, session: Recorder, params: Any = None
) -> None:
    with use_session(session):
        for number in range(rounds):
            callback(
                SimpleNamespace(
                    model=Model(),
                    params=params or {},
                    iteration=number,
                    begin_iteration=0,
                    end_iteration=rounds,
                    evaluation_result_list=[("test", "auc", number / 10, True)],
                )
            )


def test_a_checkpoint_has_the_share_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Recorder()
    shares: list[float] = []
    monkeypatch.setattr(session.snapshot_channel, "record_progress", shares.append)
    run(5, RayTrainReportCallback(frequency=2), session)
    assert shares == [0.4, 0.8, 1.0]


@pytest.mark.parametrize(
    ("rounds", "options", "reports"),
    [
        (3, {}, [False, False, True]),
        (3, {"checkpoint_at_end": False}, [False] * 3),
        (5, {"frequency": 2}, [False, True, False, True, True]),
        (3, {"frequency": 2, "checkpoint_at_end": False}, [False, True, False]),
    ],
)
def test_checkpoints_are_reported_as_in_ray(
    rounds: int, options: dict[str, Any], reports: list[bool]
) -> None:
    session = Recorder()
    run(rounds, RayTrainReportCallback(**options), session)
    assert session.reports == reports
    assert session.metrics == {"test-auc": (rounds - 1) / 10}


def test_results_of_earlier_versions_are_read() -> None:
    assert named_results([("test", "auc", 1, True), ("test", "l2", 2, False)]) == {
        "test-auc": 1.0,
        "test-l2": 2.0,
    }


class Peers:
    """A launcher's group of two processes."""

    ranks = Ranks(world_rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0)

    def barrier(self) -> None: ...

    def broadcast(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("has_network", [False, True])
def test_separate_models_of_a_trainers_workers_are_rejected(
    has_network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lightgbm_config, "_networks", [SimpleNamespace(release=None)] if has_network else []
    )
    session = Recorder(Peers())
    if has_network:
        with pytest.raises(ConfigError, match="a LightGBM model of its own"):
            run(1, RayTrainReportCallback(), session)
    run(0 if has_network else 1, RayTrainReportCallback(), session)
    params = {"num_machines": 2, "tree_learner": "data"}
    run(1, RayTrainReportCallback(), session, params)
    assert session.reports[-1]
