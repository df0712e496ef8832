"""The simulated training detects lost and repeated steps."""

from spotfit_localsim.virtual.workload import (
    ModelState,
    ReferenceRun,
    SimTraining,
    UserCrash,
    ValidationWorkload,
    Workload,
)


def test_every_step_changes_the_state() -> None:
    reference = ReferenceRun()
    assert reference.state_at(3) == ModelState().advance().advance().advance()
    assert len({reference.state_at(step).link for step in range(50)}) == 50


def test_user_crash_happens_at_its_step_and_rank_the_configured_number_of_times() -> None:
    training = SimTraining(Workload(crashes=(UserCrash(5, rank=1, times=2),)))
    assert training.take_crash(5, 0) is None
    assert training.take_crash(4, 1) is None
    assert training.take_crash(5, 1) == training.take_crash(5, 1) == UserCrash(5, rank=1, times=2)
    assert training.take_crash(5, 1) is None
    assert training.crash_count == 2


def test_validation_requests_are_equal_on_all_ranks() -> None:
    training = SimTraining(Workload(validations=ValidationWorkload(fraction=0.5)))
    requests = [training.validation_request(step) for step in range(1, 50)]
    assert requests == [
        SimTraining(training.workload).validation_request(step) for step in range(1, 50)
    ]
    assert 10 < sum(one is not None for one in requests) < 40
    assert all(SimTraining(Workload()).validation_request(step) is None for step in range(50))


def test_repeated_steps_are_counted_and_not_passed_to_listeners() -> None:
    observed_steps: list[int] = []
    training = SimTraining(Workload(steps=3))
    training.step_listeners.append(observed_steps.append)
    for step in (1, 2, 2, 3):
        training.record_step(step)
    assert observed_steps == [1, 2, 3]
    assert training.executed_steps - training.max_step == 1
    assert training.is_correct(training.reference.state_at(3))
    assert not training.is_correct(ModelState(3, "another link"))


def test_all_ranks_roll_back_after_the_same_reports_and_discard_later_snapshots() -> None:
    training = SimTraining(Workload(rollback_probability=0.3))
    rolls_back = [training.should_roll_back(1, report) for report in range(50)]
    assert rolls_back == [
        SimTraining(training.workload).should_roll_back(1, report) for report in range(50)
    ]
    assert 5 < sum(rolls_back) < 30
    assert not any(SimTraining(Workload()).should_roll_back(1, report) for report in range(50))
    training.snapshot_steps = {1: {8}, 2: {12}, 3: {14}}
    training.record_rollback(2)
    assert training.snapshot_steps == {3: {14}}


def test_progress_is_the_share_of_the_steps() -> None:
    training = SimTraining(Workload(steps=8))
    training.record_report((1, 0), 2)
    training.record_report((1, 1), 9)
    assert training.reported_progress == {(1, 0): 0.25, (1, 1): 1.0}


def test_steps_of_a_smaller_group_take_longer_in_proportion() -> None:
    assert Workload().slowdown(1) == 1.0
    divided = Workload(full_size=4)
    assert [divided.slowdown(workers) for workers in (4, 2, 1)] == [1.0, 2.0, 4.0]
