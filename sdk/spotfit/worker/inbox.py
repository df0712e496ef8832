"""What the agent says to this worker, for whichever of its threads waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from spotfit.core.clock import Clock
from spotfit.model.wire import ToWorker
from spotfit.worker.talk import Talk

Found = TypeVar("Found")


class Inbox:
    """Gives every frame to `take`, one at a time. Nobody reads while nobody waits."""

    def __init__(self, talk: Talk, take: Callable[[ToWorker], None], clock: Clock) -> None:
        self._talk = talk
        self._take = take
        self._clock = clock
        self._news = threading.Condition()
        self._listening = False
        """Whether a thread is at the socket; the others wait for what it hears."""

    def drain(self) -> None:
        """Take what has come, without waiting."""
        with self._news:
            for frame in self._talk.pending():
                self._take(frame)
            self._news.notify_all()

    def wait(self, ready: Callable[[], Found | None], timeout_s: float) -> Found | None:
        """What `ready` gives once it gives something; None when the time is over before.

        `ready` is asked again after every frame, and never while another is taken.
        """
        deadline = self._clock.now() + timeout_s
        with self._news:
            while (found := ready()) is None:
                left_s = deadline - self._clock.now()
                if left_s <= 0:
                    return None
                self._hear(left_s)
        return found

    def _hear(self, within_s: float) -> None:
        """One frame, by this thread or by the one that listens already."""
        if self._listening:
            self._news.wait(within_s)
            return
        self._listening = True
        self._news.release()
        try:
            frame = self._talk.next(within_s)
        finally:
            self._news.acquire()
            self._listening = False
        if frame is not None:
            self._take(frame)
        self._news.notify_all()
