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
from spotfit.policy.cadence import Hold, Moment, Save, judge, outlook, told_steps
from spotfit.policy.drain import LastChance, SaveLast, TrainOn, save_at_notice
from spotfit.worker.handover import Fate

LOOK_S = 2.0
"""Ranks agree on whether it is time about this often; between, nobody asks anybody."""
_LAST = 5
"""Costs are those of the last few saves."""
_GUESSED_BYTES_PER_S = 50e6
"""How fast an upload is taken to be before one was seen."""


class _Told(msgspec.Struct, frozen=True):
    """What rank 0 says at a look."""

    why: str | None
    """Why to save now; None where not to."""
    look_at: int
    """The step after which all look again."""


_told = decoder(_Told)


class Measured:
    """What saves cost rank 0, and how fast it steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._given: dict[int, float] = {}
        self.size_bytes = 0
        """Of the last snapshot of this rank."""
        self._stalls: deque[float] = deque(maxlen=_LAST)
        self._commits: deque[float] = deque(maxlen=_LAST)
        self._speeds: deque[float] = deque(maxlen=_LAST)
        self._carried: set[int] = set()
        self._steps: dict[bool, deque[float]] = {busy: deque(maxlen=100) for busy in (True, False)}
        self._stepped_at: float | None = None
        self.done_at = clock.now()
        """When the state was taken that is saved, or on its way."""

    @property
    def in_flight(self) -> int:
        """Snapshots that are not committed."""
        return len(self._given)

    @property
    def step_s(self) -> float:
        """How long a step takes of late."""
        known = self._steps[False] or self._steps[True]
        return median(known) if known else 0.0

    @property
    def costs(self) -> Costs | None:
        """None while no save is committed."""
        if not self._commits:
            return None
        idle, busy = self.step_s, self._steps[True]
        slowdown = max(0.0, 1 - idle / median(busy)) if busy and idle else 0.0
        return Costs(median(self._stalls), slowdown, median(self._commits))

    @property
    def bytes_per_s(self) -> float:
        """How fast snapshots are brought to the bucket."""
        return median(self._speeds) if self._speeds else _GUESSED_BYTES_PER_S

    @property
    def oldest_s(self) -> float:
        """How long the first of those in flight has been on its way."""
        return self._clock.now() - min(self._given.values())

    def step(self) -> None:
        """One more step was done."""
        now = self._clock.now()
        if self._stepped_at is not None:
            self._steps[bool(self._given)].append(now - self._stepped_at)
        self._stepped_at = now

    def saved(self, report: int, stall_s: float, size_bytes: int) -> None:
        """A snapshot was handed over."""
        self.done_at = self._given[report] = self._clock.now()
        self._stepped_at = self.done_at
        self.size_bytes = size_bytes
        self._stalls.append(stall_s)

    def note(self, report: int, fate: Fate) -> None:
        """How far one has come."""
        if report not in self._given or fate == "given":
            return
        took_s = self._clock.now() - self._given[report]
        if fate != "lost" and report not in self._carried:
            self._carried.add(report)
            self._speeds.append(self.size_bytes / max(took_s, 1e-3))
        if fate == "committed":
            self._commits.append(took_s)
        if fate != "carried":
            del self._given[report]


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
        peer_bytes_per_s: float = 0.0,
        slots: int = 2,
    ) -> None:
        """`notice` tells in how many seconds the group's first machine goes, if that is known;
        `advice` when and how one was last said to be in danger; `replaced` whether it could be
        done without at once. All are asked on the rank that `leads` only."""
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
        self._saved_step = 0
        self._told_of: int | None = None
        """The save after which it was told when the next one comes."""
        self.measured = Measured(clock)

    def begin(self, step: int) -> None:
        """The training goes on from that step."""
        self._saved_step, self._look_at = step, step + 1
        self.measured.done_at = self._clock.now()

    def saved(self, step: int) -> None:
        """A snapshot of that step was taken."""
        self._saved_step = step

    def due(self, step: int, *, ends_epoch: bool) -> str | None:
        """Why to save after this step; None where not to. Every rank asks after every step."""
        if self._leads:
            self.measured.step()
        if self._cadence.epochs and ends_epoch:
            return "an epoch has ended"
        done = step - self._saved_step
        if self._cadence.every_steps is not None and done >= self._cadence.every_steps:
            return told_steps(done)
        if step < self._look_at:
            return None
        told = _told.decode(self._agreed("checkpoint", encode(self._look(step))))
        self._look_at = told.look_at
        return told.why

    def _look(self, step: int) -> _Told:
        if not self._leads:
            return _Told(None, 0)
        why, next_s = self._verdict(step)
        pause_s = max(0.0, min(LOOK_S, next_s))
        step_s = self.measured.step_s
        steps = int(pause_s / step_s) if step_s else 1
        return _Told(why, step + max(1, steps))

    def _verdict(self, step: int) -> tuple[str | None, float]:
        """Why to save, and how soon to look again."""
        left_s = self._notice()
        if left_s is not None:
            last = save_at_notice(self._chance(left_s, step))
            if isinstance(last, SaveLast):
                why = f"a machine is going: {last.why}"
                return (why if step > self._saved_step else None), LOOK_S
            if not isinstance(last, TrainOn):
                return None, LOOK_S
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
        return None, verdict.until - now if verdict.until > now else LOOK_S

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
            costs=costs,
            size_bytes=measured.size_bytes,
            bucket_bytes_per_s=measured.bytes_per_s,
            peer_bytes_per_s=self._peer_bytes_per_s,
            in_flight_s=in_flight_s,
            replaced=self._replaced(),
        )
