"""`RunConfig` validates its fields when it is created."""

from __future__ import annotations

import inspect
import math
from datetime import UTC, datetime, timedelta, timezone
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


@pytest.mark.parametrize("duration", ["2h", "120m", 7200, 7200.0, timedelta(hours=2)])
def test_a_deadline_and_a_training_time_are_durations(duration: Any) -> None:
    run = RunConfig(deadline=duration, training_time_s=duration)
    assert (run.deadline, run.training_time_s) == (timedelta(hours=2), 7200.0)


@pytest.mark.parametrize(
    "deadline",
    [
        "2026-11-30T18:00+01:00",
        "2026-11-30T17:00Z",
        datetime(2026, 11, 30, 18, tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_a_deadline_may_be_a_time(deadline: Any) -> None:
    run = RunConfig(deadline=deadline)
    assert run.deadline == datetime(2026, 11, 30, 17, tzinfo=UTC)
    assert isinstance(run.deadline, datetime)
    assert run.deadline.tzinfo is UTC


@pytest.mark.parametrize("deadline", ["2026-11-30T18:00", "2026-11-30", datetime(2026, 11, 30)])  # noqa: DTZ001
def test_a_deadline_without_a_time_zone_is_rejected(deadline: Any) -> None:
    with pytest.raises(ConfigError, match="has no time zone") as raised:
        RunConfig(deadline=deadline)
    assert "with a time zone" in (raised.value.do or "")


@pytest.mark.parametrize("name", ["deadline", "training_time_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, timedelta(), [1], "-2h"])
def test_an_invalid_duration_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"RunConfig\({name}="):
        RunConfig(**{name: value})


def test_text_that_is_no_duration_is_rejected_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"RunConfig\(deadline='soon'\)"):
        RunConfig(deadline="soon")
    with pytest.raises(ConfigError, match=r"RunConfig\(training_time_s='soon'\)"):
        RunConfig(training_time_s="soon")


@pytest.mark.parametrize("budget", [40, 40.0])
def test_a_budget_is_in_dollars(budget: Any) -> None:
    assert RunConfig(budget_usd=budget).budget_usd == 40.0


@pytest.mark.parametrize("budget", [0, -1.0, math.inf, math.nan, True, "40", timedelta(1)])
def test_an_invalid_budget_is_rejected(budget: Any) -> None:
    with pytest.raises(ConfigError, match="budget_usd must be a number of US dollars"):
        RunConfig(budget_usd=budget)


@pytest.mark.parametrize("fallback", ["on_demand", "never", None])
def test_a_fallback_is_one_of_two_words(fallback: Any) -> None:
    assert RunConfig(fallback=fallback).fallback == fallback


@pytest.mark.parametrize("fallback", ["on-demand", True, False, ""])
def test_an_invalid_fallback_is_rejected(fallback: Any) -> None:
    with pytest.raises(ConfigError, match="fallback must be 'on_demand' or 'never'"):
        RunConfig(fallback=fallback)


def test_without_limits_all_four_fields_are_none() -> None:
    run = RunConfig()
    assert (run.deadline, run.budget_usd, run.fallback, run.training_time_s) == (None,) * 4


@pytest.mark.parametrize(
    ("preload", "modules"), [((), ()), (["a.b", "c"], ("a.b", "c")), (None, None)]
)
def test_modules_to_preload_are_names(preload: Any, modules: Any) -> None:
    assert RunConfig(preload=preload).preload == modules


@pytest.mark.parametrize("preload", ["transformers", ["a-b"], [""], ["a..b"], [pytest], 3])
def test_an_invalid_module_to_preload_is_rejected(preload: Any) -> None:
    with pytest.raises(ConfigError, match="preload must be a list or tuple of module names"):
        RunConfig(preload=preload)


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
