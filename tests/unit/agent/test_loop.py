"""One wait for everything: sockets, moments and other threads, each told in the loop's thread."""

import socket
import threading
from collections.abc import Iterator

import pytest

from spotfit.agent.loop import READ, Loop


class Still:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Still:
    return Still()


@pytest.fixture
def loop(clock: Still) -> Iterator[Loop]:
    loop = Loop(clock)
    yield loop
    loop.close()


def test_what_is_ready_is_called(loop: Loop) -> None:
    seen: list[int] = []
    here, there = socket.socketpair()
    with here, there:
        loop.watch(here, READ, seen.append)
        there.send(b"x")
        loop.turn(5)
        loop.forget(here)
        loop.turn(0)
    assert seen == [READ]


def test_who_was_closed_by_an_earlier_call_is_not_called(loop: Loop) -> None:
    seen: list[str] = []
    pairs = [socket.socketpair() for _ in range(2)]

    def close_all(_: int) -> None:
        seen.append("called")
        for here, there in pairs:
            loop.forget(here)
            here.close()
            there.close()

    for here, there in pairs:
        loop.watch(here, READ, close_all)
        there.send(b"x")
    loop.turn(5)
    assert seen == ["called"]


def test_moments_come_in_order_and_may_be_called_off(loop: Loop, clock: Still) -> None:
    seen: list[str] = []
    loop.after(2.0, lambda: seen.append("late"))
    loop.after(1.0, lambda: seen.append("early"))
    loop.after(1.5, lambda: seen.append("never")).call_off()
    clock.wait(1.0)
    loop.turn(None)
    assert seen == ["early"]
    clock.wait(5.0)
    loop.turn(None)
    assert seen == ["early", "late"]


def test_another_thread_ends_the_wait_and_is_answered_here(loop: Loop) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: loop.post(lambda: seen.append(threading.get_ident())))
    thread.start()
    while not seen:
        loop.turn(5)
    thread.join()
    assert seen == [threading.get_ident()]
    for _ in range(100_000):  # far more than the pipe holds
        loop.wake()
    loop.turn(0)
