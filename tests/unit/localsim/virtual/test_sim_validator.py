"""A simulated validation reads the checkpoint and reports a score, fails or hangs."""

from __future__ import annotations

from typing import Any

from spotfit.model.events import ValidationRequest
from spotfit.protocol.agent_sidecar import ValidationResult
from spotfit.testing.builders import a_committed_checkpoint, a_spec
from spotfit_localsim.virtual.sim_snapshots import SimSavedState
from spotfit_localsim.virtual.sim_validator import SimValidator
from spotfit_localsim.virtual.workload import ValidationWorkload, Workload, validation_score
from tests.unit.localsim.virtual.test_sim_workers import WorkerHarness, write_checkpoint

CHECKPOINT = a_committed_checkpoint("kept", validation=ValidationRequest())


class ValidatorHarness:
    """Simulated workers and a validator."""

    def __init__(self, *, checkpoint_exists: bool = True, **plan: Any) -> None:
        defaults: dict[str, Any] = {
            "duration_s": (2.0, 2.0),
            "failure_probability": 0.0,
            "hang_probability": 0.0,
        }
        self.workers = WorkerHarness(
            Workload(validations=ValidationWorkload(**{**defaults, **plan}))
        )
        if checkpoint_exists:
            write_checkpoint(self.workers.bucket, SimSavedState(3, "x"))
        self.process = self.workers.sim.idle("v1")
        self.validator = SimValidator(self.workers.context, self.process)

    def start(self) -> None:
        self.validator.start(a_spec(), CHECKPOINT)


def test_score_is_reported_once_after_its_duration() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.workers.advance(1.9)
    assert (harness.validator.is_running, harness.validator.take_result()) == (True, None)
    harness.workers.advance(0.2)
    assert (harness.validator.is_running, harness.validator.take_result()) == (
        False,
        ValidationResult(metrics={"score": validation_score(3)}),
    )
    assert harness.validator.take_result() is None


def test_validations_fail_or_hang_as_configured() -> None:
    failing = ValidatorHarness(failure_probability=1.0)
    failing.start()
    failing.workers.advance(3.0)
    assert failing.validator.take_result() == ValidationResult(message="simulated validation error")
    hanging = ValidatorHarness(hang_probability=1.0)
    hanging.start()
    hanging.workers.advance(1000.0)
    assert hanging.validator.is_running


def test_stopped_validation_exits_without_result() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.validator.stop()
    assert harness.validator.is_running
    harness.workers.advance(5.0)
    assert (harness.validator.is_running, harness.validator.take_result()) == (False, None)


def test_concurrent_or_unreadable_validation_is_a_violation() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.start()
    assert harness.workers.violations == ["v1 runs two validations at once"]
    harness = ValidatorHarness(checkpoint_exists=False)
    harness.start()
    assert "is being validated, but no complete set" in harness.workers.violations[0]


def test_closed_validator_has_no_result() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.validator.close()
    harness.workers.advance(5.0)
    assert (harness.validator.is_running, harness.validator.take_result()) == (False, None)
