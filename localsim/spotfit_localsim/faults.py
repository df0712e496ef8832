"""What may go wrong: lost answers, unsent requests, slow disks, frozen and dead processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotfit.core.errors import TransientStoreError
from spotfit_localsim.dice import Stream

Span = tuple[float, float]

GIVES_UP_S = 10.0
"""How long a client of the bucket waits for one answer, as those of production do."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the world is; shares are of calls."""

    unsent: float = 0.0
    """Requests to the bucket that never arrive."""
    lost_answers: float = 0.0
    """Requests to the bucket that have their effect, and whose answer is lost."""
    latency_s: Span = (0.005, 0.03)
    slow: float = 0.0
    """Requests that take `slow_s` instead."""
    slow_s: Span = (0.5, 8.0)
    stalls: float = 0.0
    """Requests to the bucket that hang for `stall_s`; who asked gives up after `GIVES_UP_S`."""
    stall_s: Span = (5.0, 60.0)
    freezes: float = 0.0
    """Calls after which the caller stops for `freeze_s`."""
    freeze_s: Span = (0.5, 40.0)
    deaths: float = 0.0
    """Calls after which the caller is dead."""


CALM = Faults()


@dataclass(frozen=True, slots=True)
class Hazard:
    """What befalls a process at one of its calls."""

    freezes_s: float = 0.0
    kills: bool = False


class Season:
    """The faults that hold at present, for everybody; a storm ends when somebody says so."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._usual = faults
        self._stalled_until = 0.0

    def cut_off(self) -> None:
        """The bucket answers nobody, until `reopen`."""
        self.faults = replace(self.faults, unsent=1.0)

    def reopen(self) -> None:
        """The bucket is as it was."""
        self.faults = replace(self.faults, unsent=self._usual.unsent)

    def stall(self, until_s: float) -> None:
        """Every request to the bucket hangs until that moment of the world."""
        self._stalled_until = max(self._stalled_until, until_s)

    def stalled_s(self, now: float) -> float:
        """For how long every request hangs from now on."""
        return max(0.0, self._stalled_until - now)

    def calm(self) -> None:
        """No more faults from here on."""
        self._stalled_until = 0.0
        self.faults = self._usual = Faults(latency_s=self.faults.latency_s)


class Hazards:
    """At which calls of one process the world strikes."""

    def __init__(self, season: Season, stream: Stream, *, mortal: bool = True) -> None:
        self._season = season
        self._stream = stream
        self._mortal = mortal
        self._until_freeze = stream.gap(season.faults.freezes)
        self._until_death = stream.gap(season.faults.deaths) if mortal else 0

    def next(self) -> Hazard | None:
        """What befalls the process at this call; most often nothing."""
        faults = self._season.faults
        if faults.freezes and self._until_freeze:
            self._until_freeze -= 1
            if self._until_freeze == 0:
                self._until_freeze = self._stream.gap(faults.freezes)
                return Hazard(freezes_s=self._stream.between(faults.freeze_s))
        if faults.deaths and self._until_death:
            self._until_death -= 1
            if self._until_death == 0:
                return Hazard(kills=True)
        return None


class Line:
    """One client's line to the bucket: slow, and sometimes cut before or after the deed."""

    def __init__(self, season: Season, stream: Stream) -> None:
        self._season = season
        self._stream = stream

    def latency_s(self) -> float:
        """How long half a request takes."""
        faults = self._season.faults
        if faults.slow and self._stream.chance(faults.slow):
            return self._stream.between(faults.slow_s)
        return self._stream.between(faults.latency_s) / 2

    def stalled_s(self, now: float) -> float:
        """For how long this request hangs; most often not at all."""
        stalls, own_s = self._season.faults.stalls, 0.0
        if stalls and self._stream.chance(stalls):
            own_s = self._stream.between(self._season.faults.stall_s)
        return max(own_s, self._season.stalled_s(now))

    def arrives_late(self) -> bool:
        """Whether a request is carried out though who sent it has given up."""
        return self._stream.chance(0.5)

    def before(self) -> None:
        """The request is on its way; it may never arrive."""
        if self._stream.chance(self._season.faults.unsent):
            raise TransientStoreError("The request was never sent.", do="Try again.")

    def behind(self) -> None:
        """The deed is done; its answer may be lost."""
        if self._stream.chance(self._season.faults.lost_answers):
            raise TransientStoreError("The answer was lost.", do="Read what is there.")


NO_HAZARDS = Season(CALM)
