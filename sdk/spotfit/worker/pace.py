"""When to save next, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.core.units import seconds
from spotfit.worker.handover import Fate

LOOK_S = 2.0
"""Ranks agree on whether it is time about this often; between, nobody asks anybody."""
_AUTO_S = 600.0


class _Told(msgspec.Struct, frozen=True):
    """What rank 0 says at a look."""

    why: str | None
    """Why to save now; None where not to."""
    look_at: int
    """The step after which all look again."""


_told = decoder(_Told)


class Pace:
    """Steps and ends of epochs every rank counts for itself; of time only rank 0 knows.

    So the ranks look together, after steps that rank 0 has named at the look before.
    """

    def __init__(
        self,
        every: Any,
        max_overhead: float | None,
        *,
        agreed: Callable[[str, bytes], bytes],
        leads: bool,
        clock: Clock,
    ) -> None:
        self._every_steps = every if isinstance(every, int) else None
        self._every_s = _AUTO_S if every == "auto" else None
        if isinstance(every, str) and every not in ("auto", "epoch", "at_notice"):
            self._every_s = seconds(every)
        self._epochs = every == "epoch"
        self._agreed = agreed
        self._leads = leads
        self._clock = clock
        self._look_at = 1
        self._saved_step = 0
        self._saved_at = clock.now()
        self._looked: tuple[int, float] | None = None

    def begin(self, step: int) -> None:
        """The training goes on from that step."""
        self._saved_step, self._look_at = step, step + 1
        self._saved_at = self._clock.now()

    def saved(self, step: int, stall_s: float) -> None:
        """A snapshot was taken."""
        self._saved_step, self._saved_at = step, self._clock.now()

    def note(self, report: int, fate: Fate) -> None:
        """How far one has come."""

    def due(self, step: int, *, ends_epoch: bool) -> str | None:
        """Why to save after this step; None where not to. Every rank asks after every step."""
        if self._epochs and ends_epoch:
            return "an epoch has ended"
        if self._every_steps is not None:
            done = step - self._saved_step
            return f"{done} steps since the last" if done >= self._every_steps else None
        if self._every_s is None or step < self._look_at:
            return None
        mine = encode(self._look(step)) if self._leads else b""
        told = _told.decode(self._agreed("checkpoint", mine))
        self._look_at = told.look_at
        return told.why

    def _look(self, step: int) -> _Told:
        assert self._every_s is not None
        now = self._clock.now()
        left_s = self._saved_at + self._every_s - now
        next_s = min(LOOK_S, left_s) if left_s > 0 else LOOK_S
        look_at = step + max(1, int(next_s / self._step_s(step, now)))
        why = f"one every {self._every_s:g} s" if left_s <= 0 else None
        return _Told(why, look_at)

    def _step_s(self, step: int, now: float) -> float:
        """How long a step takes of late."""
        before, self._looked = self._looked, (step, now)
        if before is None or step <= before[0]:
            return LOOK_S
        return max(1e-6, (now - before[1]) / (step - before[0]))
