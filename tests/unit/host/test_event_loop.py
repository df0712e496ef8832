"""The event loop: descriptors, timers, and calls from other threads."""

import socket
import threading
from collections.abc import Iterator

import pytest

from spotfit.host.event_loop import READ, EventLoop


class FakeClock:
    """A clock that advances only in `wait`."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def loop(clock: FakeClock) -> Iterator[EventLoop]:
    loop = EventLoop(clock)
    yield loop
    loop.close()


def test_the_callback_of_a_ready_descriptor_is_called(loop: EventLoop) -> None:
    seen: list[int] = []
    read_end, write_end = socket.socketpair()
    with read_end, write_end:
        loop.register(read_end, READ, seen.append)
        write_end.send(b"x")
        loop.run_once(5)
        loop.unregister(read_end)
        loop.run_once(0)
    assert seen == [READ]


def test_a_descriptor_closed_by_an_earlier_callback_is_skipped(loop: EventLoop) -> None:
    seen: list[str] = []
    pairs = [socket.socketpair() for _ in range(2)]

    def close_all(_: int) -> None:
        seen.append("called")
        for read_end, write_end in pairs:
            loop.unregister(read_end)
            read_end.close()
            write_end.close()

    for read_end, write_end in pairs:
        loop.register(read_end, READ, close_all)
        write_end.send(b"x")
    loop.run_once(5)
    assert seen == ["called"]


def test_timers_run_in_order_and_can_be_cancelled(loop: EventLoop, clock: FakeClock) -> None:
    seen: list[str] = []
    loop.call_later(2.0, lambda: seen.append("late"))
    loop.call_later(1.0, lambda: seen.append("early"))
    loop.call_later(1.5, lambda: seen.append("never")).cancel()
    clock.wait(1.0)
    loop.run_once(None)
    assert seen == ["early"]
    clock.wait(5.0)
    loop.run_once(None)
    assert seen == ["early", "late"]


def test_a_call_from_another_thread_runs_in_the_loop_thread(loop: EventLoop) -> None:
    seen: list[int] = []
    thread = threading.Thread(
        target=lambda: loop.call_soon_threadsafe(lambda: seen.append(threading.get_ident()))
    )
    thread.start()
    while not seen:
        loop.run_once(5)
    thread.join()
    assert seen == [threading.get_ident()]
    for _ in range(100_000):  # far more than the pipe holds
        loop.wake()
    loop.run_once(0)
