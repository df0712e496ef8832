"""When to save next, the same on every rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

import msgspec
from msgspec.structs import replace

from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.host import log
from spotfit.model.cadence import Cadence, Costs, Odds
from spotfit.policy.cadence import (
    LOOK_S,
    Hold,
    Moment,
    Save,
    judge,
    look_every_s,
    outlook,
    steps_to_look,
    told_steps,
)
from spotfit.policy.drain import LastChance, SaveLast, TrainOn, save_at_notice
from spotfit.worker.measured import Measured

_LAST_LOOKS = 9
"""What a look costs is what the last few did."""


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
        cadence: Cadence,
        *,
        agreed: Callable[[str, bytes], bytes],
        leads: bool,
        clock: Clock,
        odds: Odds,
        notice: Callable[[], float | None] = lambda: None,
        advice: Callable[[], tuple[float, str] | None] = lambda: None,
        replaced: Callable[[], bool] = lambda: False,
        peer_bytes_per_s: Callable[[], float] = lambda: 0.0,
        slots: int = 2,
    ) -> None:
        """`notice` tells in how many seconds the group's first machine goes, if that is known;
        `advice` when and how one was last said to be in danger; `replaced` whether it could be
        done without at once, and `peer_bytes_per_s` how fast a rank's part reaches a peer that
        stays, 0 where there is none. All are asked on the rank that `leads` only."""
        self._cadence = cadence
        self._by_time = replace(cadence, epochs=False, every_steps=None)
        self._agreed = agreed
        self._leads = leads
        self._clock = clock
        self._odds = odds
        self._began_at = clock.now()
        self._notice = notice
        self._advice = advice
        self._replaced = replaced
        self._peer_bytes_per_s = peer_bytes_per_s
        self._slots = slots
        self._look_at = 1
        self._looked_at = self._began_at
        self._looked_step = 0
        self._looks_s: deque[float] = deque(maxlen=_LAST_LOOKS)
        self._saved_step = 0
        self._timed = False
        """Whether a save is due because its time has come."""
        self._told_of: int | None = None
        """The save after which it was told when the next one comes."""
        self.measured = Measured(clock)

    def begin(self, step: int) -> None:
        """The training goes on from that step."""
        self._saved_step, self._look_at = step, step + 1
        self._looked_step, self._looked_at = step, self._clock.now()
        self.measured.begin()

    def saved(self, step: int) -> None:
        """A snapshot of that step is taken."""
        self._saved_step = step

    def given(self, report: int, stall_s: float, size_bytes: int) -> None:
        """It was handed over; no rank has more than `size_bytes` of it to bring."""
        if self._leads:
            self.measured.saved(report, stall_s, size_bytes, timed=self._timed)
        self._timed = False

    def due(self, step: int, *, ends_epoch: bool) -> str | None:
        """Why to save after this step; None where not to. Every rank asks after every step."""
        self._timed = False
        if self._leads:
            self.measured.step()
        if self._cadence.epochs and ends_epoch:
            return "an epoch has ended"
        done = step - self._saved_step
        if self._cadence.every_steps is not None and done >= self._cadence.every_steps:
            return told_steps(done)
        if step < self._look_at:
            return None
        mine = encode(self._look(step))
        began = self._clock.now()
        told = _told.decode(self._agreed("checkpoint", mine))
        self._looks_s.append(self._clock.now() - began)
        self._look_at, self._timed = told.look_at, told.why is not None
        return told.why

    def _look(self, step: int) -> _Told:
        if not self._leads:
            return _Told(None, 0)
        why, next_s = self._verdict(step)
        now = self._clock.now()
        done, passed_s = step - self._looked_step, now - self._looked_at
        self._looked_step, self._looked_at = step, now
        every_s = look_every_s(median(self._looks_s)) if self._looks_s else LOOK_S
        return _Told(why, step + steps_to_look(done, passed_s, within_s=min(every_s, next_s)))

    def _verdict(self, step: int) -> tuple[str | None, float]:
        """Why to save, and how soon to look again."""
        left_s, next_s = self._notice(), LOOK_S
        if left_s is not None:
            last = save_at_notice(self._chance(left_s, step))
            if isinstance(last, SaveLast):
                why = f"a machine is going: {last.why}"
                return (why if step > self._saved_step else None), LOOK_S
            if not isinstance(last, TrainOn):
                return None, LOOK_S
            next_s = last.for_s / 2  # the rest is for steps that take longer than those before
        now, measured = self._clock.now(), self.measured
        moment = Moment(
            now,
            step,
            measured.done_at,
            self._saved_step,
            measured.in_flight,
            room=measured.in_flight < self._slots,
            advised=self._advised(),
        )
        ahead = outlook(
            self._odds,
            lived_s=now - self._began_at,
            last_save_s=measured.size_bytes / measured.bytes_per_s,
        )
        verdict = judge(self._by_time, moment, costs=measured.costs, ahead=ahead)
        if isinstance(verdict, Save):
            return verdict.why, LOOK_S
        self._tell_next(verdict, now)
        return None, min(next_s, verdict.until - now if verdict.until > now else LOOK_S)

    def _advised(self) -> str:
        """What was said of a danger since the state was last taken; '' for nothing."""
        told_at, why = self._advice() or (-math.inf, "")
        return why if told_at > self.measured.done_at else ""

    def _tell_next(self, verdict: Hold, now: float) -> None:
        """Once after each commit: when the next save comes by itself, and why not sooner."""
        measured = self.measured
        undecided = not self._cadence.auto or measured.costs is None or measured.in_flight
        if undecided or self._told_of == self._saved_step or verdict.until <= now:
            return
        self._told_of = self._saved_step
        log.info("checkpoint.next", in_s=round(verdict.until - now, 1), why=verdict.why)

    def _chance(self, left_s: float, step: int) -> LastChance:
        measured = self.measured
        costs = measured.costs or Costs(0.0, 0.0, 0.0)
        in_flight_s = max(0.0, costs.commit_s - measured.oldest_s) if measured.in_flight else None
        unsaved_s = self._clock.now() - measured.done_at if step > self._saved_step else 0.0
        return LastChance(
            left_s=left_s,
            unsaved_s=unsaved_s,
            step_s=measured.step_s,
            slow_step_s=measured.slow_step_s,
            costs=costs,
            size_bytes=measured.size_bytes,
            bucket_bytes_per_s=measured.bytes_per_s,
            peer_bytes_per_s=self._peer_bytes_per_s(),
            in_flight_s=in_flight_s,
            room=measured.in_flight < self._slots,
            replaced=self._replaced(),
        )
