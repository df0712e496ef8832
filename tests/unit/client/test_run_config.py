"""`RunConfig` validates its fields when it is created."""

from __future__ import annotations

import inspect
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import store_path
from spotfit.client.run_config import RunConfig, open_run_storage
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.model.config import CheckpointConfig, FailureConfig, LoggingConfig, SyncConfig
from spotfit.model.user_callback import UserCallback


def test_positional_arguments_are_those_of_ray_train() -> None:
    parameters = inspect.signature(RunConfig).parameters.values()
    assert [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY] == [
        "name",
        "storage_path",
        "storage_filesystem",
        "failure_config",
        "checkpoint_config",
        "callbacks",
        "worker_runtime_env",
        "logging_config",
        "sync_config",
        "verbose",
        "stop",
        "progress_reporter",
        "log_to_file",
    ]
    run = RunConfig("digits", "/data")
    assert (run.name, run.storage_path) == ("digits", "/data")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sync_config", SyncConfig()),
        ("verbose", 1),
        ("stop", {"step": 3}),
        ("progress_reporter", None),
        ("log_to_file", False),
    ],
)
def test_removed_fields_raise_with_their_name(name: str, value: Any) -> None:
    with pytest.raises(DeprecationWarning, match=rf"RunConfig\({name}=...\) is no longer"):
        RunConfig(**{name: value})


def test_all_fields_have_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunConfig()
    assert run.storage_path == str(tmp_path / "spotfit_results")
    assert run.failure_config == FailureConfig(max_failures=0)
    assert run.checkpoint_config == CheckpointConfig()
    assert run.logging_config == LoggingConfig()
    assert run.callbacks == []
    assert run.worker_runtime_env == {}


def test_the_default_name_contains_the_time() -> None:
    one, two = RunConfig(""), RunConfig(None)
    assert one.name is not None
    assert one.name.startswith("spotfit_run-20")
    assert one.name != two.name


def test_a_path_is_converted_to_str() -> None:
    assert RunConfig(storage_path=Path("/data/x")).storage_path == "/data/x"


@pytest.mark.parametrize("name", ["failure_config", "checkpoint_config", "logging_config"])
def test_a_config_of_another_type_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid `{name}` type: dict"):
        RunConfig(**{name: {"max_failures": 3}})  # type: ignore[arg-type]


def test_a_config_of_another_library_is_named_with_its_module() -> None:
    foreign = type("FailureConfig", (), {"__module__": "ray.train.v2.api.config"})()
    with pytest.raises(ValueError, match=r"ray\.train\.v2\.api\.config\.FailureConfig"):
        RunConfig(failure_config=foreign)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([print], "not an instance of spotfit.UserCallback"),
        ([UserCallback], "not an instance of spotfit.UserCallback"),
        (UserCallback(), "callbacks must be a list"),
    ],
)
def test_callbacks_must_be_a_list_of_callbacks(callbacks: Any, message: str) -> None:
    value = UserCallback()
    assert RunConfig(callbacks=[value]).callbacks == [value]
    with pytest.raises(ValueError, match=message):
        RunConfig(callbacks=callbacks)


def test_all_errors_are_reported_together() -> None:
    wrong: dict[str, Any] = {
        "name": 7,
        "storage_path": 8,
        "failure_config": 3,
        "callbacks": [print],
        "worker_runtime_env": "env.yaml",
    }
    with pytest.raises(ConfigErrors) as raised:
        RunConfig(**wrong)
    assert len(raised.value.errors) == 5
    for word in (
        "name must be",
        "storage_path must be",
        "`failure_config`",
        "dictionary, not str",
    ):
        assert word in str(raised.value)


@pytest.mark.parametrize("budget", [5400, 5400.0, timedelta(hours=1.5)])
def test_a_time_budget_is_in_seconds(budget: Any) -> None:
    assert RunConfig(time_budget_s=budget).time_budget_s == 5400.0


@pytest.mark.parametrize("budget", [0, -1.0, math.inf, math.nan, True, "72h", timedelta()])
def test_an_invalid_time_budget_is_rejected(budget: Any) -> None:
    with pytest.raises(ConfigError, match="time_budget_s must be a number of seconds"):
        RunConfig(time_budget_s=budget)


def test_worker_runtime_env_is_copied() -> None:
    value = {"env_vars": {"A": "1"}}
    run = RunConfig(worker_runtime_env=value)
    assert run.worker_runtime_env == value
    assert run.worker_runtime_env is not value


def test_storage_context_is_the_directory_of_the_run(tmp_path: Path) -> None:
    run = RunConfig("digits", str(tmp_path))
    assert run.storage_context.experiment_fs_path == str(tmp_path / "digits")
    assert run.storage_context.storage_fs_path == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "reading the property writes no file"


def test_storage_filesystem_takes_precedence(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")
    run = RunConfig("n", "bucket/prefix", storage_filesystem=memory.MemoryFileSystem())
    assert store_path(open_run_storage(run)).endswith("bucket/prefix")
