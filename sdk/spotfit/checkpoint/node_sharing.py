"""Restoring with the other ranks of a node: each chunk is fetched once and shared through memory.

Each rank has a *shared ring*: a file in shared memory with a few slots for chunks. It fetches its
assignment of the chunks that several ranks need into its own ring, and copies the others from the
rings of the other ranks. A slot is reused once all ranks that need its chunk have consumed it.
There are no messages and no locks: each rank polls the rings, in which every word has one writer.

Layout of a ring:

    offset  content
    0       header: number and size of the slots, number of ranks; error message of the owner
    4096    one word per slot: 1 + the number (in this ring) of the chunk in it; 0 if empty
    …       per rank, one word per slot: 1 + the number of the chunk it has consumed
    …       slots, page-aligned

States of a slot:

    state     event                                        next
    free      the owner starts to fetch a chunk into it    fetching
    fetching  mark_filled(), after verification            filled
    filled    mark_consumed() of all ranks that need it    free
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

from spotfit.checkpoint.reader import MAX_CONCURRENT_READS, ChunkRead, submit_reads
from spotfit.checkpoint.shm_segment import create_allocated_file
from spotfit.core.clock import Clock
from spotfit.core.errors import IntegrityError
from spotfit.host import log

RING_SUFFIX = ".ring"
"""Suffix of ring files. The agent deletes those that killed workers left."""

_PAGE = 4096
_HEAD = struct.Struct("<8sIIQI")
_MAGIC = b"spotring"
_WORD = struct.Struct("<I")
# Short beside the 30 ms or more that fetching a chunk takes, and cheap: a poll reads a few words.
_POLL_INTERVAL_S = 0.005
# Two threads copy at the memory bandwidth of a core each, while others wait for the network.
_COPY_THREADS = 2
# Enough for a rank to fetch while the others copy. Each slot takes up to 32 MiB of shared memory.
_MAX_SLOTS = 4


class NodeGroup(NamedTuple):
    """The ranks of one node that read together, as seen by one of them."""

    local_index: int
    """Index of this rank in the lists below."""
    ring_paths: Sequence[Path]
    chunk_masks: Sequence[int]
    """Chunks that each rank needs: bit n is set for chunk number n."""


def needed_chunk_mask(reads: Sequence[ChunkRead]) -> int:
    """Return the mask of the chunks that this rank must fetch: those not in this node's memory.

    Bit n is set for `ChunkRead.chunk_number` n, the same number on all ranks. 0 means that the rank
    fetches nothing.
    """
    # An int as a bit set: thousands of chunks of thousands of ranks are gathered.
    mask = 0
    for read in reads:
        if not read.reader.is_in_memory:
            mask |= 1 << read.chunk_number
    return mask


@contextmanager
def create_shared_ring(
    path: Path, *, local_world_size: int, chunk_count: int, slot_bytes: int
) -> Iterator[bool]:
    """Create this rank's ring for the time of the block; yields False if memory is short.

    `path` is a new file in shared memory, which the node's other ranks map; it is removed after the
    block. The ring has up to four slots of `slot_bytes`, the size of the largest chunk;
    `chunk_count` is the number of chunks that this rank reads. Without a ring, all ranks of the
    node read alone, which is logged as a warning.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        SharedRing.create(
            path,
            local_world_size=local_world_size,
            slots=min(_MAX_SLOTS, max(1, chunk_count)),
            slot_bytes=slot_bytes,
        )
    except OSError as error:
        log.warning(
            "checkpoint.node_sharing_unavailable",
            path=str(path),
            reason=str(error),
            fallback="each rank of this node reads all of its chunks",
        )
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def read_with_node_group(reads: Sequence[ChunkRead], group: NodeGroup, clock: Clock) -> None:
    """Fetch and deliver these chunks, sharing those that other ranks of the group need as well.

    `reads` are this rank's, from `SavedState.plan_reads`. A collective: all ranks of the group must
    call it, and keep their rings until all have returned. Blocks until this rank's chunks are
    delivered. Raises `IntegrityError` if a chunk is missing or corrupt: on the rank that finds it,
    and on the other ranks that are still reading.
    """
    assignments = _assign_chunks(group.chunk_masks)
    shared_numbers = {number for numbers in assignments for number in numbers}
    exclusive = [read for read in reads if read.chunk_number not in shared_numbers]
    shared = {read.chunk_number: read for read in reads if read.chunk_number in shared_numbers}
    with (
        # Two pools: copies free the slots of other ranks and must not queue behind fetches.
        ThreadPoolExecutor(MAX_CONCURRENT_READS, "spotfit-chunks") as fetch_pool,
        ThreadPoolExecutor(_COPY_THREADS, "spotfit-ring") as copy_pool,
    ):
        group_read = _NodeGroupRead(
            group,
            assignments=assignments,
            reads=shared,
            fetch_pool=fetch_pool,
            copy_pool=copy_pool,
        )
        group_read.run(submit_reads(exclusive, fetch_pool), clock)


def _assign_chunks(chunk_masks: Sequence[int]) -> list[list[int]]:
    """Assign each chunk that several ranks need to the one of them with the fewest so far.

    Depends on the masks only, so that all ranks compute the same assignment.
    """
    assignments: list[list[int]] = [[] for _ in chunk_masks]
    for number in range(max(chunk_masks, default=0).bit_length()):
        consumers = [index for index, mask in enumerate(chunk_masks) if mask >> number & 1]
        if len(consumers) > 1:
            assignments[min(consumers, key=lambda index: len(assignments[index]))].append(number)
    return assignments


class _NodeGroupRead:
    """One rank's part of a shared read."""

    def __init__(
        self,
        group: NodeGroup,
        *,
        assignments: Sequence[Sequence[int]],
        reads: Mapping[int, ChunkRead],
        fetch_pool: ThreadPoolExecutor,
        copy_pool: ThreadPoolExecutor,
    ) -> None:
        self._local_index, _, self._chunk_masks = group
        self._rings = [SharedRing.open(path) for path in group.ring_paths]
        self._own_ring = self._rings[self._local_index]
        self._own_numbers = assignments[self._local_index]
        self._reads = reads
        self._fetch_pool = fetch_pool
        self._copy_pool = copy_pool
        self._fetch_count = 0
        self._pending_copies = [
            deque(
                (n, number)
                for n, number in enumerate(numbers)
                if index != self._local_index and number in reads
            )
            for index, numbers in enumerate(assignments)
        ]

    def run(self, futures: Sequence[Future[None]], clock: Clock) -> None:
        """Run until all shared chunks are delivered and `futures` are done.

        An error is written to this rank's ring, which makes the other ranks fail as well.
        """
        pending = set(futures)
        try:
            while (
                pending or self._fetch_count < len(self._own_numbers) or any(self._pending_copies)
            ):
                self._raise_group_errors()
                pending |= {*self._start_fetches(), *self._start_copies()}
                if not pending:
                    clock.wait(_POLL_INTERVAL_S)  # only other ranks have work
                    continue
                done, pending = wait(pending, _POLL_INTERVAL_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException as error:
            for future in pending:
                future.cancel()
            # Never '', which means that the owner has not failed.
            self._own_ring.error = str(error) or repr(error)
            raise
        finally:
            wait(pending)  # running copies still access the rings
            for ring in self._rings:
                ring.close()

    def _raise_group_errors(self) -> None:
        for ring in self._rings:
            if ring.error:
                raise IntegrityError(ring.error)

    def _start_fetches(self) -> list[Future[None]]:
        def fetch_chunk(n: int, chunk_read: ChunkRead) -> None:
            slot = self._own_ring.slot_for(n)
            body = chunk_read.reader.fetch(chunk_read.chunk, slot)
            if body.obj is not slot.obj:  # the store returned a buffer of its own
                slot[: len(body)] = body
            # Before the delivery to this rank: the other ranks copy at the same time.
            self._own_ring.mark_filled(n)
            chunk_read.deliver(body)
            # After it: the slot is overwritten as soon as all ranks have consumed the chunk.
            self._own_ring.mark_consumed(self._local_index, n)

        started = []
        numbers = self._own_numbers
        while self._fetch_count < len(numbers) and self._is_slot_free(self._fetch_count):
            read = self._reads[numbers[self._fetch_count]]
            started.append(self._fetch_pool.submit(fetch_chunk, self._fetch_count, read))
            self._fetch_count += 1
        return started

    def _is_slot_free(self, n: int) -> bool:
        """Whether all ranks have consumed the previous chunk in the slot of this ring's chunk n."""
        previous = n - self._own_ring.slots
        if previous < 0:
            return True
        number = self._own_numbers[previous]
        return all(
            self._own_ring.is_consumed(index, previous)
            for index, mask in enumerate(self._chunk_masks)
            if mask >> number & 1
        )

    def _start_copies(self) -> list[Future[None]]:
        def copy_chunk(ring: SharedRing, n: int, chunk_read: ChunkRead) -> None:
            chunk_read.deliver(ring.slot_for(n)[: chunk_read.chunk.size_bytes])
            ring.mark_consumed(self._local_index, n)

        started = []
        for ring, copies in zip(self._rings, self._pending_copies, strict=True):
            # The owner fills its slots in this order, so that only the first can be ready.
            while copies and ring.is_filled(copies[0][0]):
                n, number = copies.popleft()
                started.append(self._copy_pool.submit(copy_chunk, ring, n, self._reads[number]))
        return started


class SharedRing:
    """One rank's slots for chunks, mapped by all ranks of its node during a restore.

    n numbers the chunks that pass through this ring from 0, in the order in which its owner fetches
    them. Chunk n uses slot n modulo `slots`. Nothing blocks: ranks poll.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        _, self.slots, self._local_world_size, self._slot_bytes, _ = _HEAD.unpack_from(memory)
        self._memory = memory
        self._slots_offset = _PAGE + _word_area_bytes(self.slots, self._local_world_size)

    @classmethod
    def create(cls, path: Path, *, local_world_size: int, slots: int, slot_bytes: int) -> None:
        """Create the file of an empty ring at `path`, with memory allocated; call `open` to map it.

        `local_world_size` is the number of ranks on this node. Raises `OSError` if memory is short
        or the file exists; if memory is short the file is removed.
        """
        size_bytes = _PAGE + _word_area_bytes(slots, local_world_size) + slots * slot_bytes
        with create_allocated_file(path, size_bytes) as file:
            os.pwrite(file, _HEAD.pack(_MAGIC, slots, local_world_size, slot_bytes, 0), 0)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the ring that this or another rank of the node has created at `path`.

        Call `close` on the result. Raises `OSError` if there is no such file.
        """
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    @property
    def error(self) -> str:
        """Why the ring's owner failed, for the other ranks; '' if it has not.

        The owner sets it once, and the others then fail with the same message. Long messages are
        cut to fit into 4 KiB.
        """
        length = _HEAD.unpack_from(self._memory)[-1]
        return self._memory[_HEAD.size : _HEAD.size + length].decode(errors="replace")

    @error.setter
    def error(self, text: str) -> None:
        body = text.encode()[: _PAGE - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(body)] = body
        # The length last: until then readers see no error rather than half of the text.
        _WORD.pack_into(self._memory, _HEAD.size - _WORD.size, len(body))

    def slot_for(self, n: int) -> memoryview:
        """Return the memory of chunk n's slot: all `slot_bytes` of it, also for a smaller chunk.

        The ring's owner may write there once all ranks that need the chunk before it in this slot
        have consumed that; other ranks may read once `is_filled(n)`.
        """
        offset = self._slots_offset + n % self.slots * self._slot_bytes
        return memoryview(self._memory)[offset : offset + self._slot_bytes]

    def mark_filled(self, n: int) -> None:
        """Mark chunk n as fetched and verified, which allows the other ranks to copy it.

        Only the ring's owner calls it, after it has written the slot.
        """
        self._write_word(0, n)

    def is_filled(self, n: int) -> bool:
        """Whether the slot of chunk n holds that chunk, completely.

        False before it is filled, and again once the slot is filled with a later chunk.
        """
        return self._word_matches(0, n)

    def mark_consumed(self, local_index: int, n: int) -> None:
        """Mark chunk `n` of this ring as no longer needed by that rank.

        Every rank that needs the chunk calls it once after it has delivered the bytes, the owner
        included; then the owner reuses the slot. `local_index` is the rank's index in the
        `NodeGroup`. Chunks of one slot are consumed in order.
        """
        self._write_word(1 + local_index, n)

    def is_consumed(self, local_index: int, n: int) -> bool:
        """Whether chunk n is the last one of its slot that the rank `local_index` has consumed.

        The owner asks for every rank that needs the chunk before it reuses the slot. `local_index`
        is the rank's index in the `NodeGroup`. False again once the rank has consumed a later chunk
        of the slot.
        """
        return self._word_matches(1 + local_index, n)

    def close(self) -> None:
        """Unmap the memory. While views of it exist, it is unmapped with the last of them.

        The file stays until `create_shared_ring` of its owner removes it. Idempotent.
        """
        with suppress(BufferError):
            self._memory.close()

    def _word_offset(self, row: int, n: int) -> int:
        offset: int = _PAGE + _WORD.size * (row * self.slots + n % self.slots)
        return offset

    def _write_word(self, row: int, n: int) -> None:
        # An aligned word of 4 bytes is written at once: readers see the old or the new number.
        _WORD.pack_into(self._memory, self._word_offset(row, n), n + 1)

    def _word_matches(self, row: int, n: int) -> bool:
        word = _WORD.unpack_from(self._memory, self._word_offset(row, n))[0]
        return bool(word == n + 1)


def _word_area_bytes(slots: int, local_world_size: int) -> int:
    size_bytes = (1 + local_world_size) * slots * _WORD.size
    return -(-size_bytes // _PAGE) * _PAGE
