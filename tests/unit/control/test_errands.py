"""Errands: a slow call never makes a step machine stand still, and its answer is never lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spotfit.control.errands import Done, Errands, Inline, Insistent, Threaded
from spotfit.core.errors import TransientStoreError

PATIENCE_S = 30.0


class Woken:
    """Counts how often somebody was woken; a test may wait for it."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def __call__(self) -> None:
        self._semaphore.release()

    def wait(self) -> None:
        assert self._semaphore.acquire(timeout=PATIENCE_S), "nobody was woken"


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def threaded(woken: Woken) -> Iterator[Threaded]:
    errands = Threaded(woken, threads=2)
    yield errands
    errands.close()


def test_inline_does_it_at_once_and_makes_an_error_a_value() -> None:
    errands: Errands = Inline()
    assert errands.run("a", lambda: 7) == Done(7)
    wrong = errands.run("b", lambda: 1 / 0)
    assert wrong is not None
    assert isinstance(wrong.error, ZeroDivisionError)
    errands.send("c", lambda: 1 / 0)  # nobody waits for its answer, an error neither


def test_an_errand_is_under_way_until_it_is_done_and_then_wakes_its_sender(
    threaded: Threaded, woken: Woken
) -> None:
    gate = threading.Event()
    assert threaded.run("a", lambda: gate.wait(PATIENCE_S)) is None
    assert threaded.run("a", lambda: 1 / 0) is None, "it is not started twice"
    gate.set()
    assert the_answer(threaded, "a", woken) == Done(value=True)


def test_an_answer_is_given_once_and_the_next_question_is_a_new_one(
    threaded: Threaded, woken: Woken
) -> None:
    threaded.run("a", lambda: 1)
    assert the_answer(threaded, "a", woken) == Done(1)
    assert threaded.run("a", lambda: 2) is None
    assert the_answer(threaded, "a", woken) == Done(2)


def test_an_error_comes_as_an_answer(threaded: Threaded, woken: Woken) -> None:
    threaded.run("a", lambda: 1 / 0)
    answer = the_answer(threaded, "a", woken)
    assert isinstance(answer.error, ZeroDivisionError)


def test_what_is_sent_runs_once_at_a_time(threaded: Threaded, woken: Woken) -> None:
    gate, runs = threading.Event(), []

    def job() -> None:
        runs.append(1)
        gate.wait(PATIENCE_S)

    for _ in range(3):
        threaded.send("lease", job)
    gate.set()
    woken.wait()
    assert len(runs) == 1


def test_errands_of_different_names_do_not_wait_for_each_other(
    threaded: Threaded, woken: Woken
) -> None:
    gate = threading.Event()
    threaded.run("slow", lambda: gate.wait(PATIENCE_S))
    threaded.run("quick", lambda: 1)
    assert the_answer(threaded, "quick", woken) == Done(1)
    gate.set()


def test_what_is_sent_does_not_wait_for_slow_errands(threaded: Threaded) -> None:
    gate, renewed = threading.Event(), threading.Event()
    for name in ("observe", "submit", "cancel"):  # more than there are threads
        threaded.run(name, gate.wait)
    threaded.send("lease", renewed.set)
    try:
        assert renewed.wait(PATIENCE_S), "a lease that is late costs the lead"
    finally:
        gate.set()


def the_answer(errands: Threaded, name: str, woken: Woken) -> Done:
    woken.wait()
    done = errands.run(name, _never)
    assert done is not None, "who is woken finds the answer"
    return done


def _never() -> None:
    raise AssertionError("the errand was started again")


# --- what must succeed ---------------------------------------------------------------------------


class Fails:
    """A job that fails so often, then gives 7."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.tried = 0

    def __call__(self) -> int:
        self.tried += 1
        if self.left:
            self.left -= 1
            raise TransientStoreError("the bucket is away")
        return 7


def test_what_failed_is_done_again_after_a_pause_until_it_succeeds() -> None:
    insistent, job = Insistent(Inline()), Fails(2)
    given = [insistent.run("offer", job, now) for now in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert given == [None, None, None, None, Done(7)]
    assert job.tried == 3
    assert insistent.run("offer", Fails(0), 0.3) == Done(7), "and then it is forgotten"


def test_one_errand_that_fails_holds_up_no_other() -> None:
    insistent = Insistent(Inline())
    assert insistent.run("offer", Fails(1), 0.0) is None
    assert insistent.run("result", Fails(0), 0.0) == Done(7)


def test_trouble_is_told_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    insistent, job = Insistent(Inline()), Fails(3)
    for now in range(4):
        insistent.run("offer", job, float(now * 10))
    assert capsys.readouterr().err.count("the bucket is away") == 1
