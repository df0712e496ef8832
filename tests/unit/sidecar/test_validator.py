"""ProcessValidator: one process per checkpoint, whose result counts after its exit."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.model.events import ValidationRequest
from spotfit.model.spec import ValidationSpec
from spotfit.protocol.agent_fork_server import EXIT_FORK_SERVER_DIED, EXIT_NOT_STARTED
from spotfit.protocol.agent_sidecar import ValidationResult, ValidationTask
from spotfit.sidecar.validator import ProcessValidator
from spotfit.testing.builders import RUN_ID, a_committed_checkpoint, a_spec
from tests.unit.sidecar.fake_process import FakeStarter

CHECKPOINT = a_committed_checkpoint("c1", validation=ValidationRequest(fn_kwargs={"batches": 2}))


def start_validation(
    devices: tuple[str, ...] = (), gpus: float = 0
) -> tuple[ProcessValidator, FakeStarter]:
    starter = FakeStarter()
    validator = ProcessValidator(
        starter.start, secret="hush", run_id=RUN_ID, scratch="/scratch", devices=devices
    )
    resources = {"GPU": gpus} if gpus else {"CPU": 1.0}
    spec = a_spec(storage_url="/run", validation=ValidationSpec(resources=resources))
    validator.start(spec, CHECKPOINT)
    return validator, starter


def received_task(starter: FakeStarter) -> ValidationTask:
    (message,) = starter.latest.received
    return msgspec.convert(message, ValidationTask)


def test_the_process_receives_the_task() -> None:
    validator, starter = start_validation()
    task = received_task(starter)
    assert task == ValidationTask(
        storage_url="/run",
        code_bundle={},
        secret="hush",
        run_id=RUN_ID,
        checkpoint_name="c1",
        fn_kwargs={"batches": 2},
        scratch_dir="/scratch",
        run_name="digits",
    )
    assert validator.is_running
    assert "hush" not in repr(task)


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [(0, ()), (0.5, ("cuda:0",)), (1, ("cuda:0",)), (2, ("cuda:0", "cuda:1"))],
)
def test_the_process_gets_the_accelerators_it_requests(
    gpus: float, devices: tuple[str, ...]
) -> None:
    _, starter = start_validation(("cuda:0", "cuda:1"), gpus)
    assert received_task(starter).devices == devices


def test_the_result_counts_once_the_process_has_exited() -> None:
    validator, starter = start_validation()
    starter.latest.reply(ValidationResult(metrics={"acc": 1}))
    assert (validator.is_running, validator.take_result()) == (True, None)
    starter.latest.exit("exited with code 0")
    assert (validator.is_running, validator.take_result()) == (
        False,
        ValidationResult(metrics={"acc": 1}),
    )
    assert validator.take_result() is None, "returned once"


@pytest.mark.parametrize(
    ("reason", "retryable"),
    [
        ("was killed by SIGKILL", False),
        (EXIT_FORK_SERVER_DIED, True),
        (f"{EXIT_NOT_STARTED}: no memory", True),
    ],
)
def test_an_exit_without_a_result_is_a_failure(reason: str, retryable: bool) -> None:
    validator, starter = start_validation()
    starter.latest.exit(reason)
    assert validator.take_result() == ValidationResult(
        message=f"The validation process {reason}.", retryable=retryable
    )


def test_a_stopped_process_has_no_result() -> None:
    validator, starter = start_validation()
    starter.latest.reply(ValidationResult(metrics={"acc": 1}))
    validator.stop()
    assert starter.latest.killed
    assert validator.is_running, "until it has exited"
    starter.latest.exit()
    assert (validator.is_running, validator.take_result()) == (False, None)


def test_a_stopped_process_does_not_affect_the_next_one() -> None:
    validator, starter = start_validation()
    validator.stop()
    starter.latest.exit()
    validator.start(a_spec(), CHECKPOINT)
    starter.latest.exit("exited with code 3")
    assert validator.take_result() == ValidationResult(
        message="The validation process exited with code 3."
    )
    assert len(starter.processes) == 2
