"""Threads in virtual time wait, are notified, time out, and end with their process."""

from typing import Any

import pytest

from spotfit_localsim.virtual.engine import Engine
from spotfit_localsim.virtual.sim_threads import SimThreading, ThreadGroup


class Threads:
    """One process with threads, and what they have recorded."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.threading = SimThreading(self.engine)
        self.module: Any = self.threading.as_module()
        self.group = ThreadGroup(self.engine, "host")
        self.log: list[tuple[float, object]] = []

    def record(self, value: object) -> None:
        self.log.append((self.engine.now, value))

    def run(self, *targets: Any) -> list[tuple[float, object]]:
        for target in targets:
            self.threading.run(self.group, target)
        self.engine.run(until=100.0)
        return self.log


def test_thread_waits_until_it_is_notified() -> None:
    threads = Threads()
    condition = threads.module.Condition()

    def wait() -> None:
        with condition:
            threads.record(condition.wait(50.0))

    def notify() -> None:
        threads.threading.sleep(3.0)
        condition.notify_all()

    assert threads.run(wait, notify) == [(3.0, True)]


def test_wait_ends_at_its_timeout() -> None:
    threads = Threads()
    condition = threads.module.Condition()
    assert threads.run(lambda: threads.record(condition.wait(2.0))) == [(2.0, False)]
    condition.notify_all()


def test_event_that_is_set_ends_waits_also_later_ones() -> None:
    threads = Threads()
    event = threads.module.Event()

    def set_later() -> None:
        threads.threading.sleep(1.0)
        event.set()
        threads.record(event.wait(9.0))

    assert threads.run(lambda: threads.record(event.wait()), set_later) == [
        (1.0, True),
        (1.0, True),
    ]
    assert event.is_set()


def test_started_thread_belongs_to_the_process_of_the_one_that_started_it() -> None:
    threads = Threads()

    def start() -> None:
        threads.module.Thread(
            target=lambda name: threads.record((name, threads.threading.group.host)),
            args=["child"],
            name="child",
            daemon=True,
        ).start()

    assert threads.run(start) == [(0.0, ("child", "host"))]
    assert not threads.group.threads, "threads that have ended are forgotten"


def test_threads_of_an_ended_process_have_no_further_effects() -> None:
    threads = Threads()
    condition = threads.module.Condition()
    closed: list[float] = []
    threads.group.exit_listeners.append(lambda: closed.append(threads.engine.now))

    def wait() -> None:
        try:
            condition.wait()
            threads.record("continued")
        finally:
            threads.record("unwound")

    threads.engine.schedule_at(5.0, threads.group.end)
    threads.engine.schedule_at(5.0, condition.notify_all)
    assert threads.run(wait) == [(5.0, "unwound")]
    assert closed == [5.0]
    threads.group.end()
    assert closed == [5.0], "a process ends once"


def test_only_a_simulated_thread_can_wait() -> None:
    with pytest.raises(AssertionError, match="only a simulated thread"):
        Threads().module.Condition().wait(1.0)
