"""Segments: files in shared memory that hold one snapshot each and survive the death of the writer.

Layout:

    offset           content
    0                header, one page: magic, capacity, length and CRC-32 of the index
    4096             bytes of the pieces
    4096 + capacity  index

States of a segment:

    state      event                   next
    (none)     create()                empty
    empty      publish(index)          published
    published  invalidate()            empty
    any        the writer dies         unchanged

A writer invalidates a segment before it changes the first byte and publishes it after the last
one. A segment that a dead writer left is therefore either empty or a complete snapshot.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from spotfit.checkpoint.format import SnapshotIndex, decode_index, encode_index
from spotfit.core.errors import IntegrityError
from spotfit.core.units import format_bytes
from spotfit.host.memory import SHARED_MEMORY_DIR, read_memory_usage

_REMEDY = "No action is needed: a restore tries the next copy or checkpoint."

# The header takes a whole page: the pieces behind it are aligned for every dtype.
_PAGE = 4096
_HEAD = struct.Struct("<8sQQI")
_MAGIC = b"spotfit1"
_ZEROS_BYTES = 2**20
_RESERVED_SHARE = 0.05


class ShmSegment:
    """One open segment: a file in shared memory, mapped until `close`, that holds one snapshot.

    The worker that has created it writes it; others map it read-only with `open`.
    """

    def __init__(self, path: Path, memory: mmap.mmap, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._memory = memory

    @classmethod
    def create(cls, path: Path, capacity_bytes: int, index_bytes: int = 2**20) -> Self:
        """Create an empty segment for at most this many bytes of pieces and of an index.

        Both sizes are rounded up to pages. Allocates and maps all of its memory. Raises `OSError`
        if there is not enough or the file exists; if memory is short the file is removed.
        """
        size_bytes = _PAGE + _round_up_to_page(capacity_bytes) + _round_up_to_page(index_bytes)
        with create_allocated_file(path, size_bytes) as file:
            memory = _map_shared(file, size_bytes)
        segment = cls(path, memory, _round_up_to_page(capacity_bytes))
        segment._write_head(0, 0)
        return segment

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a published segment read-only. Raises `IntegrityError` if it is missing or empty.

        Call `close` on the result. Its writer may overwrite it meanwhile: compare `version_stamp`
        before and after reading.
        """
        try:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise IntegrityError(
                f"The snapshot in the memory file {path} cannot be opened: {error}", do=_REMEDY
            ) from error
        if len(memory) < _PAGE:
            raise IntegrityError(
                f"The snapshot in {path} has {len(memory)} bytes, less than its header.", do=_REMEDY
            )
        magic, capacity_bytes, length, _ = _HEAD.unpack_from(memory)
        if magic != _MAGIC or not length:
            raise IntegrityError(
                f"The snapshot in {path} was not completed by its writer.", do=_REMEDY
            )
        return cls(path, memory, capacity_bytes)

    @property
    def payload(self) -> memoryview:
        """View of the mapped bytes of the pieces, `capacity_bytes` long; writable after `create`.

        Release it before `close`, or the memory stays mapped as long as the view exists.
        """
        return memoryview(self._memory)[_PAGE : _PAGE + self.capacity_bytes]

    @property
    def index_bytes(self) -> int:
        """Space in bytes that is reserved for the encoded index: `publish` rejects a larger one."""
        return len(self._memory) - _PAGE - self.capacity_bytes

    @property
    def buffer(self) -> memoryview:
        """View of the whole mapped segment, with header and index, as a peer receives it."""
        return memoryview(self._memory)

    @property
    def version_stamp(self) -> tuple[object, ...]:
        """Header fields, read at each access: a value to compare with one that was read before.

        Equal stamps mean that the contents did not change between the two reads. A stamp changes
        when the writer invalidates the segment or publishes another snapshot.
        """
        return _HEAD.unpack_from(self._memory)

    def invalidate(self) -> None:
        """Mark the segment empty. The writer calls it before it changes the first byte."""
        self._write_head(0, 0)

    def publish(self, index: SnapshotIndex) -> None:
        """Write the index and mark the segment complete. Raises `OSError` if it does not fit.

        The writer calls it after the last byte of the payload. After an error the segment is empty.
        """
        body = encode_index(index)
        offset = _PAGE + self.capacity_bytes
        if len(body) > self.index_bytes:
            raise OSError(
                f"the index takes {len(body)} bytes; {self.path} has room for {self.index_bytes}"
            )
        self._memory[offset : offset + len(body)] = body
        # The header last: a writer that dies before this line leaves an empty segment.
        self._write_head(len(body), zlib.crc32(body))

    def index(self) -> SnapshotIndex:
        """Return the decoded index of the published snapshot. Raises `IntegrityError` if empty.

        The same error is raised while a writer overwrites the segment. Decodes at each call.
        """
        magic, _, length, checksum = _HEAD.unpack_from(self._memory)
        offset = _PAGE + self.capacity_bytes
        body = self._memory[offset : offset + length]
        # The checksum detects a reader that saw the header and index of different saves.
        if magic != _MAGIC or not length or zlib.crc32(body) != checksum:
            raise IntegrityError(
                f"The snapshot in {self.path} was not completed by its writer.", do=_REMEDY
            )
        return decode_index(body, source=f"in {self.path}")

    def close(self) -> None:
        """Unmap the memory. While views of it exist, it is unmapped with the last of them.

        The file stays. Idempotent.
        """
        with suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_head(self, length: int, checksum: int) -> None:
        _HEAD.pack_into(self._memory, 0, _MAGIC, self.capacity_bytes, length, checksum)


@contextmanager
def create_allocated_file(path: Path, size_bytes: int) -> Iterator[int]:
    """Create a file of that size and yield its descriptor, which is open during the block.

    All of its space is reserved at once. For segments and shared rings. Raises `OSError` if there
    is not enough memory or the file exists. After an `OSError` of the reservation or the block the
    new file is removed. A file in /dev/shm must leave 5 % of the memory free: without a limit of
    its own, as in a pod, /dev/shm may be as large as the memory.
    """
    if path.is_relative_to(SHARED_MEMORY_DIR):
        _require_free_memory(size_bytes)
    # O_EXCL: another process may have mapped an existing file, and would see it change.
    binary = getattr(os, "O_BINARY", 0)  # Windows translates line ends otherwise
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | binary, 0o600)
    try:
        reserve_space(file, size_bytes)
        yield file
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def _require_free_memory(size_bytes: int) -> None:
    """Raise `OSError` if allocating that much could end with a kill for lack of memory."""
    usage = read_memory_usage()
    if usage is None:
        return
    free_bytes = (1 - _RESERVED_SHARE) * usage.limit_bytes - usage.used_bytes
    if size_bytes > free_bytes:
        needed, free = format_bytes(size_bytes), format_bytes(max(0.0, free_bytes))
        raise OSError(errno.ENOSPC, f"{needed} are needed, and {free} of the memory may be used")


def reserve_space(file: int, size_bytes: int) -> None:
    """Extend the empty file to that size and allocate its space. Raises `OSError` without enough.

    A sparse file would only run out of space when a mapped page is written, and SIGBUS would kill
    the process.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
        return
    zeros = memoryview(bytes(min(size_bytes, _ZEROS_BYTES)))  # macOS, Windows
    while size_bytes > 0:
        size_bytes -= os.write(file, zeros[:size_bytes])
    os.lseek(file, 0, os.SEEK_SET)


def _map_shared(file: int, size_bytes: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(file, size_bytes)
    # Populating the pages here keeps page faults out of the save.
    return mmap.mmap(file, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _round_up_to_page(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
