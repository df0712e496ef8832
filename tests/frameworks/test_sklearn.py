"""SklearnTrainer in a real worker, and a forest of four: kills do not change what is fitted."""

from __future__ import annotations

import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pandas = pytest.importorskip("pandas")

from sklearn.datasets import load_breast_cancer  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402

import spotfit  # noqa: E402
from spotfit.model.events import FailureCause  # noqa: E402
from spotfit.sklearn import SklearnTrainer  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    Disturbance,
    await_machine_kill,
    kill_machine_of_rank,
    kill_own_worker,
    machine_kill,
    no_disturbance,
    read_file,
    worker_kills,
)
from tests.live.cloud import LiveTestCloud  # noqa: E402


def load() -> Any:
    data = load_breast_cancer(as_frame=True)
    return data.frame


def test_an_estimator_is_fitted_on_a_machine(cloud: LiveTestCloud) -> None:
    trainer = SklearnTrainer(
        estimator=DecisionTreeClassifier(random_state=0),
        datasets={"train": load, "test": lambda: load()[::5]},
        label_column="target",
        cv=2,
        run_config=spotfit.RunConfig(name="run", storage_path=cloud.storage),
        provisioner=cloud.options(nodes=1),
    )
    result: Any = trainer.fit()
    assert result.metrics["test"]["test_score"] == 1.0, "rows of the training set"
    assert len(result.metrics["cv"]["test_score"]) == 2
    expected = DecisionTreeClassifier(random_state=0)
    frame = load()
    features = frame.drop(columns=["target"])
    expected.fit(features, frame["target"])
    model = SklearnTrainer.get_model(result.checkpoint)
    assert (model.predict(features) == expected.predict(features)).all()


FOREST = RandomForestClassifier(20, random_state=3)


def load_and_kill_worker(marks: str) -> Any:
    kill_own_worker(marks, 0, at_step=0, rank=0)
    return load()


def load_on_second_machine(marks: str) -> Any:
    await_machine_kill(marks, 0, at_step=0)
    return load()


def sklearn_trainer(cloud: LiveTestCloud, train: Any) -> SklearnTrainer:
    return SklearnTrainer(
        estimator=FOREST,
        datasets={"train": train},
        label_column="target",
        run_config=spotfit.RunConfig(
            name="run",
            storage_path=cloud.storage,
            failure_config=spotfit.FailureConfig(max_failures=1),
        ),
        provisioner=cloud.options(nodes=1),
    )


@pytest.mark.parametrize("lost", ["worker", "machine"])
def test_an_estimator_is_fitted_again_after_a_loss(cloud: LiveTestCloud, lost: str) -> None:
    marks = str(cloud.marks)
    if lost == "worker":
        result = sklearn_trainer(cloud, partial(load_and_kill_worker, marks)).fit()
    else:
        run = sklearn_trainer(cloud, partial(load_on_second_machine, marks)).submit()
        result = kill_machine_of_rank(cloud, 0, run)
    causes = {"worker": FailureCause.WORKER, "machine": FailureCause.PREEMPTION}
    assert [one.cause for one in cloud.rounds_closed("run")] == [causes[lost]]
    assert result.checkpoint is not None
    frame = load()
    features = frame.drop(columns=["target"])
    expected = RandomForestClassifier(20, random_state=3).fit(features, frame["target"])
    fitted = SklearnTrainer.get_model(result.checkpoint)
    assert (fitted.predict_proba(features) == expected.predict_proba(features)).all()


TREES, TREES_PER_CHECKPOINT = 32, 4


def forest_function(disturbance: Disturbance) -> Any:
    """Return a function that fits the trees of a worker; checkpoints have those of all workers."""

    def fit_trees(config: dict[str, Any]) -> int:
        rank = spotfit.get_context().get_world_rank()
        features, labels = load_breast_cancer(return_X_y=True)
        forest = RandomForestClassifier(0, warm_start=True, random_state=rank)
        if checkpoint := spotfit.get_checkpoint():
            with checkpoint.as_directory() as directory:
                forest = pickle.loads(Path(directory, f"forest-{rank}").read_bytes())
        found = int(forest.n_estimators)
        for trees in range(found + 1, TREES + 1):
            disturbance(config, trees)
            forest.set_params(n_estimators=trees).fit(features, labels)
            if trees % TREES_PER_CHECKPOINT == 0:
                with tempfile.TemporaryDirectory() as directory:
                    Path(directory, f"forest-{rank}").write_bytes(pickle.dumps(forest))
                    saved = spotfit.Checkpoint.from_directory(directory)
                    spotfit.report({"trees": trees}, checkpoint=saved)
        return found

    return fit_trees


def probabilities(result: spotfit.Result) -> list[Any]:
    features, _ = load_breast_cancer(return_X_y=True)
    forests = [pickle.loads(read_file(result, f"forest-{rank}")) for rank in range(4)]
    assert [len(forest.estimators_) for forest in forests] == [TREES] * 4
    return [forest.predict_proba(features).tolist() for forest in forests]


@pytest.mark.timeout(300)
def test_a_forest_of_four_workers_survives_killed_workers_and_a_killed_machine(
    cloud: LiveTestCloud,
) -> None:
    def trainer(name: str, disturbance: Disturbance) -> spotfit.DataParallelTrainer:
        return cloud.trainer(
            forest_function(disturbance), workers=4, nodes=2, max_failures=2, name=name
        )

    calm = probabilities(trainer("calm", no_disturbance).fit())
    assert calm[0] != calm[1], "other trees on each rank"
    killed = trainer("killed", worker_kills).fit()
    assert probabilities(killed) == calm
    assert [one.cause for one in cloud.rounds_closed("killed")] == [FailureCause.WORKER] * 2
    assert killed.return_value in (20, 24), "of the last checkpoint committed before tree 27"
    run = trainer("run", machine_kill).submit()
    lost = kill_machine_of_rank(cloud, 3, run)
    assert probabilities(lost) == calm
    assert [one.cause for one in cloud.rounds_closed("run")] == [FailureCause.PREEMPTION]
    assert lost.return_value in (12, 16), "of the last checkpoint committed before tree 17"
