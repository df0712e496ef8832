"""The trainer: what it takes, what it refuses, and what it makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import spotfit
from spotfit.client.config import RunConfig
from spotfit.client.trainer import DataParallelTrainer
from spotfit.client.trainers import TorchTrainer
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.frameworks.config import BackendConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.events import FitEnded
from tests.unit.client.door import Door, train


@dataclass
class Backend(BackendConfig):
    """A framework's config."""

    backend: str = "gloo"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        return "torch", {"backend": self.backend, "width": scaling.max_workers}


def test_a_backend_config_must_be_one() -> None:
    assert type(DataParallelTrainer(train).backend_config) is BackendConfig
    with pytest.raises(ConfigError, match=r"backend_config must be a spotfit\.BackendConfig"):
        DataParallelTrainer(train, backend_config={"backend": "gloo"})


def test_without_configs_there_are_the_usual_ones() -> None:
    trainer = DataParallelTrainer(train)
    assert trainer.scaling_config == ScalingConfig()
    assert trainer.run_config.failure_config == RunConfig().failure_config
    assert (trainer.datasets, trainer.dataset_config.datasets_to_split) == ({}, "all")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"scaling_config": {"num_workers": 2}}, "must be a spotfit.ScalingConfig, not dict"),
        ({"run_config": "digits"}, "must be a spotfit.RunConfig, not str"),
        ({"datasets": {"train": [1]}}, "Workers are not fed with `datasets` yet"),
        ({"datasets": [1]}, "datasets must be a dictionary by name, not list"),
        ({"dataset_config": "all"}, "must be a spotfit.DataConfig, not str"),
        ({"validation_config": print}, "must be a spotfit.ValidationConfig, not "),
    ],
)
def test_what_it_cannot_use_it_refuses_when_it_is_made(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataParallelTrainer(train, **given)


def test_all_that_it_cannot_use_is_told_at_once() -> None:
    wrong: dict[str, Any] = {"scaling_config": 2, "run_config": 3, "dataset_config": 4}
    with pytest.raises(ConfigErrors) as told:
        DataParallelTrainer(train, **wrong)
    assert len(told.value.errors) == 3
    with pytest.raises(DeprecationWarning, match=r"resume_from_checkpoint=.*metadata="):
        DataParallelTrainer(train, resume_from_checkpoint=1, metadata={"a": 1})


def test_everything_but_the_function_goes_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        DataParallelTrainer(train, {"lr": 1})  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "metadata"])
def test_what_is_gone_warns_as_an_error(name: str) -> None:
    given: dict[str, Any] = {name: {"a": 1}}
    with pytest.raises(DeprecationWarning, match=name):
        DataParallelTrainer(train, **given)


@pytest.mark.parametrize("kind", [DataParallelTrainer, TorchTrainer])
def test_restore_is_gone(kind: type[DataParallelTrainer]) -> None:
    with pytest.raises(DeprecationWarning, match="same name and storage_path"):
        kind.restore("path", train_loop_per_worker=train)
    with pytest.raises(DeprecationWarning):
        kind.can_restore("path")


def test_it_trains_where_its_provisioner_says(door: Door) -> None:
    run = door.request().run
    door.clock.coming = iter([lambda: door.agents_end_it(FitEnded("finished", metrics={"a": 1}))])
    trainer = DataParallelTrainer(
        train, scaling_config=ScalingConfig(num_workers=3), run_config=run, backend_config=Backend()
    )
    assert trainer.fit().metrics == {"a": 1}
    spec = door.view.spec
    assert spec is not None
    assert (spec.framework, spec.framework_options) == ("torch", {"backend": "gloo", "width": 3})


def test_a_run_that_is_submitted_goes_on_by_itself(door: Door) -> None:
    handle = DataParallelTrainer(train, run_config=door.request().run).submit()
    door.agents_end_it(FitEnded("finished", metrics={"a": 1}))
    assert handle.result(timeout_s=30).metrics == {"a": 1}


def test_without_workers_it_runs_right_here(door: Door) -> None:
    here = DataParallelTrainer(
        lambda config: config["x"] + 1,
        train_loop_config={"x": 41},
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert here.fit().return_value == 42
    assert door.cloud.submits == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_function_is_looked_at_when_it_is_fitted(door: Door, workers: int) -> None:
    def trainer(fn: Any) -> DataParallelTrainer:
        scaling = ScalingConfig(num_workers=workers)
        return DataParallelTrainer(fn, scaling_config=scaling, run_config=door.request().run)

    with pytest.raises(ValueError, match="should take in 0 or 1 required arguments"):
        trainer(lambda config, data: None).fit()
    with pytest.raises(TypeError, match="must be callable"):
        trainer("train.py").fit()
    assert door.cloud.submits == []


def test_right_here_a_default_config_is_not_asked_for() -> None:
    here = DataParallelTrainer(
        lambda config=None: config,
        train_loop_config={"lr": 1},
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert here.fit().return_value is None


def test_right_here_datasets_come_as_they_are() -> None:
    rows = [{"x": 1}, {"x": 2}]
    here = DataParallelTrainer(
        lambda: spotfit.get_dataset_shard(spotfit.TRAIN_DATASET_KEY),
        datasets={"train": rows},
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert here.fit().return_value is rows


def test_what_runs_right_here_cannot_be_left_alone(door: Door) -> None:
    here = DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0))
    with pytest.raises(ConfigError, match="there is nothing to submit"):
        here.submit()
    assert door.cloud.submits == []
