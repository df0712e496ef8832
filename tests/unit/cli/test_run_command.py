"""`spotfit run` translates its options into a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from spotfit.cli import run_command
from spotfit.cli.main import app
from spotfit.client.trainer import DataParallelTrainer, TorchTrainer
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.frameworks.torch.torch_config import TorchConfig


class Handle:
    """What `submit()` returns."""

    url = "s3://bucket/run"


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DataParallelTrainer]:
    """The trainers whose `fit()` or `submit()` were called, in a folder with a script."""
    called: list[DataParallelTrainer] = []
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")

    def submit(trainer: DataParallelTrainer) -> Handle:
        called.append(trainer)
        return Handle()

    monkeypatch.setattr(DataParallelTrainer, "fit", submit)
    monkeypatch.setattr(DataParallelTrainer, "submit", submit)
    return called


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def config_of(trainers: list[DataParallelTrainer]) -> dict[str, Any]:
    [trainer] = trainers
    assert trainer.train_loop_config is not None
    return trainer.train_loop_config


@pytest.mark.parametrize(
    "arguments", [("train.py", "--lr", "1"), ("train.py", "--", "--lr", "1")], ids=["plain", "--"]
)
def test_what_follows_the_script_belongs_to_it(
    trainers: list[DataParallelTrainer], arguments: tuple[str, ...]
) -> None:
    assert invoke("--workers", "4", *arguments).exit_code == 0
    config = {"script": "train.py", "arguments": ["--lr", "1"], "is_module": False}
    assert config_of(trainers) == config
    assert trainers[0].scaling_config.num_workers == 4


def test_the_script_forms_its_process_group(trainers: list[DataParallelTrainer]) -> None:
    invoke("train.py")
    [trainer] = trainers
    assert isinstance(trainer, TorchTrainer)
    assert isinstance(trainer.backend_config, TorchConfig)
    assert not trainer.backend_config.form_group


def test_options_become_the_run_config(
    trainers: list[DataParallelTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "secret")
    Path("requirements.txt").write_text("einops==0.8.0")
    options = (
        *("--workers", "2:8", "--name", "digits", "--storage-path", "s3://bucket"),
        *("--deadline", "60h", "--budget", "40", "--training-time", "30h"),
        *("--env", "LR=0.1", "--env", "TOKEN_OF_TEST", "--max-failures", "3"),
        *("--pip", "requirements.txt", "--provisioner", "local?nodes=2"),
    )
    result = invoke(*options, "train.py")
    assert result.exit_code == 0, result.exception
    [trainer] = trainers
    run = trainer.run_config
    assert trainer.scaling_config.num_workers == (2, 8)
    assert (run.name, run.storage_path, run.budget_usd) == ("digits", "s3://bucket", 40)
    assert run.failure_config is not None
    assert run.failure_config.max_failures == 3
    assert run.worker_runtime_env == {
        "working_dir": ".",
        "env_vars": {"LR": "0.1", "TOKEN_OF_TEST": "secret"},
        "pip": "requirements.txt",
    }
    assert trainer.provisioner == "local?nodes=2"


def test_a_script_in_a_folder_is_found_below_the_working_directory(
    trainers: list[DataParallelTrainer],
) -> None:
    Path("code/jobs").mkdir(parents=True)
    Path("code/jobs/fit.py").write_text("")
    for script in ("code/jobs/fit.py", "jobs/fit.py"):
        trainers.clear()
        invoke("--working-dir", "code", script)
        assert config_of(trainers)["script"] == "jobs/fit.py"


def test_a_module_needs_no_file(trainers: list[DataParallelTrainer]) -> None:
    invoke("-m", "package.train", "--lr", "1")
    config = {"script": "package.train", "arguments": ["--lr", "1"], "is_module": True}
    assert config_of(trainers) == config


def test_without_torch_the_group_is_left_out(trainers: list[DataParallelTrainer]) -> None:
    invoke("--framework", "none", "train.py")
    assert not isinstance(trainers[0], TorchTrainer)


def test_detached_the_url_is_printed(trainers: list[DataParallelTrainer]) -> None:
    assert "spotfit follow s3://bucket/run" in invoke("--detach", "train.py").stdout
    assert len(trainers) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "The script 'missing.py' does not exist"),
        (("--working-dir", "empty", "train.py"), "is not below the working directory"),
        (("--workers", "many", "train.py"), "--workers='many' is not a number"),
        (("--workers", "0", "train.py"), "--workers='0' is not a number"),
        (("--env", "MISSING_OF_TEST", "train.py"), "--env MISSING_OF_TEST"),
        (("--framework", "jaxx", "train.py"), "--framework='jaxx' is unknown"),
    ],
)
def test_invalid_options_are_errors(
    trainers: list[DataParallelTrainer], arguments: tuple[str, ...], message: str
) -> None:
    Path("empty").mkdir()
    failed = invoke(*arguments)
    assert isinstance(failed.exception, ConfigError)
    assert message in str(failed.exception)
    assert not trainers


def test_all_invalid_options_are_reported_together(trainers: list[DataParallelTrainer]) -> None:
    failed = invoke("--workers", "0", "--deadline", "soon", "missing.py")
    assert isinstance(failed.exception, ConfigErrors)
    assert len(failed.exception.errors) == 3
    assert not trainers


def test_every_option_has_a_help_text() -> None:
    assert run_command.run.__doc__
    assert "--provisioner" in invoke("--help").stdout
