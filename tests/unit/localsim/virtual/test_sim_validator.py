"""A pretend validation reads the checkpoint, takes its time, and tells, fails or hangs."""

from __future__ import annotations

from typing import Any

from spotfit.model.events import ValidationRequest
from spotfit.protocol.agent_sidecar import ValidationResult
from spotfit.testing.builders import a_committed_checkpoint, a_spec
from spotfit_localsim.virtual.sim_snapshots import SimSavedState
from spotfit_localsim.virtual.sim_validator import SimValidator
from spotfit_localsim.virtual.workload import ValidationWorkload, Workload, validation_score
from tests.unit.localsim.virtual.test_sim_workers import Stage, keep

KEPT = a_committed_checkpoint("kept", validation=ValidationRequest())


class ValidatorHarness:
    """A stage with one who validates."""

    def __init__(self, *, written: bool = True, **plan: Any) -> None:
        usual: dict[str, Any] = {
            "duration_s": (2.0, 2.0),
            "failure_probability": 0.0,
            "hang_probability": 0.0,
        }
        self.stage = Stage(Workload(validations=ValidationWorkload(**{**usual, **plan})))
        if written:
            keep(self.stage.bucket, SimSavedState(3, "x"))
        self.process = self.stage.ground.idle("v1")
        self.validator = SimValidator(self.stage.context, self.process)

    def start(self) -> None:
        self.validator.start(a_spec(), KEPT)


def test_score_is_reported_once_after_its_duration() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.stage.rest(1.9)
    assert (harness.validator.is_running, harness.validator.take_result()) == (True, None)
    harness.stage.rest(0.2)
    assert (harness.validator.is_running, harness.validator.take_result()) == (
        False,
        ValidationResult(metrics={"score": validation_score(3)}),
    )
    assert harness.validator.take_result() is None


def test_validations_fail_or_hang_as_configured() -> None:
    failing = ValidatorHarness(failure_probability=1.0)
    failing.start()
    failing.stage.rest(3.0)
    assert failing.validator.take_result() == ValidationResult(message="simulated validation error")
    hanging = ValidatorHarness(hang_probability=1.0)
    hanging.start()
    hanging.stage.rest(1000.0)
    assert hanging.validator.is_running


def test_stopped_validation_exits_without_result() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.validator.stop()
    assert harness.validator.is_running
    harness.stage.rest(5.0)
    assert (harness.validator.is_running, harness.validator.take_result()) == (False, None)


def test_concurrent_or_unreadable_validation_is_a_violation() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.start()
    assert harness.stage.complaints == ["v1 runs two validations at once"]
    harness = ValidatorHarness(written=False)
    harness.start()
    assert "is being validated, but no complete set" in harness.stage.complaints[0]


def test_closed_validator_has_no_result() -> None:
    harness = ValidatorHarness()
    harness.start()
    harness.validator.close()
    harness.stage.rest(5.0)
    assert (harness.validator.is_running, harness.validator.take_result()) == (False, None)
