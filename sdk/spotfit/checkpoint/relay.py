"""Ranks of one machine that read a snapshot together: each chunk is fetched once, and handed round.

Each rank has a *lane*: a file in shared memory with a few places for chunks. It fetches its share
of what several need into its own lane, and takes what the others have fetched from theirs. A place
is used again once all who need what is in it have taken it. Nobody sends anything: each looks at
the lanes, where every word has one writer.

    0        how many places of what size, for how many ranks; and what went wrong, if anything did
    4096     a word for each place: which of the lane's chunks is in it, from 1; 0 for none
    …        for each rank a word for each place: which it has taken
    …        the places
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from spotfit.checkpoint.saved import AT_ONCE, Order, read_each
from spotfit.core.clock import Clock
from spotfit.core.errors import IntegrityError
from spotfit.host import log

LANE = ".lane"
"""The ending of a lane's name. Of workers that were killed while they read lanes are left."""

_PAGE = 4096
_HEAD = struct.Struct("<8sIIQI")
_MAGIC = b"spotlane"
_WORD = struct.Struct("<I")
_LOOK_S = 0.005
"""So often each looks what the others have done."""
_TAKERS = 2
_PLACES = 4
"""A rank has so many chunks in its lane at a time."""


class Company(NamedTuple):
    """The ranks of one machine, as each of them knows them."""

    place: int
    """Which of them this one is."""
    lanes: Sequence[Path]
    needs: Sequence[int]
    """Which chunks each of them needs: bit n stands for the chunk of that number."""


def needs_of(orders: Sequence[Order]) -> int:
    """What to tell the others: the chunks that have to be fetched from somewhere."""
    needs = 0
    for order in orders:
        if not order.part.at_hand:
            needs |= 1 << order.number
    return needs


@contextmanager
def lane(path: Path, *, fellows: int, chunks: int, place_bytes: int) -> Iterator[bool]:
    """A lane of this rank's for so many chunks; whether there was room for it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        Lane.create(
            path, fellows=fellows, places=min(_PLACES, max(1, chunks)), place_bytes=place_bytes
        )
    except OSError as full:
        log.warning("checkpoint.no_lane", path=str(path), why=str(full), instead="each for itself")
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def read_together(orders: Sequence[Order], company: Company, clock: Clock) -> None:
    """Fetch these chunks, those that others of the company need as well together with them.

    All of the company have to call it; a lane stays until all have returned. Raises
    `IntegrityError` on each of them where one finds that a chunk is missing, or damaged.
    """
    dealt = _dealt(company.needs)
    shared = {number for numbers in dealt for number in numbers}
    alone = [order for order in orders if order.number not in shared]
    common = {order.number: order for order in orders if order.number in shared}
    with (
        ThreadPoolExecutor(AT_ONCE, "spotfit-chunks") as fetchers,
        ThreadPoolExecutor(_TAKERS, "spotfit-relay") as takers,
    ):
        relay = _Relay(company, dealt, common, fetchers, takers)
        relay.run(read_each(alone, fetchers), clock)


def _dealt(needs: Sequence[int]) -> list[list[int]]:
    """Who fetches which of the chunks that more than one needs: of those who do, the idlest."""
    dealt: list[list[int]] = [[] for _ in needs]
    for number in range(max(needs, default=0).bit_length()):
        takers = [place for place, need in enumerate(needs) if need >> number & 1]
        if len(takers) > 1:
            dealt[min(takers, key=lambda place: len(dealt[place]))].append(number)
    return dealt


class _Relay:
    """One rank's part in it."""

    def __init__(
        self,
        company: Company,
        dealt: Sequence[Sequence[int]],
        orders: Mapping[int, Order],
        fetchers: ThreadPoolExecutor,
        takers: ThreadPoolExecutor,
    ) -> None:
        self._place, _, self._needs = company
        self._lanes = [Lane.open(path) for path in company.lanes]
        self._mine = self._lanes[self._place]
        self._dealt = dealt
        self._orders = orders
        self._fetchers = fetchers
        self._takers = takers
        self._fetched = 0
        self._due = [
            deque(
                (n, number)
                for n, number in enumerate(numbers)
                if place != self._place and number in orders
            )
            for place, numbers in enumerate(dealt)
        ]

    def run(self, jobs: Sequence[Future[None]], clock: Clock) -> None:
        """Until all is here, and `jobs` are done. What fails here fails for all."""
        pending = set(jobs)
        try:
            while pending or self._fetched < len(self._dealt[self._place]) or any(self._due):
                self._raise_what_went_wrong()
                pending |= {*self._fetch_more(), *self._take_more()}
                if not pending:
                    clock.wait(_LOOK_S)
                    continue
                done, pending = wait(pending, _LOOK_S, FIRST_COMPLETED)
                for job in done:
                    job.result()
        except BaseException as error:
            for job in pending:
                job.cancel()
            self._mine.wrong = str(error) or repr(error)
            raise
        finally:
            wait(pending)
            for lane in self._lanes:
                lane.close()

    def _raise_what_went_wrong(self) -> None:
        for lane in self._lanes:
            if lane.wrong:
                raise IntegrityError(lane.wrong)

    def _fetch_more(self) -> list[Future[None]]:
        begun = []
        numbers = self._dealt[self._place]
        while self._fetched < len(numbers) and self._is_free(self._fetched):
            order = self._orders[numbers[self._fetched]]
            begun.append(self._fetchers.submit(self._fetch, self._fetched, order))
            self._fetched += 1
        return begun

    def _is_free(self, n: int) -> bool:
        """Whether all have taken what the place of our nth chunk held before."""
        earlier = n - self._mine.places
        if earlier < 0:
            return True
        number = self._dealt[self._place][earlier]
        return all(
            self._mine.taken(fellow, earlier)
            for fellow, need in enumerate(self._needs)
            if need >> number & 1
        )

    def _fetch(self, n: int, order: Order) -> None:
        place = self._mine.place_of(n)
        body = order.part.fetch(order.chunk, place)
        if body.obj is not place.obj:
            place[: len(body)] = body
        self._mine.fill(n)
        order.hand_over(body)
        self._mine.take(self._place, n)

    def _take_more(self) -> list[Future[None]]:
        begun = []
        for lane, due in zip(self._lanes, self._due, strict=True):
            while due and lane.filled(due[0][0]):
                n, number = due.popleft()
                begun.append(self._takers.submit(self._take, lane, n, self._orders[number]))
        return begun

    def _take(self, lane: Lane, n: int, order: Order) -> None:
        order.hand_over(lane.place_of(n)[: order.chunk.size_bytes])
        lane.take(self._place, n)


class Lane:
    """One rank's places, open to all of its machine; chunks go round them."""

    def __init__(self, memory: mmap.mmap) -> None:
        _, self.places, self._fellows, self._place_bytes, _ = _HEAD.unpack_from(memory)
        self._memory = memory
        self._body_at = _PAGE + _words_bytes(self.places, self._fellows)

    @classmethod
    def create(cls, path: Path, *, fellows: int, places: int, place_bytes: int) -> None:
        """An empty one for so many ranks. Raises `OSError` where there is no room for it."""
        size_bytes = _PAGE + _words_bytes(places, fellows) + places * place_bytes
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size_bytes)
            os.pwrite(file, _HEAD.pack(_MAGIC, places, fellows, place_bytes, 0), 0)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)

    @classmethod
    def open(cls, path: Path) -> Self:
        """One that its rank has made. Raises `OSError`."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    @property
    def wrong(self) -> str:
        """Why its rank gave up; '' if it did not."""
        length = _HEAD.unpack_from(self._memory)[-1]
        return self._memory[_HEAD.size : _HEAD.size + length].decode(errors="replace")

    @wrong.setter
    def wrong(self, why: str) -> None:
        body = why.encode()[: _PAGE - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(body)] = body
        _WORD.pack_into(self._memory, _HEAD.size - _WORD.size, len(body))

    def place_of(self, n: int) -> memoryview:
        """Where its nth chunk lies."""
        at = self._body_at + n % self.places * self._place_bytes
        return memoryview(self._memory)[at : at + self._place_bytes]

    def fill(self, n: int) -> None:
        """Its nth chunk is there, and checked."""
        self._write(0, n)

    def filled(self, n: int) -> bool:
        """Whether its nth chunk is there."""
        return self._reads(0, n)

    def take(self, fellow: int, n: int) -> None:
        """That one of the company needs its nth chunk no more."""
        self._write(1 + fellow, n)

    def taken(self, fellow: int, n: int) -> bool:
        """Whether that one has taken its nth chunk."""
        return self._reads(1 + fellow, n)

    def close(self) -> None:
        """Let go of it; where somebody still looks at it, it goes with the last of them."""
        with suppress(BufferError):
            self._memory.close()

    def _word_at(self, row: int, n: int) -> int:
        at: int = _PAGE + _WORD.size * (row * self.places + n % self.places)
        return at

    def _write(self, row: int, n: int) -> None:
        _WORD.pack_into(self._memory, self._word_at(row, n), n + 1)

    def _reads(self, row: int, n: int) -> bool:
        found = _WORD.unpack_from(self._memory, self._word_at(row, n))[0]
        return bool(found == n + 1)


def _words_bytes(places: int, fellows: int) -> int:
    words = (1 + fellows) * places * _WORD.size
    return -(-words // _PAGE) * _PAGE
