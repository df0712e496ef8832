"""One selector for everything this process waits for: sockets, pipes, moments, other threads."""

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


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Watched = int | HasDescriptor


class Moment:
    """Something to be done later; may be called off."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def call_off(self) -> None:
        self.call = None


class Loop:
    """Waits, and calls back. All in one thread but `post` and `wake`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._selector = selectors.DefaultSelector()
        self._moments: list[tuple[float, int, Moment]] = []
        self._count = itertools.count()
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._inner, self._outer = socket.socketpair()
        self._inner.settimeout(0)
        self._outer.settimeout(0)
        self.watch(self._inner, READ, self._woken)

    # --- what to wait for ----------------------------------------------------------------------

    def watch(self, what: Watched, events: int, call: Callable[[int], None]) -> None:
        """Call when it is ready, with how; again if it is watched already."""
        try:
            self._selector.modify(what, events, call)
        except KeyError:
            self._selector.register(what, events, call)

    def forget(self, what: Watched) -> None:
        """Watch it no more; must come before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what)

    def after(self, seconds: float, call: Callable[[], None]) -> Moment:
        """Call once, that much later."""
        moment = Moment(call)
        heapq.heappush(self._moments, (self.clock.now() + seconds, next(self._count), moment))
        return moment

    def post(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread, soon; from any thread."""
        self._posted.append(call)
        self.wake()

    def wake(self) -> None:
        """End the wait; from any thread, and from signal handlers."""
        with contextlib.suppress(OSError):  # full: it will wake as it is; closed: nobody waits
            self._outer.send(b"w")

    # --- waiting -------------------------------------------------------------------------------

    def turn(self, timeout_s: float | None) -> None:
        """Wait until something is ready, but not longer than that; call all that is due."""
        for key, mask in self._selector.select(self._patience(timeout_s)):
            # An earlier call of this turn may have closed what was ready.
            if self._selector.get_map().get(key.fd) == key:
                key.data(mask)
        while self._posted:
            self._posted.popleft()()
        self._call_due()

    def close(self) -> None:
        """Let go of everything; nothing watched is closed."""
        self._selector.close()
        self._inner.close()
        self._outer.close()

    def _patience(self, timeout_s: float | None) -> float | None:
        if not self._moments:
            return timeout_s
        first = max(0.0, self._moments[0][0] - self.clock.now())
        return first if timeout_s is None else min(first, timeout_s)

    def _call_due(self) -> None:
        now = self.clock.now()
        while self._moments and self._moments[0][0] <= now:
            moment = heapq.heappop(self._moments)[2]
            if moment.call is not None:
                moment.call()

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._inner.recv(4096):
                continue
