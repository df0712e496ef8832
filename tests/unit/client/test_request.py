"""A request: what a trainer was given, and when two of them are the same."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from spotfit.client.config import RunConfig
from spotfit.client.request import FitRequest
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.frameworks.config import Backend, BackendConfig
from spotfit.model.config import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    ScalingConfig,
)
from spotfit.model.spec import Keep, Limits, ValidationSpec, Vigil
from spotfit.model.validation import ValidationConfig, ValidationTaskConfig
from spotfit.testing.builders import RUN
from spotfit_localsim.live.options import LocalOptions


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


# --- the same run again --------------------------------------------------------------------------


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


def test_the_same_script_run_again_is_the_same_request() -> None:
    assert a_request(config={"lr": 1, "b": [2]}).fingerprint() == (
        a_request(config={"b": [2], "lr": 1}).fingerprint()
    )
    assert a_request(with_rate(1)).fingerprint() == a_request(with_rate(1)).fingerprint()


def test_how_it_is_validated_is_part_of_it() -> None:
    def validating(rate: int = 1, **task: Any) -> str:
        config = ValidationConfig(validate(rate), ValidationTaskConfig(**task))
        return a_request(validation=config).fingerprint()

    told = {
        a_request().fingerprint(),
        validating(),
        validating(2),
        validating(timeout_s=1),
        validating(fn_kwargs={"a": 1}),
    }
    assert len(told) == 5
    assert validating() == validating()


def test_what_the_journal_keeps_of_validations() -> None:
    task = ValidationTaskConfig({"not": object()}, timeout_s=9)
    config = ValidationConfig(validate(1), task, {"num_gpus": 1}, own_machine=True)
    request = a_request(validation=config)
    spec = request.spec(run_id=RunId("r"), name="n", storage_url="/b", luggage={})
    assert spec.validation == ValidationSpec(True, {"CPU": 1, "GPU": 1}, 9)
    bare = a_request().spec(run_id=RunId("r"), name="n", storage_url="/b", luggage={})
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
def test_whatever_changes_the_result_makes_it_another(changed: FitRequest) -> None:
    assert changed.fingerprint() != a_request(config={"lr": 1}).fingerprint()


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
def test_what_is_bound_to_a_function_is_part_of_it(
    one: Callable[..., Any], two: Callable[..., Any]
) -> None:
    assert a_request(one).fingerprint() != a_request(two).fingerprint()
    assert a_request(one).fingerprint() == a_request(one).fingerprint()


SCRIPT = """
from spotfit.client.config import RunConfig
from spotfit.client.request import FitRequest
from spotfit.model.config import ScalingConfig
def train(config):
    return config["x"] in {"apple", "pear", "plum", "quince"}
config = {"names": {"one", "two", "three"}, "x": "plum"}
print(FitRequest(train, config, ScalingConfig(), RunConfig(), "none", {}, None).fingerprint())
"""


def test_it_is_the_same_in_every_process() -> None:
    """The order of a set differs from process to process; the request does not."""
    told = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_where_it_runs_and_how_often_it_may_fail_changes_nothing() -> None:
    moved = a_request(
        run=RunConfig(name="other", failure_config=FailureConfig(max_failures=9)),
        provisioner="local?nodes=3",
    )
    assert moved.fingerprint() == a_request().fingerprint()


# --- who gives the machines ----------------------------------------------------------------------


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
def test_a_backend_is_chosen(given: Any, chosen: tuple[str, dict[str, Any]]) -> None:
    assert a_request(provisioner=given).named_provisioner() == chosen


def test_the_environment_chooses_where_the_trainer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPOTFIT_PROVISIONER", "slurm?queue=long")
    assert a_request().named_provisioner() == ("slurm", {"queue": "long"})
    assert a_request(provisioner="local").named_provisioner() == ("local", {})


def test_a_simulated_cloud_is_named_like_an_address() -> None:
    assert a_request(provisioner="sim://aws_batch?seed=1").named_provisioner() == (
        "sim",
        {"cloud": "aws_batch", "seed": 1},
    )


def test_what_nobody_says_in_the_call_comes_from_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_LOCAL_NODES", "2")
    assert a_request().chosen_provisioner() == ("local", {"nodes": 2})
    assert a_request(provisioner="local?nodes=3").chosen_provisioner() == ("local", {"nodes": 3})
    an_object = a_request(provisioner=LocalOptions(idle_s=9.0))
    assert an_object.chosen_provisioner() == ("local", {"nodes": 2, "idle_s": 9.0})


@pytest.mark.parametrize("given", ["?nodes=2", "", 7, {"name": "local"}, LocalLike, object()])
def test_what_names_no_backend_is_refused_with_an_example(given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        a_request(provisioner=given).named_provisioner()
    assert "'local?nodes=2'" in refused.value.do


# --- what the machines need to know --------------------------------------------------------------


def test_the_spec_holds_everything_the_machines_need() -> None:
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
    spec = request.spec(run_id=RUN, name="digits", storage_url="file:///r", luggage={"fn": "x"})
    assert (spec.run_id, spec.name, spec.fit_id) == (RUN, "digits", request.fingerprint())
    assert (spec.workers_min, spec.workers_max, spec.elastic) == (1, 4, True)
    assert spec.limits == Limits(1, 2, 3, 4.0)
    assert spec.keep == Keep(5, "eval/loss", "min")
    assert (spec.provisioner, spec.provisioner_options) == ("local", {"nodes": 2})
    assert (spec.storage_url, spec.luggage) == ("file:///r", {"fn": "x"})
    assert (spec.log_level, spec.relax_collectives, spec.callbacks) == ("DEBUG", True, False)
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
def test_hooks_are_waited_for_where_a_backend_has_some(config: BackendConfig) -> None:
    request = a_request(backend_config=config)
    spec = request.spec(run_id=RUN, name="digits", storage_url="file:///r", luggage={})
    assert (spec.hooks, spec.share_devices) == (isinstance(config, Settings),) * 2
    assert (request.fingerprint() == a_request().fingerprint()) == (not spec.hooks)


def vigil_of(monkeypatch: pytest.MonkeyPatch, **told: str) -> Vigil:
    for name, text in told.items():
        monkeypatch.setenv(name, text)
    spec = a_request().spec(run_id=RUN, name="digits", storage_url="file:///r", luggage={})
    return spec.vigil


def test_by_default_a_worker_has_ten_minutes_to_answer_and_slowness_is_nobodys_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert vigil_of(monkeypatch) == Vigil(600.0, 0.0, hang_ends=False, start_s=1800.0)


@pytest.mark.parametrize("ours", [True, False])
def test_the_environment_says_when_workers_are_taken_to_hang(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    theirs = {
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "30",
        "RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR": "1",
        "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S": "90",
        "RAY_TRAIN_NCCL_RAS_ACTION": "FAIL",
    }
    mine = {
        "SPOTFIT_WORKER_HEALTH_CHECK_TIMEOUT_S": "30",
        "SPOTFIT_ENABLE_HANG_DETECTOR": "yes",
        "SPOTFIT_HANG_CONFIRM_DURATION_S": "90",
        "SPOTFIT_HANG_ACTION": "fail",
    }
    seen = vigil_of(monkeypatch, **(mine if ours else theirs))
    assert seen == Vigil(30.0, 90.0, hang_ends=True)


def test_a_detector_that_is_not_switched_on_looks_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"SPOTFIT_HANG_CONFIRM_DURATION_S": "90", "SPOTFIT_ENABLE_HANG_DETECTOR": "0"}
    assert vigil_of(monkeypatch, **told).hang_s == 0.0


def test_a_fixed_group_is_not_elastic() -> None:
    spec = a_request().spec(run_id=RUN, name="n", storage_url="u", luggage={})
    assert (spec.workers_min, spec.workers_max, spec.elastic) == (2, 2, False)


def test_collectives_may_be_given_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = a_request().spec(run_id=RUN, name="n", storage_url="u", luggage={})
    assert (usual.collective_timeout_s, usual.collective_warn_s) == (None, 60.0)
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_TIMEOUT_S", "10m")
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_WARN_INTERVAL_S", "30")
    spec = a_request().spec(run_id=RUN, name="n", storage_url="u", luggage={})
    assert (spec.collective_timeout_s, spec.collective_warn_s) == (600.0, 30.0)
