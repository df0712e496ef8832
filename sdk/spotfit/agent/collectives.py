"""What ranks of one round wait for together: who is here, who is missing, who will never come.

Pure bookkeeping for the hub. Whoever waits is answered: when all are here, when the time is over,
or as soon as it is certain that somebody cannot come any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from spotfit.model.wire import Gathered, Overdue, ToWorker

Answer = tuple[int | None, ToWorker]
"""A frame for one rank, or for all of them (None)."""

REPORT = "report"
"""The kind under which ranks wait for the name of a checkpoint."""

_MANY = 8


class Key(NamedTuple):
    """The `seq`-th collective of a kind."""

    kind: str
    seq: int

    def __str__(self) -> str:
        return f"{self.kind} (number {self.seq + 1})"


Missing = Callable[[Key], set[int]]
"""Who still has to come to it."""


class Collectives:
    """Those of one round that are not complete.

    After `timeout_s` it is given up (None: never); every `warn_s` the lowest rank that waits
    learns who is missing.
    """

    def __init__(self, world_size: int, *, timeout_s: float | None, warn_s: float) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._warn_s = warn_s
        self._waiting: dict[Key, _Waiting] = {}
        self._held: dict[int, Key] = {}
        """Ranks that do nothing but wait, and where."""

    def join(
        self, rank: int, key: Key, now: float, *, value: bytes = b"", blocks: bool = False
    ) -> Mapping[int, bytes]:
        """That rank is there; all who are, with their values."""
        waiting = self._waiting.setdefault(key, _Waiting(now))
        waiting.values[rank] = value
        if blocks:
            self._held[rank] = key
        return waiting.values

    @property
    def waiting(self) -> tuple[Key, ...]:
        """Those somebody has come to."""
        return tuple(self._waiting)

    def here(self, key: Key) -> set[int]:
        """Who has come to it."""
        waiting = self._waiting.get(key)
        return set(waiting.values) if waiting else set()

    def close(self, key: Key) -> Mapping[int, bytes]:
        """It is over, one way or the other; those who were there, with their values."""
        if key not in self._waiting:
            return {}
        values = self._waiting.pop(key).values
        for rank in values:
            if self._held.get(rank) == key:
                del self._held[rank]
        return values

    def late(self, now: float, missing: Missing) -> list[Answer]:
        """Give up what has waited too long, and warn of what has waited long."""
        answers: list[Answer] = []
        for key, waiting in list(self._waiting.items()):
            if self._timeout_s is not None and now - waiting.since >= self._timeout_s:
                answers += self._given_up(key, missing)
            elif now - waiting.told_at >= self._warn_s:
                waiting.told_at = now
                absent = tuple(sorted(missing(key)))
                overdue = Overdue(key.kind, absent, now - waiting.since)
                answers.append((min(waiting.values), overdue))
        return answers

    def next_late(self) -> float | None:
        """When `late` should be asked again."""
        if not self._waiting:
            return None
        warn = min(waiting.told_at for waiting in self._waiting.values()) + self._warn_s
        if self._timeout_s is None:
            return warn
        over = min(waiting.since for waiting in self._waiting.values()) + self._timeout_s
        return min(warn, over)

    def hopeless(self, returned: set[int], missing: Missing) -> list[Answer]:
        """Give up what can never be complete.

        Somebody it needs has returned, or every rank waits and none for the same as the others.
        """
        if not self._waiting:
            return []
        answers: list[Answer] = []
        if returned:
            for key in list(self._waiting):
                if gone := missing(key) & returned:
                    why = f"{_ranks(gone)} returned from the training function without it"
                    answers += self._given_up(key, missing, why)
        if self._held and len(self._held.keys() | returned) == self._world_size:
            why = f"every rank waits, and not for the same: {self._whereabouts()}"
            for key in list(self._waiting):
                answers += self._given_up(key, missing, why)
        return answers

    def _given_up(self, key: Key, missing: Missing, why: str = "") -> list[Answer]:
        told = Gathered(key.kind, key.seq, missing=tuple(sorted(missing(key))), why=why)
        return [(rank, told) for rank in self.close(key)]

    def _whereabouts(self) -> str:
        at: dict[Key, list[int]] = {}
        for rank, key in sorted(self._held.items()):
            at.setdefault(key, []).append(rank)
        return ", ".join(f"{_ranks(ranks)} in {key}" for key, ranks in at.items())


class _Waiting:
    def __init__(self, since: float) -> None:
        self.since = since
        self.told_at = since
        self.values: dict[int, bytes] = {}


def _ranks(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 0, 2', and not a thousand of them."""
    several = sorted(ranks)
    shown = ", ".join(str(rank) for rank in several[:_MANY])
    more = f" and {len(several) - _MANY} more" if len(several) > _MANY else ""
    return f"rank{'s' if len(several) > 1 else ''} {shown}{more}"
