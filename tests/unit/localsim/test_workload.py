"""A pretend training tells whether a step was lost or done twice."""

from spotfit_localsim.workload import Chain, Crash, State, Training, Validations, Workload


def test_every_step_leaves_its_own_trace() -> None:
    chain = Chain()
    assert chain.at(3) == State().next().next().next()
    assert len({chain.at(step).link for step in range(50)}) == 50


def test_a_mistake_happens_as_often_as_planned_and_only_there() -> None:
    training = Training(Workload(crashes=(Crash(5, rank=1, times=2),)))
    assert training.crash(5, 0) is None
    assert training.crash(4, 1) is None
    assert training.crash(5, 1) == training.crash(5, 1) == Crash(5, rank=1, times=2)
    assert training.crash(5, 1) is None
    assert training.crashed == 2


def test_what_is_to_be_validated_is_the_same_whoever_asks() -> None:
    some = Training(Workload(validations=Validations(share=0.5)))
    asked = [some.asks(step) for step in range(1, 50)]
    assert asked == [Training(some.load).asks(step) for step in range(1, 50)]
    assert 10 < sum(one is not None for one in asked) < 40
    assert all(Training(Workload()).asks(step) is None for step in range(50))


def test_repeated_steps_are_counted_and_only_new_ones_are_told() -> None:
    told: list[int] = []
    training = Training(Workload(steps=3))
    training.reached.append(told.append)
    for step in (1, 2, 2, 3):
        training.done(step)
    assert told == [1, 2, 3]
    assert training.steps_done - training.furthest == 1
    assert training.result == training.chain.at(3)


def test_all_ranks_go_back_after_the_same_reports_and_leave_what_they_saved() -> None:
    some = Training(Workload(goes_back=0.3))
    back = [some.goes_back(1, report) for report in range(50)]
    assert back == [Training(some.load).goes_back(1, report) for report in range(50)]
    assert 5 < sum(back) < 30
    assert not any(Training(Workload()).goes_back(1, report) for report in range(50))
    some.saved = {1: {8}, 2: {12}, 3: {14}}
    some.went_back(2)
    assert some.saved == {3: {14}}
