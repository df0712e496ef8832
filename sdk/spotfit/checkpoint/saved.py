"""A snapshot of all ranks as it was saved: their indices, and whatever bytes somebody asks for."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

from spotfit.checkpoint.manifest import Manifest, manifests_of, newest_complete
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import (
    CHUNKS,
    Chunk,
    Index,
    Piece,
    index_file,
    read_index,
    write_index,
)
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.store.api import Store
from spotfit.store.marks import mark_of
from spotfit.store.transfer import FileRecord

AT_ONCE = 8
NONE = memoryview(b"")

Take = Callable[[int, memoryview], None]
"""Gets bytes of a piece, and where in the piece they begin; once for each run, by any thread."""


class Part(Protocol):
    """What one rank saved, wherever it lies."""

    @property
    def index(self) -> Index:
        """What it holds."""
        ...

    @property
    def at_hand(self) -> bool:
        """Whether its bytes lie in this machine's memory, and need not be fetched."""
        ...

    def fetch(self, chunk: Chunk, spare: memoryview = NONE) -> memoryview:
        """The bytes of one of its chunks, checked; maybe in `spare`, which nobody needs meanwhile.

        Raises `IntegrityError`.
        """
        ...


class Wanted(NamedTuple):
    """A piece that somebody needs, and what to do with its bytes."""

    rank: int
    piece: Piece
    take: Take


class Order(NamedTuple):
    """A chunk that somebody needs, and the pieces that lie in it, wholly or in part."""

    number: int
    """Of all chunks of the snapshot."""
    part: Part
    chunk: Chunk
    wanted: list[Wanted]

    def hand_over(self, body: memoryview) -> None:
        """These are the chunk's bytes."""
        for _, piece, take in self.wanted:
            begin, end = max(self.chunk.start, piece.start), min(self.chunk.end, piece.end)
            take(begin - piece.start, body[begin - self.chunk.start : end - self.chunk.start])


class Saved:
    """The parts of all ranks. Raises `IntegrityError` where one is missing."""

    def __init__(self, parts: Iterable[Part], name: str = "") -> None:
        self.name = name
        self.parts = {part.index.rank: part for part in parts}
        sizes = {part.index.world_size for part in self.parts.values()}
        steps = {part.index.step for part in self.parts.values()}
        saves = {part.index.save for part in self.parts.values()}
        if (
            len(steps) != 1
            or len(saves) != 1
            or len(sizes) != 1
            or self.parts.keys() != set(range(*sizes))
        ):
            raise IntegrityError(
                f"The snapshot {name} is not whole: it has the parts of ranks "
                f"{sorted(self.parts)}, for {sorted(sizes)} workers at steps {sorted(steps)}, of "
                f"{len(saves)} saves.",
                do="Use an earlier checkpoint.",
            )

    @property
    def indices(self) -> list[Index]:
        """By rank."""
        return [self.parts[rank].index for rank in sorted(self.parts)]

    @property
    def biggest_chunk_bytes(self) -> int:
        """No chunk is bigger."""
        return max((chunk.size_bytes for one in self.indices for chunk in one.chunks), default=0)

    def orders(self, wanted: Iterable[Wanted]) -> list[Order]:
        """The chunks that hold these pieces. What is empty is handed over at once."""
        found: dict[int, Order] = {}
        before = self._chunks_before()
        starts = {index.rank: [chunk.start for chunk in index.chunks] for index in self.indices}
        for one in wanted:
            part, piece = self.parts[one.rank], one.piece
            if not piece.size_bytes:
                one.take(0, memoryview(b""))
                continue
            first = bisect_right(starts[one.rank], piece.start) - 1
            last = bisect_right(starts[one.rank], piece.end - 1) - 1
            for n in range(first, last + 1):
                number = before[one.rank] + n
                order = Order(number, part, part.index.chunks[n], [])
                found.setdefault(number, order).wanted.append(one)
        return [found[number] for number in sorted(found)]

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fetch what holds these pieces, several chunks at a time, and hand them over.

        Raises `IntegrityError`, naming the file, where one is missing or is not what was saved;
        some bytes may have been handed over by then.
        """
        read_alone(self.orders(wanted))

    def _chunks_before(self) -> dict[int, int]:
        """By rank, the number of its first chunk."""
        found, at = {}, 0
        for index in self.indices:
            found[index.rank] = at
            at += len(index.chunks)
        return found


def read_alone(orders: Iterable[Order]) -> None:
    """Fetch these chunks, several at a time, and hand them over. Raises `IntegrityError`."""
    with ThreadPoolExecutor(AT_ONCE, "spotfit-chunks") as pool:
        jobs = read_each(orders, pool)
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def read_each(orders: Iterable[Order], pool: ThreadPoolExecutor) -> list[Future[None]]:
    """Have every chunk fetched and handed over, each thread with spare memory of its own."""
    own = threading.local()

    def read(order: Order) -> None:
        spare = getattr(own, "spare", NONE)
        if not order.part.at_hand and len(spare) < order.chunk.size_bytes:
            spare = own.spare = memoryview(bytearray(order.chunk.size_bytes))
        order.hand_over(order.part.fetch(order.chunk, spare))

    return [pool.submit(read, order) for order in orders]


def at_once(piece: Piece, take: Callable[[memoryview], None]) -> Take:
    """For who needs all bytes of the piece together: `take` gets them when the last are there."""
    return _Collected(piece.size_bytes, take)


class _Collected:
    """Nothing is copied where all comes in one run."""

    def __init__(self, size_bytes: int, take: Callable[[memoryview], None]) -> None:
        self._take = take
        self._size_bytes = size_bytes
        self._left_bytes = size_bytes
        self._all = memoryview(b"")
        self._lock = threading.Lock()

    def __call__(self, at: int, body: memoryview) -> None:
        if len(body) == self._size_bytes:
            self._take(body)
            return
        with self._lock:
            self._all = self._all or memoryview(bytearray(self._size_bytes))
        self._all[at : at + len(body)] = body
        with self._lock:
            self._left_bytes -= len(body)
            complete = not self._left_bytes
        if complete:
            self._take(self._all)


# --- in the bucket -------------------------------------------------------------------------------


class InBucket:
    """One rank's part of a checkpoint, below `folder` of a run's store."""

    def __init__(self, store: Store, folder: str, index: Index) -> None:
        self.index = index
        self._store = store
        self.folder = folder

    @property
    def at_hand(self) -> bool:
        return False

    def fetch(self, chunk: Chunk, spare: memoryview = NONE) -> memoryview:
        key = f"{chunk.at or self.folder}/{chunk.file}"
        try:
            body = self._store.view(key, spare)
        except NotFoundError as missing:
            raise _broken(self._store, key, "is missing") from missing
        if not _holds(body, chunk):
            raise _broken(self._store, key, "is not what was saved")
        return body


def _holds(body: memoryview, chunk: Chunk) -> bool:
    """Whether that is the chunk."""
    if len(body) != chunk.size_bytes:
        return False
    if chunk.mark:
        return mark_of(body) == chunk.mark
    return hashlib.sha256(body).hexdigest() == chunk.sha256


class Opened(NamedTuple):
    """What one who has opened a state tells others, so that they need not ask for it, too."""

    name: str
    parts: tuple[tuple[str, bytes], ...]
    """By rank, the folder of a bucket, if it lies there, and the index."""


def told(saved: Saved) -> Opened:
    """For whoever opens it after this one."""
    parts = [saved.parts[rank] for rank in sorted(saved.parts)]
    return Opened(saved.name, tuple((_folder(part), write_index(part.index)) for part in parts))


def _folder(part: Part) -> str:
    return part.folder if isinstance(part, InBucket) else ""


def reopened(store: Store, opened: Opened) -> Saved:
    """The same checkpoint, which somebody else has opened in that store."""
    parts = [InBucket(store, folder, read_index(body)) for folder, body in opened.parts]
    return Saved(parts, opened.name)


def open_saved(store: Store, name: str) -> Saved | None:
    """That committed checkpoint of the run at `store`; None for one that holds no snapshot.

    Raises `IntegrityError` where its manifests or an index are gone or are not what was saved.
    """
    parts = newest_complete(manifests_of(store, name))
    if not parts:
        raise IntegrityError(
            f"Checkpoint {name} in {store.url} is gone or in pieces: no complete manifests."
        )
    if not any(_index_of(part) for part in parts):
        return None
    with ThreadPoolExecutor(AT_ONCE, "spotfit-indices") as readers:
        return Saved(readers.map(partial(_opened, store), parts), name)


def open_folder(store: Store, folder: str, files: Iterable[FileRecord] | None = None) -> Saved:
    """The snapshot in that folder, as far as `files` tell what was reported of it.

    Where nobody knows them, manifests beside it may tell. Raises `ConfigError` where there is none,
    and `IntegrityError` where an index is gone or is not what was saved.
    """
    reported = _reported(store, folder) if files is None else files
    known = {file.name: file.sha256 for file in reported}
    if index_file(0) not in known and (known or not _is_there(store, f"{folder}/{index_file(0)}")):
        raise _no_snapshot(store, folder, known)

    def opened(rank: int) -> InBucket:
        name = index_file(rank)
        return InBucket(store, folder, _index_at(store, f"{folder}/{name}", known.get(name, "")))

    first = opened(0)
    with ThreadPoolExecutor(AT_ONCE, "spotfit-indices") as readers:
        return Saved([first, *readers.map(opened, range(1, first.index.world_size))], folder)


def _no_snapshot(store: Store, folder: str, known: Mapping[str, str]) -> ConfigError:
    """Of one that was deleted nothing is left but chunks that later ones share with it."""
    if not known and not _holds_files(store, folder):
        return ConfigError(
            f"The checkpoint {folder} in {store.url} is gone, or never was there.",
            do="One that was deleted, by hand or for num_to_keep, is not to be had any more: "
            "`spotfit checkpoints ls` lists those that a run keeps.",
        )
    return ConfigError(
        f"{folder} in {store.url} holds no snapshot of a Checkpointer.",
        do="Read its files: with checkpoint.as_directory() as directory.",
    )


def _holds_files(store: Store, folder: str) -> bool:
    """Whether anything but chunks lies there."""
    within = (one.key for one in store.list(folder) if one.key.startswith(f"{folder}/"))
    return any(not key.startswith(f"{folder}/{CHUNKS}") for key in within)


def _reported(store: Store, folder: str) -> list[FileRecord]:
    parts = newest_complete(manifests_of(store, folder))
    return [file for part in parts if part.folder == folder for file in part.files]


def _opened(store: Store, part: Manifest) -> InBucket:
    record = _index_of(part)
    if record is None:
        raise IntegrityError(f"Rank {part.rank} brought no snapshot to checkpoint {part.name}.")
    index = _index_at(store, f"{part.folder}/{record.name}", record.sha256)
    return InBucket(store, part.folder, index)


def _is_there(store: Store, key: str) -> bool:
    try:
        store.get_range(key, 0, 1)
    except NotFoundError:
        return False
    return True


def _index_at(store: Store, key: str, sha256: str) -> Index:
    """`sha256` is what was reported; '' where nobody knows."""
    try:
        body = store.get(key)
    except NotFoundError as missing:
        raise _broken(store, key, "is missing") from missing
    if sha256 and hashlib.sha256(body).hexdigest() != sha256:
        raise _broken(store, key, "is not what was saved")
    return read_index(body)


def _index_of(part: Manifest) -> FileRecord | None:
    name = index_file(part.rank)
    return next((file for file in part.files if file.name == name), None)


def _broken(store: Store, key: str, how: str) -> IntegrityError:
    return IntegrityError(
        f"{key} in {store.url} {how}.", do="It was damaged or removed; use another checkpoint."
    )


# --- in memory -----------------------------------------------------------------------------------


class InMemory:
    """One rank's part in a segment of this machine, whole or none: nothing has to be checked."""

    def __init__(self, segment: Segment) -> None:
        self.index = segment.index()
        self._bytes = segment.bytes

    @property
    def at_hand(self) -> bool:
        return True

    def fetch(self, chunk: Chunk, spare: memoryview = NONE) -> memoryview:
        return self._bytes[chunk.start : chunk.end]
