"""The validator program: loads and calls the function, reports its result."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.code.code_bundle import upload_code_bundle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import InfrastructureError
from spotfit.frameworks.devices import CUDA_VISIBLE_DEVICES
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.protocol import framing
from spotfit.protocol.agent_sidecar import ValidationResult, ValidationTask
from spotfit.security.run_key import RunKey
from spotfit.sidecar import validator_process
from spotfit.sidecar.validator_process import validate_checkpoint
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.retry import PATIENT_RETRY_POLICY, RetryPolicy
from spotfit.testing.builders import RUN_ID
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint

KEY = RunKey(b"k" * 32, RUN_ID)


def read(checkpoint: Any, **kwargs: Any) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        return {"model": Path(folder, "model").read_text(), **kwargs}


@pytest.fixture(autouse=True)
def restore_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore what activating the code bundle changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(CUDA_VISIBLE_DEVICES, "6,7")
    monkeypatch.setenv("COLOUR", "red")


def make_task(
    tmp_path: Path, fn: Callable[..., Any] = read, trainer_kwargs: Any = None, **fields: Any
) -> ValidationTask:
    store = AuthenticatedStore(open_store(str(tmp_path / "run")), KEY)
    save_checkpoint(store, tmp_path / "c1", make_manifest("c1"), model="w")
    reference = upload_code_bundle(
        lambda: None,
        None,
        runtime_env=RuntimeEnv(env_vars={"COLOUR": "blue"}),
        key=KEY,
        store=store,
        objects={"validation": (fn, trainer_kwargs or {})},
    )
    bundle = msgspec.to_builtins(reference)
    defaults: dict[str, Any] = {"checkpoint_name": "c1", "scratch_dir": str(tmp_path)}
    return ValidationTask(
        storage_url=store.url,
        code_bundle=bundle,
        secret=KEY.to_text(),
        run_id=RUN_ID,
        **{**defaults, **fields},
    )


def test_arguments_of_the_report_override_those_of_the_trainer(tmp_path: Path) -> None:
    trainer_kwargs = {"a": 1, "b": float("nan")}
    task = make_task(
        tmp_path, trainer_kwargs=trainer_kwargs, fn_kwargs={"b": 2, "c": {"__float__": "inf"}}
    )
    assert validate_checkpoint(task) == ValidationResult(
        metrics={"model": "w", "a": 1, "b": 2, "c": {"__float__": "inf"}}
    )


def test_the_store_retries_as_long_as_that_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RetryPolicy | None] = []

    def record_open(url: str, budget: RetryPolicy | None = None) -> Store:
        opened.append(budget)
        return open_store(url, budget)

    task = make_task(tmp_path)
    monkeypatch.setattr("spotfit.sidecar.validator_process.open_store", record_open)
    assert validate_checkpoint(task).metrics == {"model": "w"}
    assert opened == [PATIENT_RETRY_POLICY]


def test_the_function_runs_in_the_environment_of_the_workers(tmp_path: Path) -> None:
    def read_environment(checkpoint: Any) -> dict[str, Any]:
        return {"colour": os.environ["COLOUR"], "cards": os.environ[CUDA_VISIBLE_DEVICES]}

    assert validate_checkpoint(make_task(tmp_path, read_environment)) == ValidationResult(
        metrics={"colour": "blue", "cards": ""}
    )


def test_the_function_sees_its_own_accelerators_only(tmp_path: Path) -> None:
    def read_environment(checkpoint: Any) -> dict[str, Any]:
        return {"cards": os.environ[CUDA_VISIBLE_DEVICES]}

    assert validate_checkpoint(
        make_task(tmp_path, read_environment, devices=("cuda:1",))
    ) == ValidationResult(metrics={"cards": "7"})


def raising(checkpoint: Any) -> dict[str, Any]:
    raise ArithmeticError("nothing there")


def exiting(checkpoint: Any) -> dict[str, Any]:
    sys.exit(0)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (raising, "ArithmeticError: nothing there"),
        (exiting, "SystemExit: 0"),
        (lambda _: [1, 2], "must return a dictionary of metrics, not a list"),
        (lambda _: {"acc": object()}, "metrics['acc'] cannot be reported"),
    ],
    ids=["raises", "leaves", "no dictionary", "no metrics"],
)
def test_an_error_in_the_function_is_not_retryable(tmp_path: Path, fn: Any, message: str) -> None:
    result = validate_checkpoint(make_task(tmp_path, fn))
    assert (result.metrics, result.retryable) == (None, False)
    assert message in result.message


def test_the_traceback_starts_in_user_code(tmp_path: Path) -> None:
    message = validate_checkpoint(make_task(tmp_path, raising)).message
    assert "in raising" in message
    assert "sidecar/validator_process.py" not in message


def test_an_infrastructure_error_is_retryable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: Any, **__: Any) -> Any:
        raise InfrastructureError("The disk is raise_disk_full.", do="Make room.")

    task = make_task(tmp_path)
    monkeypatch.setattr(validator_process, "activate_code_bundle", raise_disk_full)
    result = validate_checkpoint(task)
    assert result.retryable
    assert "The disk is raise_disk_full." in result.message


def test_a_modified_bundle_is_not_loaded(tmp_path: Path) -> None:
    task = msgspec.structs.replace(make_task(tmp_path), secret=RunKey(b"x" * 32, RUN_ID).to_text())
    result = validate_checkpoint(task)
    assert (result.metrics, result.retryable) == (None, False)
    assert "was modified, or sealed with the key of another run" in result.message


def test_the_process_exchanges_one_message_and_exits(tmp_path: Path) -> None:
    agent_end, process_end = socket.socketpair()
    framing.write_frame(agent_end, encode(make_task(tmp_path)))
    child = os.fork()
    if child == 0:
        agent_end.close()
        validator_process.main(process_end.fileno())
    process_end.close()
    body = framing.read_frame(agent_end)
    assert body is not None
    assert decoder(ValidationResult).decode(body) == ValidationResult(metrics={"model": "w"})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    agent_end.close()


def test_the_process_exits_without_an_agent() -> None:
    agent_end, process_end = socket.socketpair()
    child = os.fork()
    if child == 0:
        agent_end.close()
        validator_process.main(process_end.fileno())
    agent_end.close()
    process_end.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
