"""`DataParallelTrainer` validates its arguments and starts runs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.run_config import RunConfig
from spotfit.client.trainer import DataParallelTrainer, TorchTrainer
from spotfit.core.errors import ConfigError, ConfigErrors, RunCancelledError
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.events import FitEnded
from tests.unit.client.harness import ClientHarness, train


@dataclass
class Backend(BackendConfig):
    """A framework's config."""

    backend: str = "gloo"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        return "torch", {"backend": self.backend, "width": scaling.max_workers}


def test_an_invalid_backend_config_is_refused() -> None:
    assert type(DataParallelTrainer(train).backend_config) is BackendConfig
    with pytest.raises(ConfigError, match=r"backend_config must be a spotfit\.BackendConfig"):
        DataParallelTrainer(train, backend_config={"backend": "gloo"})


def test_all_configs_have_defaults() -> None:
    trainer = DataParallelTrainer(train)
    assert trainer.scaling_config == ScalingConfig()
    assert trainer.run_config.failure_config == RunConfig().failure_config
    assert (trainer.datasets, trainer.dataset_config.datasets_to_split) == ({}, "all")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scaling_config": {"num_workers": 2}}, "must be a spotfit.ScalingConfig, not dict"),
        ({"run_config": "digits"}, "must be a spotfit.RunConfig, not str"),
        ({"datasets": {"train": [1]}}, "The dataset 'train' is a list"),
        ({"datasets": [1]}, "datasets= must be a dictionary by name, not list"),
        ({"train_loop_config": [1]}, "train_loop_config= must be a dictionary, not list"),
        ({"train_loop_config": Namespace(lr=1)}, r"vars\(args\)"),
        ({"dataset_config": "all"}, "must be a spotfit.DataConfig, not str"),
        ({"validation_config": print}, "must be a spotfit.ValidationConfig, not "),
    ],
)
def test_invalid_arguments_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataParallelTrainer(train, **given)


def test_all_errors_are_reported_together() -> None:
    wrong: dict[str, Any] = {"scaling_config": 2, "run_config": 3, "dataset_config": 4}
    with pytest.raises(ConfigErrors) as raised:
        DataParallelTrainer(train, **wrong)
    assert len(raised.value.errors) == 3
    with pytest.raises(DeprecationWarning, match=r"resume_from_checkpoint=.*metadata="):
        DataParallelTrainer(train, resume_from_checkpoint=1, metadata={"a": 1})


def test_only_the_function_is_positional() -> None:
    with pytest.raises(TypeError, match="positional"):
        DataParallelTrainer(train, {"lr": 1})  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "metadata"])
def test_removed_arguments_raise(name: str) -> None:
    given: dict[str, Any] = {name: {"a": 1}}
    with pytest.raises(DeprecationWarning, match=name):
        DataParallelTrainer(train, **given)


@pytest.mark.parametrize("kind", [DataParallelTrainer, TorchTrainer])
def test_restore_is_removed(kind: type[DataParallelTrainer]) -> None:
    with pytest.raises(DeprecationWarning, match="same name and storage_path"):
        kind.restore("path", train_loop_per_worker=train)
    with pytest.raises(DeprecationWarning):
        kind.can_restore("path")


def test_fit_uses_the_provisioner(harness: ClientHarness) -> None:
    run = harness.request().run
    harness.clock.next_events = iter(
        [lambda: harness.end_run(FitEnded(outcome="finished", metrics={"a": 1}))]
    )
    trainer = DataParallelTrainer(
        train, scaling_config=ScalingConfig(num_workers=3), run_config=run, backend_config=Backend()
    )
    assert trainer.fit().metrics == {"a": 1}
    spec = harness.view.spec
    assert (spec.framework, spec.framework_options) == ("torch", {"backend": "gloo", "width": 3})


def test_submit_returns_a_handle(harness: ClientHarness) -> None:
    handle = DataParallelTrainer(train, run_config=harness.request().run).submit()
    harness.end_run(FitEnded(outcome="finished", metrics={"a": 1}))
    assert handle.result(timeout_s=30).metrics == {"a": 1}


def uses_libraries() -> None:
    import lightning.pytorch
    import torch

    print(torch, lightning.pytorch)


@pytest.mark.parametrize(
    ("preload", "expected"),
    [
        ((), ("lightning.pytorch",)),
        (("mine",), ("mine", "lightning.pytorch")),
        (("lightning.pytorch", "mine"), ("lightning.pytorch", "mine")),
        (None, ()),
    ],
)
def test_the_spec_has_the_modules_that_the_function_uses_beyond_its_framework(
    harness: ClientHarness, preload: Any, expected: tuple[str, ...]
) -> None:
    run = RunConfig(name="digits", storage_path=harness.storage_path, preload=preload)
    handle = TorchTrainer(uses_libraries, run_config=run).submit()
    harness.end_run(FitEnded(outcome="finished"))
    handle.result(timeout_s=30)
    assert harness.view.spec.preload == expected


def test_without_workers_fit_runs_in_this_process(harness: ClientHarness) -> None:
    here = DataParallelTrainer(
        lambda config: config["x"] + 1,
        train_loop_config={"x": 41},
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert here.fit().return_value == 42
    assert harness.cloud.submitted_tokens == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_function_is_checked_by_fit(harness: ClientHarness, workers: int) -> None:
    def trainer(fn: Any) -> DataParallelTrainer:
        scaling = ScalingConfig(num_workers=workers)
        return DataParallelTrainer(fn, scaling_config=scaling, run_config=harness.request().run)

    with pytest.raises(ValueError, match="should take in 0 or 1 required arguments"):
        trainer(lambda config, data: None).fit()
    with pytest.raises(TypeError, match="must be callable"):
        trainer("train.py").fit()
    assert harness.cloud.submitted_tokens == []


def test_local_mode_calls_a_function_without_config() -> None:
    here = DataParallelTrainer(
        lambda config=None: config,
        train_loop_config={"lr": 1},
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert here.fit().return_value is None


def test_local_mode_passes_datasets_unchanged() -> None:
    rows = [{"x": 1}, {"x": 2}]
    here = DataParallelTrainer(
        lambda: spotfit.get_dataset_shard(spotfit.TRAIN_DATASET_KEY),
        datasets={"train": rows},
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert here.fit().return_value is rows


def test_submit_without_workers_is_refused(harness: ClientHarness) -> None:
    here = DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0))
    with pytest.raises(ConfigError, match=r"not supported with .*num_workers=0"):
        here.submit()
    assert harness.cloud.submitted_tokens == []


def test_the_default_torch_config_is_created() -> None:
    assert TorchTrainer(train).backend_config == TorchConfig("gloo")
    given = TorchConfig(backend="gloo", timeout_s=60)
    assert TorchTrainer(train, torch_config=given).backend_config is given


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [
        (None, "gloo"),
        (ScalingConfig(use_gpu=True), "nccl"),
        (ScalingConfig(use_tpu=True), "tpu_dist"),
    ],
)
def test_the_selected_backend_is_stored_in_the_config(
    scaling: ScalingConfig | None, backend: str
) -> None:
    given = TorchConfig()
    TorchTrainer(train, torch_config=given, scaling_config=scaling)
    assert given.backend == backend


def test_an_invalid_init_method_is_refused_before_machines_are_requested(
    harness: ClientHarness,
) -> None:
    trainer = TorchTrainer(
        train, torch_config=TorchConfig(init_method="file"), run_config=harness.request().run
    )
    with pytest.raises(ValueError, match="init_method must be"):
        trainer.fit()


def test_other_arguments_are_passed_to_the_base_class(harness: ClientHarness) -> None:
    harness.clock.next_events = iter(
        [lambda: harness.end_run(FitEnded(outcome="finished", metrics={"a": 1}))]
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=None,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=harness.request().run,
        provisioner="local?nodes=3",
    )
    assert trainer.fit().metrics == {"a": 1}
    spec = harness.view.spec
    assert (spec.framework, spec.max_workers) == ("torch", 3)
    assert spec.framework_options["backend"] == "gloo"
    assert (spec.provisioner, spec.provisioner_options) == ("local", {"nodes": 3})


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"be a spotfit.torch.TorchConfig, not dict"):
        TorchTrainer(train, torch_config={"backend": "gloo"})  # type: ignore[arg-type]


def test_local_mode_without_a_launcher_does_not_import_torch() -> None:
    script = """
import sys
from spotfit.torch import TorchTrainer
from spotfit import ScalingConfig, get_context
scaling = ScalingConfig(num_workers=0)
here = TorchTrainer(lambda: get_context().get_world_size(), scaling_config=scaling)
assert here.fit().return_value == 1
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- Estimates ------------------------------------------------------------------------------------


# Given prices: no API is called.
PRICED = 'gcp_batch?project=p&region=r&image=i&machine_type=m&prices={"*":{"spot":1,"on_demand":3}}'


def test_an_estimate_uses_the_arguments_and_rents_nothing(tmp_path: Path) -> None:
    market = {"id": "zone-7", "kind": "availability", "gap_seconds": 600, "data": [1] * 12}
    (tmp_path / "zone.json").write_text(json.dumps(market))
    found = DataParallelTrainer(train, provisioner=PRICED).estimate(
        training_time="2h", deadline="4h", budget_usd=20, changeover="30m", recordings=tmp_path
    )
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(2.5)
    assert found.worst_case_usd == pytest.approx(7.5)
    assert (found.limits.deadline_s, found.limits.budget_usd) == (14_400, 20)
    assert (found.recordings, found.is_guaranteed) == (("zone-7",), True)


def test_an_estimate_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="rents no machines"):
        DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0)).estimate()


class Terminal(io.StringIO):
    """Text that is typed, or output that is shown."""

    def isatty(self) -> bool:
        return True


def test_fit_does_not_start_a_run_that_is_declined_in_the_terminal(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys, "stdout", shown)
    run = RunConfig(name="digits", storage_path=harness.storage_path, training_time_s="2h")
    trainer = DataParallelTrainer(train, run_config=run)
    with pytest.raises(RunCancelledError, match="nothing was rented"):
        trainer.fit(confirm=0)
    assert "Rent the machines?" in shown.getvalue()
    assert harness.cloud.submitted_tokens == []
    assert not Path(harness.url).exists()
