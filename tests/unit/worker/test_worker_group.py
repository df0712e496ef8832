"""The workers as hooks see them: calls go out once, answers and errors come back by rank."""

from __future__ import annotations

import cloudpickle
import pytest

from spotfit.core.errors import ConfigError, WorkersGoneError
from spotfit.model.hooks import Ask, Told
from spotfit.ship.function import unpickled
from spotfit.worker.worker_group import Asking, WorkerGroup

ROUND = 3


class Workers:
    """Answer at once, or when the test lets them."""

    def __init__(self, *, prompt: bool = True) -> None:
        self.asking = Asking(self.ask)
        self.group = WorkerGroup(self.asking, ROUND, 3, {"CPU": 2})
        self.asked: list[Ask] = []
        self.prompt = prompt

    def ask(self, ask: Ask) -> None:
        self.asked.append(ask)
        for rank in ask.ranks if self.prompt else ():
            self.answer(ask, rank)

    def answer(self, ask: Ask, rank: int) -> None:
        fn, args, kwargs = unpickled(ask.body, what="call")
        value = fn(rank, *args, **kwargs)
        self.asking.told(Told(ask.round, rank, ask.call, cloudpickle.dumps(value)))

    def fail(self, rank: int, error: bytes) -> None:
        ask = self.asked[-1]
        self.asking.told(Told(ask.round, rank, ask.call, error, "Traceback\nKeyError: 'x'"))


def named(rank: int, name: str, end: str = "") -> str:
    return f"{name}{rank}{end}"


def test_a_call_of_all_goes_out_once_and_is_answered_by_rank() -> None:
    workers = Workers()
    assert workers.group.execute(named, "w", end="!") == ["w0!", "w1!", "w2!"]
    assert [ask.ranks for ask in workers.asked] == [(0, 1, 2)]
    assert workers.asked[0].round == ROUND


def test_a_call_of_one_is_of_one() -> None:
    workers = Workers()
    assert workers.group.execute_single(2, named, "w") == "w2"
    assert [ask.ranks for ask in workers.asked] == [(2,)]


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"no worker of rank {rank} among 3"):
        Workers().group.execute_single(rank, named, "w")


def test_who_does_not_wait_holds_futures_that_answers_fill_in_any_order() -> None:
    workers = Workers(prompt=False)
    futures = workers.group.execute_async(named, "w")
    other = workers.group.execute_single_async(0, named, "v")
    for rank in (2, 0, 1):
        assert not futures[rank].done()
        workers.answer(workers.asked[0], rank)
    assert [future.result(0) for future in futures] == ["w0", "w1", "w2"]
    assert not other.done()


def test_what_a_worker_raised_is_raised_here_with_its_rank() -> None:
    workers = Workers(prompt=False)
    future = workers.group.execute_single_async(1, named, "w")
    workers.fail(1, cloudpickle.dumps(KeyError("x")))
    error = future.exception(0)
    assert isinstance(error, KeyError)
    assert error.__notes__ == ["raised in the worker of rank 1:\nTraceback\nKeyError: 'x'"]


def test_what_could_not_be_pickled_is_raised_by_its_text() -> None:
    workers = Workers(prompt=False)
    future = workers.group.execute_single_async(1, named, "w")
    workers.fail(1, b"")
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        future.result(0)


def test_an_answer_that_cannot_be_read_fails_its_call_alone() -> None:
    workers = Workers(prompt=False)
    future = workers.group.execute_single_async(1, named, "w")
    ask = workers.asked[0]
    workers.asking.told(Told(ask.round, 1, ask.call, b"nonsense"))
    assert future.exception(0) is not None
    workers.asking.told(Told(ask.round, 1, ask.call, b""))  # twice is once


def test_once_the_attempt_is_over_nobody_waits_and_nobody_is_called() -> None:
    workers = Workers(prompt=False)
    future = workers.group.execute_single_async(1, named, "w")
    workers.asking.over(ROUND)
    with pytest.raises(WorkersGoneError, match="Attempt 3 is over"):
        future.result(0)
    with pytest.raises(WorkersGoneError):
        workers.group.execute(named, "w")
    later = WorkerGroup(workers.asking, ROUND + 1, 1, {})
    assert not later.execute_single_async(0, named, "w").done()


def test_it_knows_its_size_and_what_each_worker_has() -> None:
    group = Workers().group
    assert (len(group), group.get_resources_per_worker()) == (3, {"CPU": 2})
