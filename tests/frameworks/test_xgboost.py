"""XGBoost in four real workers: runs with kills give the model of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

xgboost = pytest.importorskip("xgboost")

from sklearn.datasets import load_breast_cancer  # noqa: E402

import spotfit  # noqa: E402
from spotfit.model.events import FailureCause  # noqa: E402
from spotfit.xgboost import RayTrainReportCallback, XGBoostTrainer, train  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    Disturbance,
    kill_machine_of_rank,
    machine_kill,
    no_disturbance,
    read_file,
    worker_kills,
)
from tests.live.cloud import LiveTestCloud, eventually  # noqa: E402

ROUNDS = 40
PLAIN = {"objective": "binary:logistic", "eval_metric": "logloss", "max_depth": 3}
SAMPLED = {**PLAIN, "subsample": 0.7, "colsample_bytree": 0.7, "seed": 5}


class Disturb(xgboost.callback.TrainingCallback):  # type: ignore[name-defined]  # no types
    """Calls a disturbance before each round."""

    def __init__(self, disturbance: Disturbance, config: dict[str, Any]) -> None:
        super().__init__()
        self.disturbance, self.config = disturbance, config

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self.disturbance(self.config, epoch)
        return False


def own_rows() -> Any:
    features, labels = load_breast_cancer(return_X_y=True)
    context = spotfit.get_context()
    part = slice(context.get_world_rank(), None, context.get_world_size())
    return xgboost.DMatrix(features[part], label=labels[part])


def training_function(params: dict[str, Any], disturbance: Disturbance) -> Any:
    def train_in_segments(config: dict[str, Any]) -> None:
        rows = own_rows()
        callbacks = [Disturb(disturbance, config), RayTrainReportCallback(metrics="train-logloss")]
        train(
            params,
            rows,
            ROUNDS,
            evals=[(rows, "train")],
            callbacks=callbacks,
            verbose_eval=False,
            rounds_per_segment=5,
        )

    return train_in_segments


def trainer(cloud: LiveTestCloud, fn: Any, name: str) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn, workers=4, nodes=2, max_failures=2, name=name, trainer_type=XGBoostTrainer
    )


@pytest.mark.parametrize("params", [PLAIN, SAMPLED], ids=["plain", "sampled"])
def test_killed_workers_do_not_change_the_model(
    cloud: LiveTestCloud, params: dict[str, Any]
) -> None:
    calm: Any = trainer(cloud, training_function(params, no_disturbance), "calm").fit()
    stormy: Any = trainer(cloud, training_function(params, worker_kills), "stormy").fit()
    assert read_file(stormy, "model.ubj") == read_file(calm, "model.ubj")
    assert stormy.metrics == calm.metrics
    assert RayTrainReportCallback.get_model(stormy.checkpoint).num_boosted_rounds() == ROUNDS
    closed = cloud.rounds_closed("stormy")
    assert [one.cause for one in closed] == [FailureCause.WORKER] * 2
    assert [one.reason.partition(":")[0] for one in closed] == ["rank 1 died", "rank 0 died"]


def test_a_killed_machine_does_not_change_the_model(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(SAMPLED, no_disturbance), "calm").fit()
    run = trainer(cloud, training_function(SAMPLED, machine_kill), "run").submit()
    result = kill_machine_of_rank(cloud, 3, run)
    assert read_file(result, "model.ubj") == read_file(calm, "model.ubj")
    view = cloud.view("run")
    assert view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_a_resized_group_continues_with_all_rows(cloud: LiveTestCloud) -> None:
    """Four ranks train some segments, and two ranks, which share all rows, the others."""
    calm: Any = trainer(cloud, training_function(SAMPLED, no_disturbance), "calm").fit()
    handle = cloud.submit(
        training_function(SAMPLED, machine_kill),
        workers=(2, 4),
        nodes=2,
        trainer_type=XGBoostTrainer,
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
    )
    cloud.wait_for_mark("waiting-3")
    eventually(lambda: len(cloud.view().checkpoints) == 3)
    cloud.reclaimer.set_capacity(1)
    result: Any = kill_machine_of_rank(cloud, 3, handle)
    cloud.reclaimer.set_capacity(None)
    assert [one.round.world_size for one in cloud.rounds_opened()] == [4, 2]
    # The machine is killed in round 17, after three segments of five rounds.
    assert trees_of(result, 15) == trees_of(calm, 15)
    assert trees_of(result, ROUNDS) != trees_of(calm, ROUNDS), "other parts of the rows"


def trees_of(result: Any, rounds: int) -> list[str]:
    model = RayTrainReportCallback.get_model(result.checkpoint)
    dump: list[str] = model.get_dump()
    assert len(dump) == ROUNDS
    return dump[:rounds]


def test_killed_workers_do_not_change_the_model_of_a_training_without_a_function(
    cloud: LiveTestCloud,
) -> None:
    def result_of(disturbance: Disturbance, name: str) -> Any:
        return XGBoostTrainer(
            params=SAMPLED,
            datasets={"train": load_breast_cancer(as_frame=True).frame, "valid": load_part},
            label_column="target",
            num_boost_round=20,
            rounds_per_segment=5,
            callbacks=[Disturb(disturbance, {"marks": str(cloud.marks)})],
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(
                name=name,
                storage_path=cloud.storage,
                failure_config=spotfit.FailureConfig(max_failures=1),
            ),
            provisioner=cloud.options(nodes=2),
        ).fit()

    calm = result_of(no_disturbance, "calm")
    stormy = result_of(worker_kills, "stormy")
    assert read_file(stormy, "model.ubj") == read_file(calm, "model.ubj")
    assert stormy.metrics == calm.metrics
    assert set(calm.metrics) == {"train-logloss", "valid-logloss"}
    assert len(cloud.rounds_opened("stormy")) == 2


def load_part() -> Any:
    return load_breast_cancer(as_frame=True).frame[::3]
