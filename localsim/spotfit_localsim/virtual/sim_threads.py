"""Threads of production code in virtual time: greenlets that run until they wait.

`SimThreading.as_module` replaces the module `threading`. A thread belongs to the process whose
thread has started it, and ends with it. Threads run one at a time and change only where they wait:
locks need no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import greenlet

from spotfit_localsim.virtual.engine import Engine, SimThread


class ThreadGroup:
    """The threads of one process on a host."""

    def __init__(self, engine: Engine, host: str) -> None:
        self.host = host
        self.is_alive = True
        self.threads: dict[SimThread, None] = {}
        self.exit_listeners: list[Callable[[], None]] = []
        """Called when the process ends."""
        self._engine = engine

    def end(self) -> None:
        """End all threads: they have no further effects."""
        if not self.is_alive:
            return
        self.is_alive = False
        for thread in self.threads:
            thread.cancel()
        for listener in self.exit_listeners:
            listener()
        # In an event of its own: a greenlet cannot unwind itself.
        self._engine.schedule_after(0.0, self.discard)

    def discard(self) -> None:
        """Release the greenlets."""
        self.is_alive = False
        for thread in list(self.threads):
            thread.terminate()
        self.threads.clear()


class SimThreading:
    """Starts, suspends and resumes the threads of all processes of a simulation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: tuple[ThreadGroup, SimThread] | None = None

    @property
    def group(self) -> ThreadGroup:
        """The process of the thread that runs at present."""
        assert self._running is not None, "no simulated thread runs"
        return self._running[0]

    def run(self, group: ThreadGroup, target: Callable[[], None]) -> None:
        """Run a new thread until it first waits. Called by the engine only."""
        self._resume(group, self._create(group, target))

    def start(self, target: Callable[[], None]) -> None:
        """Start a thread in the process of the running one."""
        group = self.group
        thread = self._create(group, target)
        self._schedule(group, thread, 0.0)

    def sleep(self, seconds: float) -> None:
        """Let the running thread wait."""
        self.wait(WaitQueue(self), seconds)

    def wait(self, queue: WaitQueue, timeout_s: float | None) -> bool:
        """Let the running thread wait; return whether it was resumed before the timeout."""
        group, thread = self._running_thread()
        queue.waiting.append((group, thread))
        if timeout_s is not None:
            self._schedule(group, thread, max(timeout_s, 0.0))
        thread.suspend()
        self._running_thread()
        is_timeout = (group, thread) in queue.waiting
        if is_timeout:
            queue.waiting.remove((group, thread))
        return not is_timeout

    def resume(self, group: ThreadGroup, thread: SimThread) -> None:
        """Resume a thread that waits, after the current event."""
        thread.cancel()
        self._schedule(group, thread, 0.0)

    def as_module(self) -> SimpleNamespace:
        """Return what replaces the module `threading`."""
        return SimpleNamespace(
            Condition=lambda: SimCondition(self),
            Event=lambda: SimEvent(self),
            Lock=nullcontext,
            Thread=lambda **arguments: _Thread(self, **arguments),
        )

    def _running_thread(self) -> tuple[ThreadGroup, SimThread]:
        assert self._running is not None, "only a simulated thread can wait"
        if not self._running[0].is_alive:
            # Code that unwinds must not wait.
            raise greenlet.GreenletExit
        return self._running

    def _create(self, group: ThreadGroup, target: Callable[[], None]) -> SimThread:
        def run() -> None:
            target()
            group.threads.pop(thread, None)

        thread = SimThread(run)
        group.threads[thread] = None
        return thread

    def _schedule(self, group: ThreadGroup, thread: SimThread, wait_s: float) -> None:
        thread.timer = self._engine.schedule_after(wait_s, lambda: self._resume(group, thread))

    def _resume(self, group: ThreadGroup, thread: SimThread) -> None:
        if not group.is_alive:
            return
        before, self._running = self._running, (group, thread)
        try:
            thread.resume()
        finally:
            self._running = before


class WaitQueue:
    """Threads that wait for the same event."""

    def __init__(self, threads: SimThreading) -> None:
        self._threads = threads
        self.waiting: list[tuple[ThreadGroup, SimThread]] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `notify_all`; return whether it was called before the timeout."""
        return self._threads.wait(self, timeout)

    def notify_all(self) -> None:
        """Resume all threads that wait."""
        waiting, self.waiting = self.waiting, []
        for group, thread in waiting:
            self._threads.resume(group, thread)


class SimCondition(WaitQueue):
    """A `threading.Condition`."""

    def __enter__(self) -> SimCondition:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SimEvent:
    """A `threading.Event`."""

    def __init__(self, threads: SimThreading) -> None:
        self._queue = WaitQueue(threads)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._queue.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        return self._is_set or self._queue.wait(timeout) or self._is_set


class _Thread:
    """A `threading.Thread`."""

    def __init__(
        self,
        threads: SimThreading,
        *,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._threads = threads
        self._target = lambda: target(*args)

    def start(self) -> None:
        self._threads.start(self._target)
