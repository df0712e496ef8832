"""RunConfig: names, places and kinds are checked when it is written."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.handle import path_of
from spotfit.client.config import RunConfig, storage_of
from spotfit.core.errors import ConfigErrors
from spotfit.model.callbacks import UserCallback
from spotfit.model.config import CheckpointConfig, FailureConfig, LoggingConfig, SyncConfig


def test_positions_are_those_of_ray_train() -> None:
    assert list(inspect.signature(RunConfig).parameters) == [
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
def test_what_is_gone_raises_and_is_named(name: str, value: Any) -> None:
    with pytest.raises(DeprecationWarning, match=rf"RunConfig\({name}=...\) is no longer"):
        RunConfig(**{name: value})


def test_everything_has_a_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunConfig()
    assert run.storage_path == str(tmp_path / "spotfit_results")
    assert run.failure_config == FailureConfig(max_failures=0)
    assert run.checkpoint_config == CheckpointConfig()
    assert run.logging_config == LoggingConfig()
    assert run.callbacks == []
    assert run.worker_runtime_env == {}


def test_without_a_name_it_gets_one_of_its_own_with_the_time() -> None:
    one, two = RunConfig(""), RunConfig(None)
    assert one.name is not None
    assert one.name.startswith("spotfit_run-20")
    assert one.name != two.name


def test_a_path_becomes_text() -> None:
    assert RunConfig(storage_path=Path("/data/x")).storage_path == "/data/x"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["failure_config", "checkpoint_config", "logging_config"])
def test_a_config_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid `{name}` type: dict"):
        RunConfig(**{name: {"max_failures": 3}})  # type: ignore[arg-type]


def test_a_config_of_another_library_is_told_by_its_module() -> None:
    theirs = type("FailureConfig", (), {"__module__": "ray.train.v2.api.config"})()
    with pytest.raises(ValueError, match=r"ray\.train\.v2\.api\.config\.FailureConfig"):
        RunConfig(failure_config=theirs)


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([print], "no instance of spotfit.UserCallback"),
        ([UserCallback], "no instance of spotfit.UserCallback"),
        (UserCallback(), "callbacks must be a list"),
    ],
)
def test_a_callback_must_be_one_in_a_list(callbacks: Any, says: str) -> None:
    mine = UserCallback()
    assert RunConfig(callbacks=[mine]).callbacks == [mine]
    with pytest.raises(ValueError, match=says):
        RunConfig(callbacks=callbacks)


def test_all_mistakes_are_told_at_once() -> None:
    wrong: dict[str, Any] = {
        "name": 7,
        "storage_path": 8,
        "failure_config": 3,
        "callbacks": [print],
        "worker_runtime_env": "env.yaml",
    }
    with pytest.raises(ConfigErrors) as told:
        RunConfig(**wrong)
    assert len(told.value.errors) == 5
    for word in ("name must be", "storage_path must be", "`failure_config`", "env.yaml"):
        assert word in str(told.value)


def test_the_driver_s_environment_is_not_shared() -> None:
    mine = {"env_vars": {"A": "1"}}
    run = RunConfig(worker_runtime_env=mine)
    assert run.worker_runtime_env == mine
    assert run.worker_runtime_env is not mine


def test_it_knows_where_its_run_is_kept(tmp_path: Path) -> None:
    run = RunConfig("digits", str(tmp_path))
    assert run.storage_context.experiment_fs_path == str(tmp_path / "digits")
    assert run.storage_context.storage_fs_path == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "asking writes nothing"


def test_a_file_system_of_the_user_s_comes_first(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")
    run = RunConfig("n", "bucket/prefix", storage_filesystem=memory.MemoryFileSystem())
    assert path_of(storage_of(run)).endswith("bucket/prefix")
