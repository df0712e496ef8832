"""Conversion of steps ahead of the training loop."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from spotfit.core.errors import InfrastructureError
from spotfit.data.iteration.prefetching import ConvertedSteps

MODES = pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "caller"])


class Steps:
    """A generator of the integers below `count`; records how far and where it was advanced."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.advanced = 0
        self.threads: set[int] = set()
        self.is_closed = threading.Event()
        self._count = count
        self._fails_at = fails_at

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self._count):
                self.threads.add(threading.get_ident())
                if number == self._fails_at:
                    raise LookupError(f"step {number}")
                self.advanced += 1
                yield number
        finally:
            self.is_closed.set()


def converted(steps: Steps, convert: Any = str, *, ahead: int = 2, in_thread: bool) -> Any:
    return ConvertedSteps(iter(steps), convert, ahead=ahead, advance_in_thread=in_thread)


@MODES
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_batches_are_in_the_order_of_the_steps(ahead: int, in_thread: bool) -> None:
    assert list(converted(Steps(5), ahead=ahead, in_thread=in_thread)) == list("01234")


@MODES
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_than_the_steps_ahead_are_advanced(ahead: int, in_thread: bool) -> None:
    steps = Steps(20)
    batches = converted(steps, ahead=ahead, in_thread=in_thread)
    for taken in range(1, 21):
        next(batches)
        assert steps.advanced <= taken + ahead


def test_steps_of_the_caller_are_ahead_when_a_batch_is_returned() -> None:
    steps = Steps(20)
    next(converted(steps, ahead=3, in_thread=False))
    assert steps.advanced == 4


def test_steps_with_user_code_are_advanced_by_the_caller() -> None:
    steps = Steps(5)
    list(converted(steps, in_thread=False))
    assert steps.threads == {threading.get_ident()}


def test_other_steps_are_advanced_by_one_other_thread() -> None:
    steps = Steps(5)
    list(converted(steps, in_thread=True))
    assert len(steps.threads) == 1
    assert threading.get_ident() not in steps.threads


@MODES
def test_steps_are_converted_in_another_thread(in_thread: bool) -> None:
    threads = set(converted(Steps(5), lambda _: threading.get_ident(), in_thread=in_thread))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@MODES
def test_without_prefetching_everything_happens_in_the_thread_of_the_caller(
    in_thread: bool,
) -> None:
    steps = Steps(3)
    batches = converted(steps, lambda _: threading.get_ident(), ahead=0, in_thread=in_thread)
    assert set(batches) == steps.threads == {threading.get_ident()}


@MODES
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_an_error_of_a_step_is_raised_after_the_batches_before_it(
    ahead: int, in_thread: bool
) -> None:
    batches = converted(Steps(5, fails_at=2), ahead=ahead, in_thread=in_thread)
    assert [next(batches), next(batches)] == ["0", "1"]
    with pytest.raises(LookupError, match="step 2"):
        next(batches)
    assert list(batches) == []


@MODES
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_an_error_of_the_conversion_is_raised_in_place_of_its_batch(
    ahead: int, in_thread: bool
) -> None:
    def convert(step: int) -> float:
        return 1 / (2 - step)

    batches = converted(Steps(5), convert, ahead=ahead, in_thread=in_thread)
    assert [next(batches), next(batches)] == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert list(batches) == []


@MODES
def test_abandoned_steps_are_closed_and_their_thread_ends(in_thread: bool) -> None:
    steps = Steps(100)
    batches = converted(steps, in_thread=in_thread)
    converting = threads_of_batches()
    next(batches)
    (thread,) = threads_of_batches() - converting
    del batches
    thread.join(30)
    assert not thread.is_alive()
    assert steps.is_closed.is_set()


@MODES
def test_the_thread_ends_with_the_steps(in_thread: bool) -> None:
    before = threads_of_batches()
    batches = converted(Steps(1), in_thread=in_thread)
    next(batches)
    (thread,) = threads_of_batches() - before
    assert list(batches) == []
    thread.join(30)
    assert not thread.is_alive()


@MODES
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_batch_is_not_kept_alive(ahead: int, in_thread: bool) -> None:
    class Batch:
        pass

    batches = converted(Steps(3), lambda _: Batch(), ahead=ahead, in_thread=in_thread)
    batch = next(batches)
    reference = weakref.ref(batch)
    del batch
    # Its result is dropped by the thread after the caller has it.
    next(batches)
    assert reference() is None


@MODES
def test_a_program_ends_without_a_running_thread(in_thread: bool) -> None:
    program = f"""
import atexit, threading
# Called last, after the functions that modules register.
atexit.register(lambda: print([t.name for t in threading.enumerate()]))
from spotfit.core.errors import InfrastructureError
from spotfit.data.iteration.prefetching import ConvertedSteps
batches = ConvertedSteps(iter(range(9)), str, ahead=2, advance_in_thread={in_thread})
print(next(batches))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.decode().split("\n")[:2] == ["0", "['MainThread']"]


def threads_of_batches() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "spotfit-batches"}


def test_an_iteration_that_a_fork_inherits_is_refused() -> None:
    steps = ConvertedSteps(iter(range(9)), str, ahead=1, advance_in_thread=True)
    assert next(steps) == "0"
    child = os.fork()
    if child == 0:
        try:
            next(steps)
        except InfrastructureError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
