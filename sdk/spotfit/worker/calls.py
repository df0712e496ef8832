"""Calls that a backend's hooks make in this worker, and the stages between which it waits."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from spotfit.core.errors import ShippingError
from spotfit.core.units import told_bytes
from spotfit.host import log
from spotfit.model.wire import Call, Outcome, Present, Proceed, Stage
from spotfit.ship.function import pickled, unpickled
from spotfit.worker import crash
from spotfit.worker.inbox import Inbox
from spotfit.worker.talk import Talk

LARGEST_BYTES = 8 * 2**20
"""Of a call or its answer: they pass through the leader."""
WARN_S = 60.0


class Calls:
    """Before the training function they are made by the main thread, beside it by one of their own.

    Without `hooks` there are none, and nothing is ever waited for.
    """

    def __init__(self, talk: Talk, inbox: Inbox, *, hooks: bool) -> None:
        self._talk = talk
        self._inbox = inbox
        self._hooks = hooks
        self._asked: deque[Call] = deque()
        self._may: set[Stage] = set()
        self._thread: threading.Thread | None = None

    def take(self, frame: Call | Proceed) -> None:
        """A frame came; the inbox gives it."""
        if isinstance(frame, Call):
            self._asked.append(frame)
        else:
            self._may.add(frame.stage)

    def wait_to(self, stage: Stage) -> None:
        """Wait until the hooks before that stage are done, and make their calls meanwhile.

        Before the last stage `Returned` was sent: that says that this worker waits.
        """
        if not self._hooks:
            return
        if stage != "leave":
            self._talk.send(Present(stage))
        while isinstance(found := self._wait(stage), Call):
            self._make(found)

    def serve(self) -> None:
        """From now on make calls beside whatever this thread does."""
        if self._hooks:
            self._thread = threading.Thread(target=self._serve, name="spotfit-calls", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            call = self._inbox.wait(self._next_call, WARN_S)
            if call is not None:
                self._make(call)

    def _wait(self, stage: Stage) -> Call | Stage:
        found: Call | Stage | None = None
        while found is None:
            found = self._inbox.wait(partial(self._next, stage), WARN_S)
            if found is None:
                log.warning("worker.waits", what="the hooks of the backend", before=stage)
        return found

    def _next(self, stage: Stage) -> Call | Stage | None:
        if stage in self._may:
            return stage
        return None if self._thread else self._next_call()

    def _next_call(self) -> Call | None:
        return self._asked.popleft() if self._asked else None

    def _make(self, call: Call) -> None:
        self._talk.send(outcome_of(call))


def outcome_of(call: Call) -> Outcome:
    """Make the call. What it raises is its outcome, too."""
    try:
        fn, args, kwargs = unpickled(call.body, what="call of a backend's hook")
        return Outcome(call.call, packed(fn(*args, **kwargs), what="answer"))
    except BaseException as error:  # noqa: BLE001 - the border to the user's function, SystemExit included
        return Outcome(call.call, crash.pickled(error), crash.told(error))


def packed(thing: object, *, what: str) -> bytes:
    """The pickle of a call or an answer. Raises `ShippingError` for what cannot travel."""
    body = pickled(thing, told_as={what: thing}, by_value_modules=()).body
    if len(body) > LARGEST_BYTES:
        raise ShippingError(
            f"The {what} takes {told_bytes(len(body))}; {told_bytes(LARGEST_BYTES)} is the most.",
            do="Pass paths or names, and put what is big into the run's storage.",
        )
    return body
