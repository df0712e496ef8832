"""Reading snapshots: the shards of all ranks, in memory or in the bucket, chunk by chunk.

`SavedState` is a complete snapshot. Its shards are `ShardReader`s, one per source: segments of this
node (`MemoryShardReader`), the bucket (`StoreShardReader`) and peers
(`peer_store.PeerShardReader`).
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

from spotfit.checkpoint.format import (
    CHUNK_PREFIX,
    Chunk,
    SnapshotIndex,
    TensorPiece,
    decode_index,
    encode_index,
    index_filename,
)
from spotfit.checkpoint.manifest import (
    Manifest,
    describe_missing_manifests,
    manifests_of,
    newest_complete_manifests,
)
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read
from spotfit.store.transfer import FileRecord, compute_content_hash

# Eight requests of up to 32 MiB saturate the network of most nodes, and bound the memory for
# buffers to 256 MiB per reading rank.
MAX_CONCURRENT_READS = 8
EMPTY_BUFFER = memoryview(b"")

ChunkSink = Callable[[int, memoryview], None]
"""Receives bytes of a piece and their offset in the piece, in any order and from any thread."""


class ShardReader(Protocol):
    """One rank's shard of a snapshot."""

    @property
    def index(self) -> SnapshotIndex:
        """The decoded index of this shard: its rank, step, pieces and chunks."""
        ...

    @property
    def is_in_memory(self) -> bool:
        """Whether its bytes are in this node's memory, so that `fetch` copies nothing."""
        ...

    def fetch(self, chunk: Chunk, scratch: memoryview = EMPTY_BUFFER) -> memoryview:
        """Return the bytes of one chunk of this shard, possibly in `scratch`.

        `chunk` is from `index`. Blocks for the transfer and is called from several threads.
        `scratch` is memory that the caller lends, of at least the chunk's size or empty; the result
        is valid until the caller uses `scratch` again. Bytes from the bucket are verified by their
        hash, those from the memory of a node are not. Raises `IntegrityError` if bytes are missing
        or corrupt.
        """
        ...


class ReadRequest(NamedTuple):
    """A piece to read, and the consumer of its bytes."""

    rank: int
    piece: TensorPiece
    sink: ChunkSink


class ChunkRead(NamedTuple):
    """A chunk to fetch, and the requests whose pieces overlap it."""

    chunk_number: int
    """Number among all chunks of the snapshot."""
    reader: ShardReader
    chunk: Chunk
    requests: list[ReadRequest]

    def deliver(self, body: memoryview) -> None:
        """Pass the chunk's bytes `body` to the requests' sinks, each the part within its piece.

        Called by a reader thread after `reader.fetch`. The sinks must not keep `body`, which is
        reused.
        """
        for _, piece, sink in self.requests:
            start, end = max(self.chunk.start, piece.start), min(self.chunk.end, piece.end)
            sink(start - piece.start, body[start - self.chunk.start : end - self.chunk.start])


class SavedState:
    """A complete snapshot: the shards of all ranks, with `name` as the checkpoint's name."""

    def __init__(self, readers: Iterable[ShardReader], name: str = "") -> None:
        """Combine one reader per rank of the world size that has saved, in any order.

        `name` is for messages, for example "checkpoint_000003" or "in memory". Raises
        `IntegrityError` if shards are missing or belong to different saves.
        """
        self.name = name
        self.readers = {reader.index.rank: reader for reader in readers}
        world_sizes = {reader.index.world_size for reader in self.readers.values()}
        # Two saves may be of one step, before and after a restore: hence the save number.
        steps = {reader.index.step for reader in self.readers.values()}
        saves = {reader.index.save_number for reader in self.readers.values()}
        if (
            len(steps) != 1
            or len(saves) != 1
            or len(world_sizes) != 1
            or self.readers.keys() != set(range(*world_sizes))
        ):
            is_one_save = len(steps) == len(saves) == len(world_sizes) == 1
            problem = "is incomplete" if is_one_save else "is not of one save"
            raise IntegrityError(
                f"The snapshot {name} {problem}: it has shards of ranks {sorted(self.readers)}, "
                f"world sizes {sorted(world_sizes)}, steps "
                f"{sorted(steps)} and {len(saves)} saves.",
                do="Use an earlier checkpoint: `spotfit checkpoints ls` lists those of the run.",
            )

    @property
    def indices(self) -> list[SnapshotIndex]:
        """Indices of all shards, in the order of the ranks that have saved them; no I/O."""
        return [self.readers[rank].index for rank in sorted(self.readers)]

    def plan_reads(self, requests: Iterable[ReadRequest]) -> list[ChunkRead]:
        """Return the chunks that hold these pieces, each once, in the order of ranks and offsets.

        Reads nothing, but calls the sinks of empty pieces at once. Each request's rank is the one
        that has saved the piece. Pass the result to `read_chunks` or `read_with_node_group`.
        """
        planned: dict[int, ChunkRead] = {}
        starts = {index.rank: [chunk.start for chunk in index.chunks] for index in self.indices}
        first_numbers, chunk_count = {}, 0
        for index in self.indices:
            first_numbers[index.rank] = chunk_count
            chunk_count += len(index.chunks)
        for request in requests:
            reader, piece = self.readers[request.rank], request.piece
            if not piece.size_bytes:
                request.sink(0, EMPTY_BUFFER)
                continue
            # Chunks are contiguous and sorted: the piece overlaps a range of them.
            first = bisect_right(starts[request.rank], piece.start) - 1
            last = bisect_right(starts[request.rank], piece.end - 1) - 1
            for n in range(first, last + 1):
                number = first_numbers[request.rank] + n
                read = ChunkRead(number, reader, chunk=reader.index.chunks[n], requests=[])
                planned.setdefault(number, read).requests.append(request)
        return [planned[number] for number in sorted(planned)]

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Fetch these pieces and deliver their bytes to the sinks, several chunks concurrently.

        Blocks until all are delivered; the sinks are called on other threads. Raises
        `IntegrityError`, naming the file, if one is missing or corrupt; some bytes may have been
        delivered by then.
        """
        read_chunks(self.plan_reads(requests))


def read_chunks(reads: Iterable[ChunkRead]) -> None:
    """Fetch and deliver these chunks of `SavedState.plan_reads`, eight at a time.

    Blocks until all are delivered; the sinks are called on other threads. The first exception of a
    read or sink is raised and the rest is cancelled: `IntegrityError` if a chunk is missing or
    corrupt; some bytes may have been delivered by then.
    """
    with ThreadPoolExecutor(MAX_CONCURRENT_READS, "spotfit-chunks") as pool:
        futures = submit_reads(reads, pool)
        try:
            for future in futures:
                future.result()
        except BaseException:
            # Leaving the block waits for all tasks; those not started yet would be wasted.
            for future in futures:
                future.cancel()
            raise


def submit_reads(reads: Iterable[ChunkRead], pool: ThreadPoolExecutor) -> list[Future[None]]:
    """Submit one task per chunk to `pool`, which fetches and delivers it; returns without waiting.

    The futures are in the order of `reads`. Their exception is `IntegrityError` if the chunk is
    missing or corrupt.
    """
    # One scratch buffer per thread: allocating 32 MiB per chunk would cost page faults each time.
    thread_state = threading.local()

    def read(chunk_read: ChunkRead) -> None:
        scratch = getattr(thread_state, "scratch", EMPTY_BUFFER)
        if not chunk_read.reader.is_in_memory and len(scratch) < chunk_read.chunk.size_bytes:
            scratch = thread_state.scratch = memoryview(bytearray(chunk_read.chunk.size_bytes))
        chunk_read.deliver(chunk_read.reader.fetch(chunk_read.chunk, scratch))

    return [pool.submit(read, chunk_read) for chunk_read in reads]


def whole_piece_sink(piece: TensorPiece, consume: Callable[[memoryview], None]) -> ChunkSink:
    """Return a sink that calls `consume` once, with all bytes of the piece.

    For consumers that cannot write parts. `consume` is called on the thread that delivers the last
    block; it must not keep the memory. Nothing is copied if the bytes arrive in one block.
    """
    lock = threading.Lock()
    buffer, remaining_bytes = EMPTY_BUFFER, piece.size_bytes

    def sink(offset: int, body: memoryview) -> None:
        nonlocal buffer, remaining_bytes
        # The usual case: pieces of up to a chunk's size arrive in one block.
        if len(body) == piece.size_bytes:
            consume(body)
            return
        with lock:
            buffer = buffer or memoryview(bytearray(piece.size_bytes))
        # Outside of the lock: the blocks of one piece never overlap.
        buffer[offset : offset + len(body)] = body
        with lock:
            remaining_bytes -= len(body)
            is_complete = not remaining_bytes
        if is_complete:
            consume(buffer)

    return sink


# --- in the bucket -------------------------------------------------------------------------------


class StoreShardReader:
    """One rank's shard of a checkpoint in the folder `folder` of a run's store."""

    is_in_memory = False

    def __init__(self, store: Store, folder: str, index: SnapshotIndex) -> None:
        self.index = index
        self._store = store
        self.folder = folder

    def fetch(self, chunk: Chunk, scratch: memoryview = EMPTY_BUFFER) -> memoryview:
        """Download a chunk and compare its size and hash with the index, as `ShardReader.fetch`."""
        return repeat_read(partial(self._fetch_once, chunk, scratch), errors=(IntegrityError,))

    def _fetch_once(self, chunk: Chunk, scratch: memoryview) -> memoryview:
        key = f"{chunk.source_prefix or self.folder}/{chunk.file}"
        try:
            body = self._store.get_memoryview(key, scratch)
        except NotFoundError as error:
            raise _integrity_error(self._store, key, "is missing") from error
        # The size first: hashing is the expensive part.
        if len(body) != chunk.size_bytes or compute_content_hash(body) != chunk.content_hash:
            raise _integrity_error(self._store, key, "is corrupt")
        return body


class SavedStateDescriptor(NamedTuple):
    """An opened state, for other ranks: they need not read manifests and indices themselves."""

    name: str
    shards: tuple[tuple[str, bytes], ...]
    """By rank: the bucket folder ('' for a shard in memory), and the encoded index."""


def describe_saved_state(saved: SavedState) -> SavedStateDescriptor:
    """Return the descriptor that rank 0 broadcasts, so that other ranks need not read indices.

    They pass it to `SnapshotChannel.reopen`. It contains the encoded indices of all ranks.
    """
    readers = [saved.readers[rank] for rank in sorted(saved.readers)]
    shards = [
        (reader.folder if isinstance(reader, StoreShardReader) else "", encode_index(reader.index))
        for reader in readers
    ]
    return SavedStateDescriptor(saved.name, tuple(shards))


def open_described(store: Store, descriptor: SavedStateDescriptor) -> SavedState:
    """Open a checkpoint in the bucket from the descriptor of another rank. Reads nothing.

    `store` is rooted at the run. Not for states in memory, whose shards have no folder.
    """
    readers = [
        StoreShardReader(store, folder, decode_index(body, source=descriptor.name))
        for folder, body in descriptor.shards
    ]
    return SavedState(readers, descriptor.name)


def open_committed_snapshot(store: Store, name: str, *, digest: str = "") -> SavedState | None:
    """Open that committed checkpoint of the run at `store`; None if it holds no snapshot.

    `name` is for example "checkpoint_000003"; None means that it consists of user-defined files.
    `digest` is as in `open_committed`. Reads its manifests and indices, but no chunks. Raises
    `IntegrityError` if its manifests or an index are missing, corrupt or replaced, and
    `ConfigError` if a later version of spotfit wrote it.
    """
    manifests = manifests_of(store, name)
    parts = newest_complete_manifests(manifests, digest)
    if not parts:
        raise IntegrityError(
            f"Checkpoint {name} in {store.url} {describe_missing_manifests(manifests, digest)}",
            do="Use another checkpoint, or restore the folder and its manifests from a backup.",
        )
    if not any(_index_record(part) for part in parts):
        return None

    def open_part(part: Manifest) -> StoreShardReader:
        record = _index_record(part)
        if record is None:
            raise IntegrityError(
                f"Checkpoint {part.name} in {store.url} is incomplete: rank {part.rank} saved no "
                "snapshot to it.",
                do="Use another checkpoint, or restore this one from a backup.",
            )
        index = _read_index(store, f"{part.folder}/{record.name}", record.sha256)
        return StoreShardReader(store, part.folder, index)

    with ThreadPoolExecutor(MAX_CONCURRENT_READS, "spotfit-indices") as pool:
        return SavedState(pool.map(open_part, parts), name)


def open_snapshot_folder(
    store: Store, folder: str, files: Iterable[FileRecord] | None = None
) -> SavedState:
    """Open the snapshot in that folder of `store`, whose manifests may be missing.

    `files` are the records of its files, with which the indices are verified; with None they come
    from manifests of the folder, and without any the indices are not verified. Reads the indices,
    but no chunks. Raises `ConfigError` if the folder holds no snapshot, does not exist or is from a
    later version of spotfit, and `IntegrityError` if an index is missing or corrupt.
    """
    if files is None:
        parts = newest_complete_manifests(manifests_of(store, folder))
        files = [file for part in parts if part.folder == folder for file in part.files]
    # Empty without manifests, as in a folder that was copied by hand: then nothing is verified.
    hashes = {file.name: file.sha256 for file in files}
    if index_filename(0) not in hashes and (
        hashes or not _exists(store, f"{folder}/{index_filename(0)}")
    ):
        raise _no_snapshot_error(store, folder, hashes)

    def open_rank(rank: int) -> StoreShardReader:
        name = index_filename(rank)
        index = _read_index(store, f"{folder}/{name}", hashes.get(name, ""))
        return StoreShardReader(store, folder, index)

    first = open_rank(0)  # the number of ranks is stored in the indices only
    with ThreadPoolExecutor(MAX_CONCURRENT_READS, "spotfit-indices") as pool:
        return SavedState([first, *pool.map(open_rank, range(1, first.index.world_size))], folder)


def _no_snapshot_error(store: Store, folder: str, hashes: Mapping[str, str]) -> ConfigError:
    # After a deletion the folder may still have chunks that later checkpoints reference.
    has_files = bool(hashes) or any(
        info.key.startswith(f"{folder}/") and not info.key.startswith(f"{folder}/{CHUNK_PREFIX}")
        for info in store.list(folder)
    )
    if has_files:
        return ConfigError(
            f"The folder {folder} in {store.url} holds no snapshot of a Checkpointer, only other "
            "files.",
            do="Read its files with `with checkpoint.as_directory() as directory`.",
        )
    return ConfigError(
        f"Checkpoint {folder} does not exist in {store.url}: it was deleted or never saved.",
        do="List the checkpoints of the run with `spotfit checkpoints ls`. num_to_keep limits how "
        "many are kept.",
    )


def _exists(store: Store, key: str) -> bool:
    try:
        store.get_range(key, 0, 1)
    except NotFoundError:
        return False
    return True


def _read_index(store: Store, key: str, sha256: str) -> SnapshotIndex:
    """Read and verify an index; `sha256` is '' if it is unknown."""
    return repeat_read(partial(_read_index_once, store, key, sha256), errors=(IntegrityError,))


def _read_index_once(store: Store, key: str, sha256: str) -> SnapshotIndex:
    try:
        body = store.get(key)
    except NotFoundError as error:
        raise _integrity_error(store, key, "is missing") from error
    if sha256 and hashlib.sha256(body).hexdigest() != sha256:
        raise _integrity_error(store, key, "is corrupt")
    return decode_index(body, source=f"{key} in {store.url}")


def _index_record(part: Manifest) -> FileRecord | None:
    name = index_filename(part.rank)
    return next((file for file in part.files if file.name == name), None)


def _integrity_error(store: Store, key: str, problem: str) -> IntegrityError:
    return IntegrityError(
        f"The checkpoint file {key} in {store.url} {problem}.",
        do="Use another checkpoint, or restore the file from a backup.",
    )


# --- in memory -----------------------------------------------------------------------------------


class MemoryShardReader:
    """One rank's shard in a segment of this node. A published segment needs no verification."""

    is_in_memory = True

    def __init__(self, segment: ShmSegment) -> None:
        self.index = segment.index()
        # The view keeps the memory mapped, also after the segment is closed or its file deleted.
        self._bytes = segment.payload

    def fetch(self, chunk: Chunk, scratch: memoryview = EMPTY_BUFFER) -> memoryview:
        """Return a view of the chunk in the mapped segment; copies nothing, ignores `scratch`."""
        return self._bytes[chunk.start : chunk.end]
