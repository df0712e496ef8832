"""What saves cost the training, and how fast it steps, as rank 0 sees it."""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import fmean, median, median_low

from spotfit.core.clock import Clock
from spotfit.model.cadence import Costs
from spotfit.worker.handover import Fate

_LAST = 5
"""Costs are those of the last few saves."""
_OF_LATE = 100
"""So many steps say how long one usually takes."""
_REMEMBERED = 1000
"""Among so many the slowest is looked for."""
_SLOW = 3.0
"""A step that takes so many times as long as most do did something else, too: an evaluation."""
_ALIKE = 1.25
"""One that takes no more than that of the slowest that was seen without a save did the same."""
_GUESSED_BYTES_PER_S = 50e6
"""How fast an upload is taken to be before one was seen."""


class _Save:
    """One of which the commit is waited for, and the steps meanwhile."""

    def __init__(
        self, given_at: float, size_bytes: int, *, timed: bool, slow_from_s: float
    ) -> None:
        self.given_at = given_at
        self.size_bytes = size_bytes
        self.first_s: float | None = None
        """How long the first step took: in it this rank waits for those that save longer."""
        self._timed = timed
        self._slow_from_s = slow_from_s
        self._steps = 0
        self._steps_s = 0.0
        self._slow: list[float] = []

    def add(self, step_s: float) -> None:
        """Another step after the first."""
        self._steps += 1
        self._steps_s += step_s
        if step_s > self._slow_from_s:
            self._slow.append(step_s)

    def step_s(self, usual_s: float, slowest_s: float) -> float:
        """How long one took, but for those that are as slow without a save; `usual_s` for none."""
        like = [slow for slow in self._slow if slow <= _ALIKE * slowest_s]
        steps = self._steps - len(like)
        return (self._steps_s - sum(like)) / steps if steps else usual_s

    def wait_s(self, step_s: float) -> float | None:
        """By how much its first step was longer. None where that tells nothing: what is done once
        an epoch often follows right after the save at its end."""
        if self.first_s is None or not self._timed or not step_s:
            return None
        return max(0.0, self.first_s - step_s)


class Measured:
    """What saves cost, and how fast rank 0 steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._given: dict[int, _Save] = {}
        self._ending: list[_Save] = []
        """Those that were committed within the step that has just been done."""
        self._ended: deque[_Save] = deque(maxlen=_LAST)
        self.size_bytes = 0
        """Of the last snapshot, the part of the rank that has the most to bring."""
        self._stalls: deque[float] = deque(maxlen=_LAST)
        self._commits: deque[float] = deque(maxlen=_LAST)
        self._speeds: deque[float] = deque(maxlen=_LAST)
        self._idle: deque[float] = deque(maxlen=_REMEMBERED)
        """Steps while no save was on its way."""
        self._all: deque[float] = deque(maxlen=_REMEMBERED)
        """All steps but the first ones after a save."""
        self._stepped_at: float | None = None
        self.done_at = clock.now()
        """When the state was taken that is saved, or on its way."""

    @property
    def in_flight(self) -> int:
        """Snapshots that are not committed."""
        return len(self._given)

    @property
    def step_s(self) -> float:
        """How long a step takes of late, on average."""
        return fmean(self._all) if self._all else 0.0

    @property
    def slow_step_s(self) -> float:
        """How long the slowest took of late."""
        return max(self._all, default=0.0)

    @property
    def costs(self) -> Costs | None:
        """None while no save is committed.

        A rank that saves longer than this one holds it up in the step that follows, and so do
        uploads in all steps until the commit: all their time counts. But not that of slow steps
        that are as slow without a save; and one save that fell together with something else says
        nothing against the others.
        """
        if not self._commits:
            return None
        usual_s, slowest_s = self._usual_s(), max(self._idle, default=0.0)
        steps = [(save, save.step_s(usual_s, slowest_s)) for save in self._ended]
        slowdowns = [max(0.0, 1 - usual_s / step_s) for _, step_s in steps if usual_s and step_s]
        known = [save.wait_s(step_s) for save, step_s in steps]
        waits = [wait_s for wait_s in known if wait_s is not None]
        return Costs(
            median(self._stalls) + (median_low(waits) if waits else 0.0),
            median_low(slowdowns) if slowdowns else 0.0,
            median(self._commits),
        )

    @property
    def bytes_per_s(self) -> float:
        """How fast snapshots are brought to the bucket, by the slowest rank."""
        return median(self._speeds) if self._speeds else _GUESSED_BYTES_PER_S

    @property
    def oldest_s(self) -> float:
        """How long the first of those in flight has been on its way."""
        return self._clock.now() - min(save.given_at for save in self._given.values())

    def begin(self) -> None:
        """The training goes on from another state: what was between was no step."""
        self.done_at = self._clock.now()
        self._stepped_at = None
        self._ending = []

    def step(self) -> None:
        """One more step was done. To be told after `note`, which knows what ended within it."""
        now = self._clock.now()
        if self._stepped_at is not None:
            self._keep(now - self._stepped_at)
        self._stepped_at = now
        self._ended.extend(self._ending)
        self._ending = []

    def saved(self, report: int, stall_s: float, size_bytes: int, *, timed: bool = True) -> None:
        """A snapshot was handed over, of which no rank has more than `size_bytes` to bring.

        `timed`: for its time had come, not for a place in the training, such as an epoch's end,
        that has more to it than a save.
        """
        self.done_at = self._stepped_at = self._clock.now()
        slow_from_s = _SLOW * self._middle_s() or float("inf")
        self._given[report] = _Save(self.done_at, size_bytes, timed=timed, slow_from_s=slow_from_s)
        self.size_bytes = size_bytes
        self._stalls.append(stall_s)

    def note(self, report: int, fate: Fate) -> None:
        """How far one has come."""
        if report not in self._given or fate in ("given", "carried"):
            return
        save = self._given.pop(report)
        if fate == "committed":
            took_s = self._clock.now() - save.given_at
            self._commits.append(took_s)
            self._speeds.append(save.size_bytes / max(took_s, 1e-3))
            self._ending.append(save)

    def _keep(self, step_s: float) -> None:
        saves = [*self._given.values(), *self._ending]
        first = [save for save in saves if save.first_s is None]
        for save in first:
            save.first_s = step_s
        if first:
            return
        self._all.append(step_s)
        for save in saves:
            save.add(step_s)
        if not saves:
            self._idle.append(step_s)

    def _usual_s(self) -> float:
        """How long a step takes while nothing is saved, but for those that did something else."""
        slow_s = _SLOW * self._middle_s()
        usual = [step_s for step_s in self._last_idle() if step_s <= slow_s]
        return fmean(usual) if usual else 0.0

    def _middle_s(self) -> float:
        last = self._last_idle()
        return median(last) if last else 0.0

    def _last_idle(self) -> list[float]:
        return list(islice(reversed(self._idle), _OF_LATE))
