"""A single-threaded event loop for file descriptors, timers and calls from other threads.

Agents and fork servers use it instead of asyncio, because it runs on an injected `Clock` and its
`run_once` lets the caller decide between events when to wake up next (decision 0004).
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import selectors
import socket
from collections.abc import Callable
from typing import Protocol

from spotfit.core.clock import Clock

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class HasFileno(Protocol):
    def fileno(self) -> int: ...


FileDescriptorLike = int | HasFileno


class TimerHandle:
    """A callback scheduled with `EventLoop.call_later`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Cancel the timer, so that its callback is not called.

        Idempotent, also after the callback has run. Call it in the loop's thread only.
        """
        # The entry stays in the heap until it is due: removing it from the middle is O(n).
        self.callback = None


class EventLoop:
    """Waits for events and runs callbacks in the thread that calls `run_once`.

    Timers use the injected `clock`. Only `call_soon_threadsafe` and `wake` may be called from other
    threads.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._sequence = itertools.count()  # orders timers that are due at the same time
        self._posted_callbacks: collections.deque[Callable[[], None]] = collections.deque()
        # Self-pipe trick: a byte in the socket ends select().
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.settimeout(0)
        self._wake_sender.settimeout(0)
        self.register(self._wake_receiver, READ, self._drain_wakeups)

    def register(
        self, fileobj: FileDescriptorLike, events: int, callback: Callable[[int], None]
    ) -> None:
        """Call `callback(ready_events)` in `run_once` whenever `fileobj` is ready.

        `events` and `ready_events` are bit masks of READ and WRITE. Replaces the events and the
        callback of an earlier registration of `fileobj`.
        """
        try:
            self._selector.modify(fileobj, events, callback)
        except KeyError:  # not registered yet
            self._selector.register(fileobj, events, callback)

    def unregister(self, fileobj: FileDescriptorLike) -> None:
        """Stop watching `fileobj`. Must be called before it is closed. Idempotent."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fileobj)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call `callback` once, `delay_s` seconds of the loop's clock from now, in `run_once`.

        It is never called directly, also with a delay of 0. `TimerHandle.cancel` of the result
        prevents the call.
        """
        timer = TimerHandle(callback)
        heapq.heappush(self._timers, (self.clock.now() + delay_s, next(self._sequence), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Let `run_once` call `callback` once, in the loop's thread.

        Returns at once; may be called from any thread. Callbacks run in the order of these calls. A
        wait in progress is ended.
        """
        self._posted_callbacks.append(callback)
        self.wake()

    def wake(self) -> None:
        """End the current wait of `run_once`, or the next one if there is none.

        May be called from any thread and from signal handlers, also after `close`.
        """
        # A full buffer already wakes the loop; after close() there is no wait to end.
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"w")

    def run_once(self, timeout_s: float | None) -> None:
        """Wait once for an event, at most `timeout_s` seconds, then run all callbacks that are due.

        None waits without a limit, 0 does not wait. The wait also ends when the next timer is due,
        and after `wake`. An exception of a callback is raised here; those that remain are run by
        the next call.
        """
        if self._timers:
            until_timer_s = max(0.0, self._timers[0][0] - self.clock.now())
            timeout_s = until_timer_s if timeout_s is None else min(until_timer_s, timeout_s)
        for key, mask in self._selector.select(timeout_s):
            # An earlier callback of this iteration may have unregistered the descriptor.
            if self._selector.get_map().get(key.fd) == key:
                key.data(mask)
        # deque.append and popleft are atomic, so that no lock is needed.
        while self._posted_callbacks:
            self._posted_callbacks.popleft()()
        # Read once, so that a callback that schedules itself again cannot occupy the loop.
        now = self.clock.now()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()

    def close(self) -> None:
        """Release the loop's own descriptors. Registered descriptors are not closed."""
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _drain_wakeups(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                continue
