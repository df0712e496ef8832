"""LightGBM in four real workers: runs with kills give the model of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

lightgbm = pytest.importorskip("lightgbm")

from sklearn.datasets import load_breast_cancer  # noqa: E402

import spotfit  # noqa: E402
from spotfit.lightgbm import (  # noqa: E402
    LightGBMTrainer,
    RayTrainReportCallback,
    get_network_params,
    train,
)
from spotfit.model.events import FailureCause  # noqa: E402
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
PLAIN = {"objective": "binary", "max_depth": 3, "verbosity": -1}
SAMPLED = {
    **PLAIN,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "feature_fraction": 0.7,
    "seed": 5,
}


class Disturb:
    """Calls a disturbance before each round."""

    before_iteration = True

    def __init__(self, disturbance: Disturbance, config: dict[str, Any]) -> None:
        self.disturbance, self.config = disturbance, config

    def __call__(self, env: Any) -> None:
        self.disturbance(self.config, env.iteration)


def datasets() -> tuple[Any, Any]:
    """The rows of this rank, and the same rows for the evaluation on all ranks."""
    features, labels = load_breast_cancer(return_X_y=True)
    context = spotfit.get_context()
    part = slice(context.get_world_rank(), 400, context.get_world_size())
    rows = lightgbm.Dataset(features[part], label=labels[part])
    return rows, lightgbm.Dataset(features[400:], label=labels[400:], reference=rows)


def training_function(params: dict[str, Any], disturbance: Disturbance) -> Any:
    def train_in_segments(config: dict[str, Any]) -> None:
        rows, evaluated = datasets()
        train(
            params,
            rows,
            ROUNDS,
            valid_sets=[evaluated],
            callbacks=[Disturb(disturbance, config)],
            rounds_per_segment=5,
        )

    return train_in_segments


def trainer(cloud: LiveTestCloud, fn: Any, name: str) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn, workers=4, nodes=2, max_failures=2, name=name, trainer_type=LightGBMTrainer
    )


@pytest.mark.parametrize("params", [PLAIN, SAMPLED], ids=["plain", "sampled"])
def test_killed_workers_do_not_change_the_model(
    cloud: LiveTestCloud, params: dict[str, Any]
) -> None:
    calm: Any = trainer(cloud, training_function(params, no_disturbance), "calm").fit()
    stormy: Any = trainer(cloud, training_function(params, worker_kills), "stormy").fit()
    assert read_file(stormy, "model.txt") == read_file(calm, "model.txt")
    assert stormy.metrics == calm.metrics
    assert RayTrainReportCallback.get_model(stormy.checkpoint).current_iteration() == ROUNDS
    closed = cloud.rounds_closed("stormy")
    assert [one.cause for one in closed] == [FailureCause.WORKER] * 2
    assert [one.reason.partition(":")[0] for one in closed] == ["rank 1 died", "rank 0 died"]


def test_a_killed_machine_does_not_change_the_model(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(SAMPLED, no_disturbance), "calm").fit()
    run = trainer(cloud, training_function(SAMPLED, machine_kill), "run").submit()
    result = kill_machine_of_rank(cloud, 3, run)
    assert read_file(result, "model.txt") == read_file(calm, "model.txt")
    view = cloud.view("run")
    assert view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_library_training_with_network_parameters_gives_one_model(cloud: LiveTestCloud) -> None:
    def train_distributed() -> str:
        rows, _ = datasets()
        params = {**PLAIN, "tree_learner": "data", "pre_partition": True, **get_network_params()}
        model = lightgbm.train(params, rows, 5, callbacks=[RayTrainReportCallback()])
        return str(model.model_to_string())

    result = trainer(cloud, train_distributed, "run").fit()
    assert read_file(result, "model.txt").decode() == result.return_value
    leaves = sum(result.return_value.count(name) for name in ("Tree=",))
    assert leaves == 5
    # The rows of all workers: LightGBM stores how many rows each leaf has.
    counts = result.return_value.partition("leaf_count=")[2].splitlines()[0]
    assert sum(map(int, counts.split())) == 400


def test_workers_that_would_train_models_of_their_own_are_rejected(cloud: LiveTestCloud) -> None:
    def train_alone() -> None:
        rows, _ = datasets()
        lightgbm.train(PLAIN, rows, 5, callbacks=[RayTrainReportCallback()])

    with pytest.raises(spotfit.WorkerGroupError, match="would train a LightGBM model of its own"):
        trainer(cloud, train_alone, "run").fit()
    assert len(cloud.rounds_opened()) == 1, "not retried"


def test_a_resized_group_continues_with_all_rows(cloud: LiveTestCloud) -> None:
    """Four ranks train some segments, and two ranks, which share all rows, the others."""
    calm: Any = trainer(cloud, training_function(SAMPLED, no_disturbance), "calm").fit()
    handle = cloud.submit(
        training_function(SAMPLED, machine_kill),
        workers=(2, 4),
        nodes=2,
        trainer_type=LightGBMTrainer,
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


def trees_of(result: Any, rounds: int) -> list[Any]:
    model = RayTrainReportCallback.get_model(result.checkpoint)
    assert model.num_trees() == ROUNDS
    trees: list[Any] = model.dump_model(num_iteration=rounds)["tree_info"]
    return trees


def test_killed_workers_do_not_change_the_model_of_a_training_without_a_function(
    cloud: LiveTestCloud,
) -> None:
    def result_of(disturbance: Disturbance, name: str) -> Any:
        return LightGBMTrainer(
            params=SAMPLED,
            datasets={"train": load_frame, "valid": load_part},
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
    assert read_file(stormy, "model.txt") == read_file(calm, "model.txt")
    assert stormy.metrics == calm.metrics
    assert set(calm.metrics) == {"train-binary_logloss", "valid-binary_logloss"}
    assert len(cloud.rounds_opened("stormy")) == 2


def load_frame() -> Any:
    return load_breast_cancer(as_frame=True).frame


def load_part() -> Any:
    return load_frame()[::3]
