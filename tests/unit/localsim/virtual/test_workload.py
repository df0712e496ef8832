"""A pretend training tells whether a step was lost or done twice."""

from spotfit_localsim.virtual.workload import (
    ModelState,
    ReferenceRun,
    SimTraining,
    UserCrash,
    ValidationWorkload,
    Workload,
)


def test_every_step_leaves_its_own_trace() -> None:
    chain = ReferenceRun()
    assert chain.state_at(3) == ModelState().advance().advance().advance()
    assert len({chain.state_at(step).link for step in range(50)}) == 50


def test_a_mistake_happens_as_often_as_planned_and_only_there() -> None:
    training = SimTraining(Workload(crashes=(UserCrash(5, rank=1, times=2),)))
    assert training.take_crash(5, 0) is None
    assert training.take_crash(4, 1) is None
    assert training.take_crash(5, 1) == training.take_crash(5, 1) == UserCrash(5, rank=1, times=2)
    assert training.take_crash(5, 1) is None
    assert training.crash_count == 2


def test_what_is_to_be_validated_is_the_same_whoever_asks() -> None:
    some = SimTraining(Workload(validations=ValidationWorkload(fraction=0.5)))
    asked = [some.validation_request(step) for step in range(1, 50)]
    assert asked == [SimTraining(some.workload).validation_request(step) for step in range(1, 50)]
    assert 10 < sum(one is not None for one in asked) < 40
    assert all(SimTraining(Workload()).validation_request(step) is None for step in range(50))


def test_repeated_steps_are_counted_and_only_new_ones_are_told() -> None:
    told: list[int] = []
    training = SimTraining(Workload(steps=3))
    training.step_listeners.append(told.append)
    for step in (1, 2, 2, 3):
        training.record_step(step)
    assert told == [1, 2, 3]
    assert training.executed_steps - training.max_step == 1
    assert training.expected_result == training.reference.state_at(3)


def test_all_ranks_go_back_after_the_same_reports_and_leave_what_they_saved() -> None:
    some = SimTraining(Workload(rollback_probability=0.3))
    back = [some.should_roll_back(1, report) for report in range(50)]
    assert back == [SimTraining(some.workload).should_roll_back(1, report) for report in range(50)]
    assert 5 < sum(back) < 30
    assert not any(SimTraining(Workload()).should_roll_back(1, report) for report in range(50))
    some.snapshot_steps = {1: {8}, 2: {12}, 3: {14}}
    some.record_rollback(2)
    assert some.snapshot_steps == {3: {14}}
