"""A snapshot of all ranks as it was saved: their indices, and whatever bytes somebody asks for."""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from spotfit.checkpoint.manifest import Manifest, manifests_of, newest_complete
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Chunk, Index, Piece, index_file, read_index
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord

AT_ONCE = 8


class Part(Protocol):
    """What one rank saved, wherever it lies."""

    @property
    def index(self) -> Index:
        """What it holds."""
        ...

    def fetch(self, chunk: Chunk) -> bytes | memoryview:
        """The bytes of one of its chunks, checked. Raises `IntegrityError`."""
        ...


class Wanted(NamedTuple):
    """A piece that somebody needs, and what to do with its bytes; called once, by any thread."""

    rank: int
    piece: Piece
    take: Callable[[memoryview], None]


class Saved:
    """The parts of all ranks. Raises `IntegrityError` where one is missing."""

    def __init__(self, parts: Iterable[Part], name: str = "") -> None:
        self.name = name
        self.parts = {part.index.rank: part for part in parts}
        sizes = {part.index.world_size for part in self.parts.values()}
        steps = {part.index.step for part in self.parts.values()}
        if len(steps) != 1 or len(sizes) != 1 or self.parts.keys() != set(range(*sizes)):
            raise IntegrityError(
                f"The snapshot {name} is not whole: it has the parts of ranks "
                f"{sorted(self.parts)}, for {sorted(sizes)} workers at steps {sorted(steps)}.",
                do="Use an earlier checkpoint.",
            )

    @property
    def indices(self) -> list[Index]:
        """By rank."""
        return [self.parts[rank].index for rank in sorted(self.parts)]

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fetch what holds these pieces, several chunks at a time, and hand them over.

        Raises `IntegrityError`, naming the file, where one is missing or is not what was saved;
        some pieces may have been handed over by then.
        """
        groups = [
            group
            for rank in sorted({one.rank for one in wanted})
            for group in _groups(self.parts[rank], [one for one in wanted if one.rank == rank])
        ]
        with ThreadPoolExecutor(AT_ONCE, "spotfit-chunks") as pool:
            jobs = [pool.submit(_read, group) for group in groups]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                _cancel(jobs)
                raise


class _Group(NamedTuple):
    """Chunks that follow each other, and the pieces that lie in them."""

    part: Part
    chunks: list[Chunk]
    wanted: list[Wanted]


def _groups(part: Part, wanted: Sequence[Wanted]) -> list[_Group]:
    """A chunk with small pieces, or the chunks of a big one."""
    chunks = part.index.chunks
    starts = [chunk.start for chunk in chunks]
    groups: list[_Group] = []
    for one in sorted(wanted, key=lambda one: one.piece.start):
        if not one.piece.size_bytes:
            one.take(memoryview(b""))
            continue
        first = bisect_right(starts, one.piece.start) - 1
        last = bisect_right(starts, one.piece.end - 1) - 1
        needed = list(chunks[first : last + 1])
        if groups and groups[-1].chunks == needed:
            groups[-1].wanted.append(one)
        else:
            groups.append(_Group(part, needed, [one]))
    return groups


def _read(group: _Group) -> None:
    part, chunks, wanted = group
    begin = chunks[0].start
    if len(chunks) == 1:
        body = memoryview(part.fetch(chunks[0]))
    else:
        whole = bytearray(chunks[-1].end - begin)
        for chunk in chunks:
            whole[chunk.start - begin : chunk.end - begin] = part.fetch(chunk)
        body = memoryview(whole)
    for one in wanted:
        one.take(body[one.piece.start - begin : one.piece.end - begin])


def _cancel(jobs: Iterable[Future[None]]) -> None:
    for job in jobs:
        job.cancel()


# --- in the bucket -------------------------------------------------------------------------------


class InBucket:
    """One rank's part of a checkpoint, below `folder` of a run's store."""

    def __init__(self, store: Store, folder: str, index: Index) -> None:
        self.index = index
        self._store = store
        self._folder = folder

    def fetch(self, chunk: Chunk) -> bytes:
        key = f"{chunk.at or self._folder}/{chunk.file}"
        try:
            body = self._store.get(key)
        except NotFoundError as missing:
            raise _broken(self._store, key, "is missing") from missing
        if not _holds(body, chunk):
            raise _broken(self._store, key, "is not what was saved")
        return body


def _holds(body: bytes, chunk: Chunk) -> bool:
    if len(body) != chunk.size_bytes:
        return False
    if chunk.crc32 is not None:
        return zlib.crc32(body) == chunk.crc32
    return hashlib.sha256(body).hexdigest() == chunk.sha256


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
    return Saved([_opened(store, part) for part in parts], name)


def open_folder(store: Store, folder: str) -> Saved:
    """A snapshot in that folder, of which no manifest is at hand.

    Raises `ConfigError` where there is none.
    """
    found = []
    try:
        body = store.get(f"{folder}/{index_file(0)}")
    except NotFoundError as missing:
        raise ConfigError(
            f"{folder} in {store.url} holds no snapshot of a Checkpointer.",
            do="Read its files: with checkpoint.as_directory() as directory.",
        ) from missing
    found.append(read_index(body))
    for rank in range(1, found[0].world_size):
        try:
            found.append(read_index(store.get(f"{folder}/{index_file(rank)}")))
        except NotFoundError as missing:
            raise _broken(store, f"{folder}/{index_file(rank)}", "is missing") from missing
    return Saved([InBucket(store, folder, index) for index in found], folder)


def _opened(store: Store, part: Manifest) -> InBucket:
    record = _index_of(part)
    if record is None:
        raise IntegrityError(f"Rank {part.rank} brought no snapshot to checkpoint {part.name}.")
    key = f"{part.folder}/{record.name}"
    try:
        body = store.get(key)
    except NotFoundError as missing:
        raise _broken(store, key, "is missing") from missing
    if hashlib.sha256(body).hexdigest() != record.sha256:
        raise _broken(store, key, "is not what was saved")
    return InBucket(store, part.folder, read_index(body))


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

    def fetch(self, chunk: Chunk) -> memoryview:
        return self._bytes[chunk.start : chunk.end]
