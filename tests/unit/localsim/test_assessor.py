"""A pretend validation reads the checkpoint, takes its time, and tells, fails or hangs."""

from __future__ import annotations

from typing import Any

from spotfit.model.assessment import Verdict
from spotfit.model.events import ValidationAsked
from spotfit.testing.builders import a_commit, a_spec
from spotfit_localsim.assessor import SimAssessor
from spotfit_localsim.saves import Kept
from spotfit_localsim.workload import Validations, Workload, score
from tests.unit.localsim.test_crew import Stage, keep

KEPT = a_commit("kept", validation=ValidationAsked())


class Room:
    """A stage with one who validates."""

    def __init__(self, *, written: bool = True, **plan: Any) -> None:
        usual: dict[str, Any] = {"takes_s": (2.0, 2.0), "failing": 0.0, "hanging": 0.0}
        self.stage = Stage(Workload(validations=Validations(**{**usual, **plan})))
        if written:
            keep(self.stage.bucket, Kept(3, "x"))
        self.process = self.stage.ground.idle("v1")
        self.assessor = SimAssessor(self.stage.theatre, self.process)

    def begin(self) -> None:
        self.assessor.begin(a_spec(), KEPT)


def test_it_takes_its_time_and_tells_the_score_once() -> None:
    room = Room()
    room.begin()
    room.stage.rest(1.9)
    assert (room.assessor.busy, room.assessor.verdict()) == (True, None)
    room.stage.rest(0.2)
    assert (room.assessor.busy, room.assessor.verdict()) == (False, Verdict({"score": score(3)}))
    assert room.assessor.verdict() is None


def test_some_fail_and_some_hang() -> None:
    failing = Room(failing=1.0)
    failing.begin()
    failing.stage.rest(3.0)
    assert failing.assessor.verdict() == Verdict(told="a mistake in the validation")
    hanging = Room(hanging=1.0)
    hanging.begin()
    hanging.stage.rest(1000.0)
    assert hanging.assessor.busy


def test_a_stopped_one_is_gone_after_a_moment_and_says_nothing() -> None:
    room = Room()
    room.begin()
    room.assessor.stop()
    assert room.assessor.busy
    room.stage.rest(5.0)
    assert (room.assessor.busy, room.assessor.verdict()) == (False, None)


def test_two_at_once_and_one_whose_files_are_gone_are_complained_of() -> None:
    room = Room()
    room.begin()
    room.begin()
    assert room.stage.complaints == ["v1 validates two checkpoints at once"]
    room = Room(written=False)
    room.begin()
    assert "is being validated, but no complete set" in room.stage.complaints[0]


def test_with_its_machine_it_is_gone() -> None:
    room = Room()
    room.begin()
    room.assessor.close()
    room.stage.rest(5.0)
    assert (room.assessor.busy, room.assessor.verdict()) == (False, None)
