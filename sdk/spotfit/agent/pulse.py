"""For how long workers have not been heard, in time during which we ourselves were awake."""

from __future__ import annotations

_BEATS_PER_PATIENCE = 4
_LONGEST_BEAT_S = 5.0


def beat_s(patience_s: float) -> float:
    """How often a worker says that it is there, so that it is missed after `patience_s`."""
    return min(_LONGEST_BEAT_S, patience_s / _BEATS_PER_PATIENCE)


class Pulse:
    """Of the workers of one node. Nobody is missed before he was heard once.

    A machine that swaps, or was paused, slows us as much as them: between two looks no more time
    counts than should have passed.
    """

    def __init__(self, patience_s: float) -> None:
        self.look_s = beat_s(patience_s)
        self._patience_s = patience_s
        self._silent_s: dict[int, float] = {}
        self._missed: set[int] = set()
        self._looked_at: float | None = None

    def heard(self, rank: int) -> bool:
        """That worker said something; whether it had been missed."""
        missed = rank in self._missed
        self._missed.discard(rank)
        self._silent_s[rank] = 0.0
        return missed

    def gone(self, rank: int) -> None:
        """That worker has ended."""
        self._silent_s.pop(rank, None)
        self._missed.discard(rank)

    def look(self, now: float) -> dict[int, float]:
        """Who is missed now and was not before, with the seconds nothing was heard."""
        since = now if self._looked_at is None else self._looked_at
        passed_s = min(now - since, 2 * self.look_s)
        self._looked_at = now
        for rank in self._silent_s:
            self._silent_s[rank] += passed_s
        late = {rank: s for rank, s in self._silent_s.items() if s > self._patience_s}
        fresh = {rank: s for rank, s in late.items() if rank not in self._missed}
        self._missed |= fresh.keys()
        return fresh
