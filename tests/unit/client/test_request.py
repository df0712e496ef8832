"""`FitRequest`: fingerprints, provisioners and the resulting `RunSpec`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import spotfit.data
from spotfit.client.request import FitRequest, plan_group
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.data.data_config import DataConfig
from spotfit.data.feeders import Feeders
from spotfit.frameworks.backend_config import Backend, BackendConfig
from spotfit.model.config import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    ScalingConfig,
)
from spotfit.model.spec import FailureLimits, HangDetectionConfig, RetentionConfig, ValidationSpec
from spotfit.model.validation_config import ValidationConfig, ValidationTaskConfig
from spotfit.provision.feeder_backend import FeederBackendProvisioner
from spotfit.testing.builders import RUN_ID
from spotfit_provisioners.local.options import LocalOptions


def train(config: dict[str, Any]) -> float:
    return float(config["lr"]) * 2


def other(config: dict[str, Any]) -> float:
    return float(config["lr"]) * 3


def a_request(fn: Callable[..., Any] = train, config: Any = None, **given: Any) -> FitRequest:
    usual: dict[str, Any] = {
        "scaling": ScalingConfig(num_workers=2),
        "run": RunConfig(name="digits"),
        "framework": "none",
        "framework_options": {},
        "backend_config": BackendConfig(),
    }
    return FitRequest(fn, config, **{**usual, **given})


# --- fingerprints of runs ------------------------------------------------------------------------


def with_rate(rate: float) -> Callable[[], float]:
    """A training function that remembers its rate."""

    def fn() -> float:
        return rate

    return fn


def with_default(rate: float) -> Callable[..., float]:
    def fn(rate: float = rate) -> float:
        return rate

    return fn


def validate(rate: float) -> Callable[[Any], dict[str, float]]:
    """A validation that remembers its rate."""
    return lambda _: {"rate": rate}


def test_the_same_script_has_the_same_fingerprint() -> None:
    assert a_request(config={"lr": 1, "b": [2]}).fingerprint() == (
        a_request(config={"b": [2], "lr": 1}).fingerprint()
    )
    assert a_request(with_rate(1)).fingerprint() == a_request(with_rate(1)).fingerprint()


def test_validation_is_part_of_the_fingerprint() -> None:
    def validating(rate: int = 1, **task: Any) -> str:
        config = ValidationConfig(validate(rate), ValidationTaskConfig(**task))
        return a_request(validation=config).fingerprint()

    variables = {
        a_request().fingerprint(),
        validating(),
        validating(2),
        validating(timeout_s=1),
        validating(fn_kwargs={"a": 1}),
    }
    assert len(variables) == 5
    assert validating() == validating()


def test_the_spec_contains_the_validation_settings() -> None:
    task = ValidationTaskConfig({"not": object()}, timeout_s=9)
    config = ValidationConfig(validate(1), task, {"num_gpus": 1}, own_machine=True)
    request = a_request(validation=config)
    spec = request.build_spec(run_id=RunId("r"), name="n", storage_url="/b", code_bundle={})
    assert spec.validation == ValidationSpec(
        own_machine=True, resources={"CPU": 1, "GPU": 1}, timeout_s=9
    )
    bare = a_request().build_spec(run_id=RunId("r"), name="n", storage_url="/b", code_bundle={})
    assert bare.validation is None


@pytest.mark.parametrize(
    "changed",
    [
        a_request(other, {"lr": 1}),
        a_request(config={"lr": 2}),
        a_request(config={"lr": 1.0}),
        a_request(config={"lr": 1, "more": None}),
        a_request(config={"lr": 1}, scaling=ScalingConfig(num_workers=3)),
        a_request(config={"lr": 1}, framework="torch"),
        a_request(config={"lr": 1}, framework_options={"backend": "nccl"}),
        a_request(config={"lr": 1}, run=RunConfig(worker_runtime_env={"env_vars": {"A": "1"}})),
    ],
    ids=["code", "config", "type", "key", "width", "framework", "options", "environment"],
)
def test_changes_of_code_or_configuration_change_the_fingerprint(changed: FitRequest) -> None:
    assert changed.fingerprint() != a_request(config={"lr": 1}).fingerprint()


def test_the_configuration_of_datasets_is_part_of_the_fingerprint() -> None:
    datasets = {"train": spotfit.data.range(3)}
    configs = [
        DataConfig(),
        DataConfig(["train"]),
        DataConfig(resume="epoch"),
        DataConfig(num_workers=(1, 8)),
        DataConfig(num_workers=(1, 4)),
    ]
    requests = [a_request(datasets=datasets, dataset_config=config) for config in configs]
    assert len({request.fingerprint() for request in requests}) == len(configs)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (with_rate(1), with_rate(2)),
        (with_default(1), with_default(2)),
        (functools.partial(train, {"lr": 1}), functools.partial(train, {"lr": 2})),
        (functools.partial(train), functools.partial(other)),
        (lambda: 1, lambda: 2),
        (lambda c: c in {"a", "b"}, lambda c: c in {"a", "c"}),
    ],
    ids=["closure", "default", "bound argument", "bound function", "lambda", "set in the code"],
)
def test_bound_values_are_part_of_the_fingerprint(
    one: Callable[..., Any], two: Callable[..., Any]
) -> None:
    assert a_request(one).fingerprint() != a_request(two).fingerprint()
    assert a_request(one).fingerprint() == a_request(one).fingerprint()


SCRIPT = """
from spotfit.client.run_config import RunConfig
from spotfit.client.request import FitRequest
from spotfit.model.config import ScalingConfig
def train(config):
    return config["x"] in {"apple", "pear", "plum", "quince"}
config = {"names": {"one", "two", "three"}, "x": "plum"}
print(FitRequest(train, config, ScalingConfig(), RunConfig(), "none", {}, None).fingerprint())
"""


def test_fingerprints_are_equal_in_every_process() -> None:
    """The order of a set differs from process to process; the request does not."""
    variables = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(variables) == 1


def test_provisioner_and_failure_limits_are_not_part_of_the_fingerprint() -> None:
    moved = a_request(
        run=RunConfig(name="other", failure_config=FailureConfig(max_failures=9)),
        provisioner="local?nodes=3",
    )
    assert moved.fingerprint() == a_request().fingerprint()


# --- provisioners --------------------------------------------------------------------------------


@dataclass
class LocalLike:
    """Options of a backend, as its users write them."""

    nodes: int = 2
    provisioner = "local"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (None, ("local", {})),
        ("aws_batch", ("aws_batch", {})),
        ("local?nodes=2&notice_s=1.5", ("local", {"nodes": 2, "notice_s": 1.5})),
        ("k?zone=eu-1&spot=true&tag=", ("k", {"zone": "eu-1", "spot": True, "tag": ""})),
        ("k?labels=%7B%22a%22%3A1%7D", ("k", {"labels": {"a": 1}})),
        (LocalLike(3), ("local", {"nodes": 3})),
    ],
    ids=["default", "a name", "with options", "texts", "JSON", "an object"],
)
def test_a_provisioner_is_parsed(given: Any, chosen: tuple[str, dict[str, Any]]) -> None:
    assert a_request(provisioner=given).select_provisioner() == chosen


def test_the_environment_selects_the_default_provisioner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPOTFIT_PROVISIONER", "slurm?queue=long")
    assert a_request().select_provisioner() == ("slurm", {"queue": "long"})
    assert a_request(provisioner="local").select_provisioner() == ("local", {})


def test_a_simulated_cloud_is_written_as_a_url() -> None:
    assert a_request(provisioner="sim://aws_batch?seed=1").select_provisioner() == (
        "sim",
        {"cloud": "aws_batch", "seed": 1},
    )


def test_missing_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_LOCAL_NODES", "2")
    assert a_request().resolve_provisioner() == ("local", {"nodes": 2})
    assert a_request(provisioner="local?nodes=3").resolve_provisioner() == ("local", {"nodes": 3})
    an_object = a_request(provisioner=LocalOptions(idle_s=9.0))
    assert an_object.resolve_provisioner() == ("local", {"nodes": 2, "idle_s": 9.0})


def test_feeders_of_another_backend_are_options_of_one_that_routes() -> None:
    feeders = Feeders(nodes=1, provisioner="local?capacity=4")
    with_feeders = a_request(
        provisioner="local?nodes=2", data_feeders=feeders, datasets={"train": object()}
    )
    assert with_feeders.resolve_provisioner() == (
        "with_feeders",
        {"workers": ["local", {"nodes": 2}], "feeders": ["local", {"capacity": 4}]},
    )
    assert with_feeders.feeder_spec == feeders.spec
    plan = plan_group(with_feeders).plan
    assert (plan.provisioner, plan.num_nodes) == ("local", 2)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (["local?nodes=2"], ["local", {"nodes": 2}]),
        (
            ["local", "local?nodes=2"],
            ["combined", {"backends": [["local", {}], ["local", {"nodes": 2}]]}],
        ),
    ],
    ids=["one", "several"],
)
def test_feeders_of_another_backend_serve_a_list_of_backends(
    workers: list[str], expected: list[Any]
) -> None:
    feeders = Feeders(nodes=1, provisioner="local?capacity=4")
    request = a_request(provisioner=workers, data_feeders=feeders, datasets={"train": object()})
    name, options = request.resolve_provisioner()
    assert (name, options["workers"]) == ("with_feeders", expected)
    assert options["feeders"] == ["local", {"capacity": 4}]
    assert isinstance(plan_group(request).provisioner, FeederBackendProvisioner)


def test_without_datasets_there_are_no_feeders() -> None:
    feeders = Feeders(nodes=1, provisioner="local?capacity=4")
    without = a_request(provisioner="local", data_feeders=feeders)
    assert without.resolve_provisioner() == ("local", {})
    assert without.feeder_spec is None


@pytest.mark.parametrize("given", ["?nodes=2", "", 7, {"name": "local"}, LocalLike, object()])
def test_an_invalid_provisioner_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        a_request(provisioner=given).select_provisioner()
    assert "'local?nodes=2'" in refused.value.do


# --- the spec of the run -------------------------------------------------------------------------


def test_the_spec_contains_all_settings() -> None:
    run = RunConfig(
        name="digits",
        failure_config=FailureConfig(
            max_failures=1,
            controller_failure_limit=2,
            max_preemption_failures=3,
            relax_collectives_on_preemption=True,
            preemption_grace_s=4.0,
        ),
        checkpoint_config=CheckpointConfig(5, "eval/loss", "min"),
        logging_config=LoggingConfig("debug"),
    )
    request = a_request(
        run=run, scaling=ScalingConfig(num_workers=(1, 4)), provisioner="local?nodes=2"
    )
    spec = request.build_spec(
        run_id=RUN_ID, name="digits", storage_url="file:///r", code_bundle={"fn": "x"}
    )
    assert (spec.run_id, spec.name, spec.fit_id) == (RUN_ID, "digits", request.fingerprint())
    assert (spec.min_workers, spec.max_workers, spec.is_elastic) == (1, 4, True)
    assert spec.failure_limits == FailureLimits(
        worker=1, platform=2, preemption=3, preemption_grace_s=4.0
    )
    assert spec.retention == RetentionConfig(
        num_to_keep=5, score_attribute="eval/loss", score_order="min"
    )
    assert (spec.provisioner, spec.provisioner_options) == ("local", {"nodes": 2})
    assert (spec.storage_url, spec.code_bundle) == ("file:///r", {"fn": "x"})
    assert (spec.log_level, spec.relax_collectives, spec.has_callbacks) == ("DEBUG", True, False)
    assert spec.collective_timeout_s is None


class Shared(Backend):
    """Wants to see the GPUs of its node."""

    share_cuda_visible_devices = True


class Settings(BackendConfig):
    """Names a backend of the user's own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Shared


@pytest.mark.parametrize("config", [BackendConfig(), Settings()])
def test_the_spec_states_whether_the_backend_has_hooks(config: BackendConfig) -> None:
    request = a_request(backend_config=config)
    spec = request.build_spec(run_id=RUN_ID, name="digits", storage_url="file:///r", code_bundle={})
    assert (spec.has_backend_hooks, spec.share_devices) == (isinstance(config, Settings),) * 2
    assert (request.fingerprint() == a_request().fingerprint()) == (not spec.has_backend_hooks)


def hang_detection_with(monkeypatch: pytest.MonkeyPatch, **variables: str) -> HangDetectionConfig:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    spec = a_request().build_spec(
        run_id=RUN_ID, name="digits", storage_url="file:///r", code_bundle={}
    )
    return spec.hang_detection


def test_default_hang_detection_is_a_heartbeat_timeout_of_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hang_detection_with(monkeypatch) == HangDetectionConfig(
        worker_timeout_s=600.0,
        no_progress_timeout_s=0.0,
        abort_on_hang=False,
        start_timeout_s=1800.0,
    )


@pytest.mark.parametrize("uses_own_names", [True, False])
def test_hang_detection_is_configured_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, uses_own_names: bool
) -> None:
    ray_names = {
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "30",
        "RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR": "1",
        "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S": "90",
        "RAY_TRAIN_NCCL_RAS_ACTION": "FAIL",
    }
    own_names = {
        "SPOTFIT_WORKER_HEALTH_CHECK_TIMEOUT_S": "30",
        "SPOTFIT_ENABLE_HANG_DETECTOR": "yes",
        "SPOTFIT_HANG_CONFIRM_DURATION_S": "90",
        "SPOTFIT_HANG_ACTION": "fail",
    }
    seen = hang_detection_with(monkeypatch, **(own_names if uses_own_names else ray_names))
    assert seen == HangDetectionConfig(
        worker_timeout_s=30.0, no_progress_timeout_s=90.0, abort_on_hang=True
    )


def test_a_disabled_hang_detector_has_no_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"SPOTFIT_HANG_CONFIRM_DURATION_S": "90", "SPOTFIT_ENABLE_HANG_DETECTOR": "0"}
    assert hang_detection_with(monkeypatch, **variables).no_progress_timeout_s == 0.0


def test_a_fixed_group_is_not_elastic() -> None:
    spec = a_request().build_spec(run_id=RUN_ID, name="n", storage_url="u", code_bundle={})
    assert (spec.min_workers, spec.max_workers, spec.is_elastic) == (2, 2, False)


def test_the_collective_timeout_is_part_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = a_request().build_spec(run_id=RUN_ID, name="n", storage_url="u", code_bundle={})
    assert (usual.collective_timeout_s, usual.collective_warn_interval_s) == (None, 60.0)
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_TIMEOUT_S", "10m")
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_WARN_INTERVAL_S", "30")
    spec = a_request().build_spec(run_id=RUN_ID, name="n", storage_url="u", code_bundle={})
    assert (spec.collective_timeout_s, spec.collective_warn_interval_s) == (600.0, 30.0)
