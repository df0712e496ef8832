"""Copies of segments on other machines: in which order they are sent, and which are kept.

What a machine's neighbour keeps is of use where it has the parts of all its ranks of one save; and
a segment is written anew by the save after the next. So parts are sent save by save, and those of
the last save that came whole are kept until a later one has.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Copy(NamedTuple):
    """What one rank saved with that report of that round. In this order they come."""

    round: int
    report: int
    rank: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.round}-{self.rank}-{self.report}.segment"


class Due(NamedTuple):
    """A copy that is to be made."""

    copy: Copy
    segment: Path
    seal: tuple[object, ...]
    """The segment's: with another one something else is in it."""
    fellows: tuple[int, ...]
    """The ranks of this machine."""
    to: str
    """The vault that is to keep it."""

    @property
    def batch(self) -> tuple[int, int, str]:
        """The same for all that are of use together."""
        return self.copy.round, self.copy.report, self.to


class Line:
    """What is to be sent, save by save; of those that wait only the last."""

    def __init__(self) -> None:
        self._batch: tuple[int, int, str] | None = None
        """What is being sent."""
        self._now: dict[int, Due] = {}
        """By rank, what of it is left."""
        self._next: dict[int, Due] = {}
        self._lost: object = None
        """The last of which a part could not be sent: without it the others are of no use."""
        self._gives_way = False
        """Whether what is being sent was begun late: it would be written anew before its end."""
        self._given_up: object = None

    def add(self, due: Due) -> None:
        """It waits from now on; what waited of an earlier save, or for another vault, does not."""
        if due.batch == self._lost or self._is_late(due):
            return
        self._now = {rank: one for rank, one in self._now.items() if one.to == due.to}
        if due.batch == self._batch:
            self._now[due.copy.rank] = due
            return
        if self._gives_way:
            self._given_up, self._batch, self._now = self._batch, None, {}
            self._gives_way = False
        self._next = {rank: one for rank, one in self._next.items() if one.batch == due.batch}
        self._next[due.copy.rank] = due

    def _is_late(self, due: Due) -> bool:
        """Whether a later save is sent or waits; what is being sent goes to its end anyway."""
        if due.batch == self._batch:
            return False
        known = [self._batch, *(one.batch for one in self._next.values())]
        return any(due.batch < one for one in known if one is not None and one[-1] == due.to)

    def take(self) -> Due | None:
        """What to send now; None while nothing waits."""
        if not self._now and self._next:
            self._now, self._next = self._next, {}
            self._batch = next(iter(self._now.values())).batch
        return self._now.pop(min(self._now)) if self._now else None

    def is_needless(self, due: Due) -> bool:
        """Whether that one, which was taken, is not worth the rest of its way."""
        return due.batch == self._given_up

    def lose(self, due: Due) -> None:
        """That one, which was taken, could not be sent: maybe its segment was written anew.

        What waits will soon be, too. It goes its way until there is a new one.
        """
        if due.batch == self._batch:
            self._batch, self._now, self._lost, self._gives_way = None, {}, due.batch, True


class Shelf:
    """Where copies for other machines lie; for any thread."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when the first one comes."""
        self.folder = folder
        self._taken_back = Copy(0, 0, 0)
        self._lock = threading.Lock()

    @property
    def lying(self) -> dict[Copy, Path]:
        """All that are whole, the earliest first."""
        found = {}
        for path in self.folder.glob("*.segment"):
            round_, rank, report = map(int, path.stem.split("-"))
            found[Copy(round_, report, rank)] = path
        return dict(sorted(found.items()))

    def make_room(self, copy: Copy, fellows: Collection[int]) -> bool:
        """Whether that one may come; if so, what nobody needs beside it is gone.

        Raises `OSError` where there is no place for any.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)  # not what it lies in: our agent may be gone
        with self._lock:
            lying = self.lying
            if self._refuses(copy, lying):
                return False
            for one in expendable(copy, fellows, lying):
                lying[one].unlink(missing_ok=True)
            return True

    def put(self, coming: Path, copy: Copy) -> bool:
        """That file, which is whole, into its place; unless it comes too late by now."""
        with self._lock:
            refused = self._refuses(copy, self.lying)
            if not refused:
                coming.replace(self.folder / copy.name)
            return not refused

    def take_back(self, before: Copy) -> None:
        """Nobody is to go on from what was saved before that: it is not kept, nor taken."""
        with self._lock:
            self._taken_back = max(self._taken_back, before)
            for one, path in self.lying.items():
                if one < self._taken_back:
                    path.unlink(missing_ok=True)

    def _refuses(self, copy: Copy, lying: Iterable[Copy]) -> bool:
        return copy < self._taken_back or is_late(copy, lying)


def is_late(copy: Copy, lying: Iterable[Copy]) -> bool:
    """Whether what lies there was saved after it: by that rank, or in a later round."""
    return any(one.round > copy.round or (one.rank == copy.rank and one > copy) for one in lying)


def expendable(copy: Copy, fellows: Collection[int], lying: Collection[Copy]) -> Iterator[Copy]:
    """What need not lie there any more once that one comes, of a machine with these ranks.

    Of rounds before nothing is needed, and of that machine's earlier saves only the last that is
    whole.
    """
    saves: dict[int, set[int]] = defaultdict(set)
    for one in lying:
        if one.round == copy.round and one.report < copy.report:
            saves[one.report].add(one.rank)
    whole = max((save for save, ranks in saves.items() if ranks.issuperset(fellows)), default=None)
    for one in lying:
        earlier = one.rank in fellows and one.report < copy.report and one.report != whole
        if one.round < copy.round or (one.round == copy.round and earlier):
            yield one
