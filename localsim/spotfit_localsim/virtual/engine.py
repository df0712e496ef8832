"""Virtual time: an event queue, and processes that can be delayed, frozen or killed at any call.

A simulated process runs its ticks in a greenlet. Every simulated port (store, cloud, network) calls
`SimProcess.simulate_call`, and there the engine may advance time, freeze the process or kill it
while other processes run.

States of a process:

    state    | event                       | next
    running  | tick returns a time          | idle
    running  | simulate_call with a latency | suspended
    idle     | wake(), or the time          | running
    suspended| the latency is over          | running
    any      | freeze(s)                    | the same, resumed s later
    any      | kill(), error, tick -> None  | exited
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import greenlet

from spotfit.checkpoint import reader, writer
from spotfit.control.background_calls import BackgroundResult, SynchronousCalls
from spotfit.host import log
from spotfit.ledger import journal
from spotfit.store import transfer
from spotfit_localsim.virtual.faults import ProcessFaultInjector

TICK_S = 0.0002
"""The least duration of a step, so that a process that polls in a loop cannot stop virtual time."""
VIEW_CACHE_INTERVAL = 24
"""Entries between two cached views; small, so that short runs have some."""


class LivelockError(AssertionError):
    """The simulation executed too many events; the run probably makes no progress."""


class Timer:
    """A scheduled callback that can be cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object] | None) -> None:
        self.callback = callback

    def cancel(self) -> None:
        self.callback = None


class Engine:
    """The virtual clock and the event queue."""

    # A usual simulation has some 10,000 events: the limit is reached only by a livelock.
    def __init__(self, max_events: int = 5_000_000) -> None:
        self.now = 0.0
        self.event_count = 0
        self._max_events = max_events
        self._queue: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._is_stopped = False

    def schedule_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` at time `when`, or now if that has passed."""
        timer = Timer(callback)
        # The sequence number orders events at equal times: a heap is not stable.
        heapq.heappush(self._queue, (max(when, self.now), next(self._sequence), timer))
        return timer

    def schedule_after(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` after `seconds`."""
        return self.schedule_at(self.now + seconds, callback)

    def stop(self) -> None:
        """Make `run` return after the current event."""
        self._is_stopped = True

    def run(self, until: float) -> None:
        """Run events until time `until`, `stop`, or an empty queue. Raises `LivelockError`."""
        while self._queue and not self._is_stopped and self._queue[0][0] <= until:
            when, _, timer = heapq.heappop(self._queue)
            # Cancelled timers stay in the heap: removing one would take linear time.
            if timer.callback is None:
                continue
            self.now = when
            self.event_count += 1
            if self.event_count > self._max_events:
                raise LivelockError(
                    f"{self.event_count} events after {self.now:.1f} s of virtual time"
                )
            timer.callback()


@dataclass(frozen=True, slots=True)
class SimClock:
    """The monotonic clock of one machine, with an offset and a rate error."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local_time(self, world_s: float) -> float:
        """Return the clock's value at a virtual time."""
        return self.offset_s + world_s * self.rate

    def world_duration_s(self, local_s: float) -> float:
        """Return the virtual duration of `local_s` seconds of this clock."""
        # A fast clock reaches a local deadline early.
        return local_s / self.rate


class SimThread:
    """One thread of a process: its ticks, or a background call."""

    __slots__ = ("_greenlet", "_scheduler", "_target", "timer")

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._greenlet: greenlet.greenlet | None = None
        self._scheduler: greenlet.greenlet | None = None
        self.timer: Timer | None = None

    def resume(self) -> None:
        """Run until the next `suspend`. Called by the engine only."""
        self._scheduler = greenlet.getcurrent()
        if self._greenlet is None:
            self._greenlet = greenlet.greenlet(self._target)
        self._greenlet.switch()

    def suspend(self) -> None:
        """Return to the engine; continues at the next `resume`."""
        assert self._scheduler is not None
        self._scheduler.switch()

    def cancel(self) -> None:
        """Cancel the pending resume."""
        if self.timer is not None:
            self.timer.cancel()

    def terminate(self) -> None:
        """Unwind the stack with GreenletExit. Called by the engine only."""
        if self._greenlet:
            self._scheduler = greenlet.getcurrent()
            # GreenletExit is no Exception: handlers of the code under test do not catch it.
            self._greenlet.throw(greenlet.GreenletExit)


WALL_EPOCH_MS = 1_767_225_600_000
"""The wall-clock time at which simulations start: 2026-01-01, in milliseconds since 1970."""


def wall_ms(at_s: float) -> int:
    """Return a virtual time as the wall-clock time of a right clock."""
    return WALL_EPOCH_MS + round(at_s * 1000)


Tick = Callable[[float], float | None]
"""tick(now) returns the local time of the next tick, or None at the end of the process."""


class SimProcess:
    """A process in the simulation."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        clock: SimClock,
        fault_injector: ProcessFaultInjector,
        on_exit: Callable[[BaseException | None], None],
        wall_skew_s: float = 0.0,
    ) -> None:
        """`on_exit` is called once, with the error that ended the process or None.

        `wall_skew_s` is the constant error of its wall clock.
        """
        self.name = name
        self.engine = engine
        self.is_alive = False
        self._clock = clock
        self._wall_skew_s = wall_skew_s
        self._fault_injector = fault_injector
        self._on_exit = on_exit
        self._frozen_until = 0.0
        self._is_idle = False
        self._is_wake_pending = False
        self._main_thread: SimThread | None = None
        self._threads: dict[SimThread, None] = {}
        self._running_thread: SimThread | None = None

    @property
    def now(self) -> float:
        """The value of this machine's clock."""
        return self._clock.local_time(self.engine.now)

    def wall_ms(self) -> int:
        """Return its wall clock in milliseconds since 1970."""
        return wall_ms(self.engine.now + self._wall_skew_s)

    def start(self, tick: Tick) -> None:
        """Start the process; the first tick runs at once."""

        def run_ticks() -> None:
            try:
                while True:
                    self._is_wake_pending = False
                    wake_at = tick(self.now)
                    # The agent has finished: its process ends with exit code 0.
                    if wake_at is None:
                        self._exit(None)
                        return
                    woken = self._is_wake_pending
                    wait_s = 0.0 if woken else self._clock.world_duration_s(wake_at - self.now)
                    self._is_idle = not woken
                    self._schedule_resume(thread, max(TICK_S, wait_s))
                    thread.suspend()
            except Exception as error:  # noqa: BLE001  # reported through on_exit
                self._exit(error)

        self.is_alive = True
        thread = self._main_thread = SimThread(run_ticks)
        self._start_thread(thread)

    def run_in_background(self, call: Callable[[], None]) -> None:
        """Run `call` concurrently with the ticks, as a thread would."""

        def run() -> None:
            call()
            del self._threads[thread]

        thread = SimThread(run)
        self._start_thread(thread)

    def wake(self) -> None:
        """Tick again: at once if idle, else directly after the current tick."""
        self._is_wake_pending = True
        if self._is_idle and self._main_thread is not None and self._main_thread.timer is not None:
            self._is_idle = False
            self._main_thread.timer.cancel()
            # Not at once: events of the same time are handled by one tick, as by one poll.
            self._schedule_resume(self._main_thread, TICK_S)

    @property
    def is_frozen(self) -> bool:
        return self.engine.now < self._frozen_until

    def freeze(self, seconds: float = math.inf) -> None:
        """Suspend the process for `seconds`, or until `thaw`; messages to it are queued."""
        # Overlapping freezes end with the last one.
        self._frozen_until = max(self._frozen_until, self.engine.now + seconds)

    def thaw(self) -> None:
        """Continue a frozen process now."""
        self._frozen_until = self.engine.now
        for thread in self._threads:
            thread.cancel()
            self._schedule_resume(thread, 0.0)

    def kill(self) -> None:
        """Terminate the process; its memory is lost."""
        if self.is_alive:
            self._exit(None)

    def discard(self) -> None:
        """Release the greenlets at the end of the simulation, without calling `on_exit`."""
        self.is_alive = False
        for thread in self._threads:
            thread.terminate()
        self._threads = {}

    def simulate_call(self, latency_s: float = 0.0) -> None:
        """A call to the outside: time passes, or the process is frozen or killed."""
        if not self.is_alive:
            # A killed process that is still on the stack must have no further effects.
            raise greenlet.GreenletExit
        fault = self._fault_injector.next_fault()
        if fault is not None:
            if fault.is_fatal:
                # Not killed inside the call: a process cannot unwind its own greenlet.
                self.engine.schedule_after(0.0, self.kill)
                latency_s = max(latency_s, TICK_S)
            self.freeze(fault.freeze_s)
            latency_s = max(latency_s, fault.freeze_s)
        if latency_s > 0:
            thread = self._running_thread
            assert thread is not None
            self._schedule_resume(thread, latency_s)
            thread.suspend()

    def _start_thread(self, thread: SimThread) -> None:
        self._threads[thread] = None
        self._schedule_resume(thread, 0.0)

    def _schedule_resume(self, thread: SimThread, wait_s: float) -> None:
        def resume() -> None:
            if self.is_frozen:
                # A frozen process loses no wake-up; it is only late, as after SIGSTOP.
                self._schedule_resume(thread, self._frozen_until - self.engine.now)
                return
            if thread is self._main_thread:
                self._is_idle = False
            self._running_thread = thread
            thread.resume()

        thread.timer = self.engine.schedule_after(wait_s, resume)

    def _exit(self, error: BaseException | None) -> None:
        self.is_alive = False
        for thread in self._threads:
            thread.cancel()

        def finalize() -> None:
            for thread in self._threads:
                thread.terminate()
            self._threads = {}
            self._on_exit(error)

        # In an event of its own: a greenlet cannot unwind itself.
        self.engine.schedule_after(0.0, finalize)


class SequentialExecutor:
    """Replaces ThreadPoolExecutor: real threads would make a simulation irreproducible."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> SequentialExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Apply the function to the items in order."""
        return [function(item) for item in items]

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Call the function now."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - raised by result(), as in production
            future.set_exception(error)
        return future

    def shutdown(self, **_: bool) -> None:
        """Do nothing: no call is pending."""


@contextmanager
def patched_attribute(module: ModuleType, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute of a module inside the context."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def simulation_patches() -> Iterator[None]:
    """Patch production code inside the context: no threads, frequent cached views, no logs.

    The timeline of the simulation records what happens, in virtual time.
    """
    with (
        patched_attribute(transfer, "ThreadPoolExecutor", SequentialExecutor),
        patched_attribute(reader, "ThreadPoolExecutor", SequentialExecutor),
        patched_attribute(writer, "ThreadPoolExecutor", SequentialExecutor),
        # In production 256 or more entries lie between two cached views.
        patched_attribute(journal, "VIEW_CACHE_INTERVAL", VIEW_CACHE_INTERVAL),
        patched_attribute(log, "_log", lambda _level, _event, _fields: None),
    ):
        yield


class SimBackgroundCalls:
    """Background calls that run concurrently with the ticks, as they do on threads."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._pending: dict[str, list[BackgroundResult]] = {}

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        results = self._pending.get(name)
        if results is None:
            self._pending[name] = []
            self._process.run_in_background(lambda: self._execute(name, job))
            return None
        if not results:
            return None
        # A result is returned once; the next call of that name runs again.
        return self._pending.pop(name)[0]

    def send(self, name: str, job: Callable[[], Any]) -> None:
        results = self._pending.get(name)
        if results is None or results:
            self._pending[name] = []
            self._process.run_in_background(lambda: self._execute(name, job))

    def _execute(self, name: str, job: Callable[[], Any]) -> None:
        result = SynchronousCalls().run(name, job)
        assert result is not None, "SynchronousCalls always returns a result"
        self._pending[name].append(result)
        self._process.wake()
