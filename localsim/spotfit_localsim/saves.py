"""Snapshots in a simulated world: real segments, production's keeping of them and its uploads, and
a copy with the neighbour; only time, wires and workers are pretended."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from spotfit.agent.carrier import Order
from spotfit.agent.copies import Due, Line
from spotfit.agent.snapshots import Snapshots
from spotfit.agent.vault import CopyTold, read_part
from spotfit.checkpoint.bring import bring_snapshot, unpacked
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.saved import InMemory, Saved, open_saved
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, Piece, chunks_of
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.host.shared_memory import SHARED_MEMORY
from spotfit.model.holding import Part
from spotfit.model.wire import Start
from spotfit_localsim.bucket import Bucket, SimStore

_INDEX_BYTES = 4096
_BODY_BYTES = 64

Life = Generator[float | None, None, None]
"""What somebody does: it yields for how long it is busy, or None until something wakes it."""


class Kept(msgspec.Struct, frozen=True):
    """What a rank saves of its state, and reports as its metrics."""

    step: int
    link: str


_kept = decoder(Kept)


class Place(Protocol):
    """Where machines are, and what is between them."""

    def now(self) -> float: ...

    def after(self, seconds: float, then: Callable[[], None]) -> object: ...

    def copy_s(self) -> float:
        """How long the next copy takes."""
        ...

    def reaches(self, sender: str, receiver: str) -> bool: ...


def _nobody(*_: object) -> None:
    """Hears of it."""


class Memory:
    """What lies in the memory of one machine; its name is the address of its vault."""

    def __init__(
        self, name: str, place: Place, others: dict[str, Memory], kept: CopyTold = _nobody
    ) -> None:
        """`kept` hears of copies of ours that others keep."""
        self.name = name
        self._place = place
        self._others = others
        self._kept = kept
        above = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="spotfit-sim-", dir=above))
        self.snapshots = Snapshots(str(self._folder))
        self.snapshots.copy = self._copy
        self._line = Line()
        self._sends = False
        others[name] = self

    def segment(self, name: str) -> Segment:
        """A new one of a worker's."""
        return Segment.create(self._folder / f"{name}.segment", _BODY_BYTES, _INDEX_BYTES)

    def close(self) -> None:
        """The machine is gone."""
        self._others.pop(self.name, None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy(self, due: Due) -> None:
        """One copy goes after the other, and is none if its segment changes meanwhile."""
        self._line.add(due)
        self._send()

    def _send(self) -> None:
        due = None if self._sends else self._line.take()
        if due is not None:
            self._sends = True
            self._place.after(self._place.copy_s(), partial(self._sent, due))

    def _sent(self, due: Due) -> None:
        self._sends = False
        if self._others.get(self.name) is not self:
            return
        if not self._arrives(due):
            self._line.lose(due)
        self._send()

    def _arrives(self, due: Due) -> bool:
        keeper = self._others.get(due.to)
        if self._line.is_needless(due):
            return False
        if keeper is None or not self._place.reaches(self.name, due.to):
            return False
        if _seal(due.segment) != due.seal:
            return False
        with Segment.open(due.segment) as source:
            kept = keeper.keep(due, bytes(source.whole))
            if kept:
                self._kept(due.copy.round, due.copy.rank, source.index().step, due.to)
            return kept

    def keep(self, due: Due, body: bytes) -> bool:
        """A neighbour's segment; whether it is kept."""
        shelf = self.snapshots.shelf
        if due.copy in shelf.lying:
            return True
        if not shelf.make_room(due.copy, due.fellows):
            return False
        coming = shelf.folder / f"{due.copy.name}.coming"
        coming.write_bytes(body)
        return shelf.put(coming, due.copy)


def fill(segment: Segment, start: Start, kept: Kept) -> None:
    """After `begin`: the copy is done."""
    size_bytes = _BODY_BYTES
    pieces = (
        Piece((f"{start.rank}",), "uint8", (size_bytes,), (0,), (size_bytes,), 0, size_bytes),
    )
    segment.bytes[:size_bytes] = body_of(start.rank, kept)
    segment.finish(
        Index(
            start.rank,
            start.world_size,
            kept.step,
            pieces,
            own=encode(kept),
            chunks=chunks_of(pieces),
        )
    )


def body_of(rank: int, kept: Kept) -> bytes:
    """What that rank's part of a state looks like; it changes with every step."""
    return f"{rank} {kept.step} {kept.link}".ljust(_BODY_BYTES).encode()


def remembered(
    start: Start, me: Memory, others: Mapping[str, Memory], reaches: Callable[[str], bool]
) -> Saved:
    """The state in memory that a round begins from. Raises `IntegrityError` where it is not whole,
    as a worker that asks a vault would."""
    assert start.memory is not None
    parts = []
    for rank, path in enumerate(start.remembered):
        part = Part(start.memory, rank, len(start.remembered))
        if path:
            parts.append(InMemory(Segment.open(Path(path))))
            continue
        vault = start.elsewhere[rank]
        keeper = others.get(vault)
        found = keeper.snapshots.find(part) if keeper and reaches(vault) else None
        if found is None:
            raise IntegrityError(f"{me.name} finds nothing of rank {rank} at {vault}.")
        with read_part(found, part) as segment:
            parts.append(InMemory(Segment.open(segment.path)))
    return Saved(parts, "in memory")


def what_is_in(saved: Saved) -> Kept | str:
    """The state, or in words what is wrong with it. Raises `IntegrityError` for damage."""
    states = {_kept.decode(index.own) for index in saved.indices}
    if len(states) > 1:
        return f"its ranks saved different models: {states}"
    (kept,) = states
    for rank, part in saved.parts.items():
        for chunk in part.index.chunks:
            if bytes(part.fetch(chunk)) != body_of(rank, kept):
                return f"the bytes of rank {rank} are not those of step {kept.step}"
    return kept


def in_bucket(objects: Mapping[str, bytes], name: str) -> Kept | str:
    """What a reader of that checkpoint finds, or in words why there is nothing to be found."""
    bucket = Bucket()
    bucket.objects = dict(objects)
    try:
        saved = open_saved(Undisturbed(bucket, "somebody"), name)
        return what_is_in(saved) if saved is not None else "no snapshot"
    except IntegrityError as broken:
        return broken.what


def bring(
    bucket: Bucket, who: str, order: Order, takes_s: float, told: list[Manifest | str]
) -> Life:
    """As the carrier does it. Who is killed half way leaves half of it."""
    parcel = unpacked(order.carry.parcel)
    assert parcel is not None
    try:
        yield takes_s / 2
        with suppress(_HalfDone):
            bring_snapshot(Cut(bucket, who), parcel)
        yield takes_s / 2
        told.append(bring_snapshot(Undisturbed(bucket, who), parcel))
    except IntegrityError as torn:
        told.append(torn.what)


class Undisturbed(SimStore):
    """One on which nothing goes wrong, and no time passes."""

    def __init__(self, bucket: Bucket, who: str) -> None:
        self._bucket = bucket
        self._prefix = ""
        self._who = who

    def _go(self, kind: str, deed: Callable[[], bool] | None = None) -> None:
        """At once."""

    def _come_back(self) -> None:
        """At once, too."""

    def _write(self, key: str, body: bytes) -> bool:
        self._bucket.write(self._who, key, body)
        return True


class _HalfDone(Exception):  # noqa: N818  # it is no error, but where a story may end
    """As much of an upload is done as may be left by one that was killed."""


class Cut(Undisturbed):
    """One on which only the first object is written."""

    _begun = False

    def _write(self, key: str, body: bytes) -> bool:
        if self._begun:
            raise _HalfDone
        self._begun = True
        return super()._write(key, body)


def _seal(segment: Path) -> object:
    try:
        with Segment.open(segment) as opened:
            return opened.seal
    except IntegrityError:
        return None
