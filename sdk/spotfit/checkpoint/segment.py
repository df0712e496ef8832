"""A segment: memory that two processes share, with one snapshot in it, which outlives its writer.

    0                one page: what is here, and whether all of it is
    4096             the bytes of the pieces
    4096 + capacity  the index

A writer marks a segment empty before it changes a byte and full after the last, so whoever opens
one of a dead writer finds a whole snapshot or none.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from spotfit.checkpoint.snapshot import Index, read_index, write_index
from spotfit.core.errors import IntegrityError

_PAGE = 4096
_HEAD = struct.Struct("<8sQQI")
_MAGIC = b"spotfit1"


class Segment:
    """One open segment."""

    def __init__(self, path: Path, memory: mmap.mmap, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._memory = memory

    @classmethod
    def create(cls, path: Path, capacity_bytes: int, index_bytes: int = 2**20) -> Self:
        """A new, empty one for so many bytes of pieces, and of an index, at the most.

        All of its memory is taken at once. Raises `OSError` where there is no room; then nothing is
        left of it.
        """
        size_bytes = _PAGE + _padded(capacity_bytes) + _padded(index_bytes)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size_bytes)
            memory = mmap.mmap(file, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)
        segment = cls(path, memory, _padded(capacity_bytes))
        segment._write_head(0, 0)
        return segment

    @classmethod
    def open(cls, path: Path) -> Self:
        """One that somebody filled, to read from. Raises `IntegrityError` where it is not full."""
        try:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise IntegrityError(f"There is no snapshot in {path}: {error}") from error
        magic, capacity_bytes, length, _ = _HEAD.unpack_from(memory)
        if magic != _MAGIC or not length:
            raise IntegrityError(f"The snapshot in {path} was never finished.")
        return cls(path, memory, capacity_bytes)

    @property
    def bytes(self) -> memoryview:
        """Where the pieces lie."""
        return memoryview(self._memory)[_PAGE : _PAGE + self.capacity_bytes]

    @property
    def index_bytes(self) -> int:
        """How big an index may be."""
        return len(self._memory) - _PAGE - self.capacity_bytes

    @property
    def whole(self) -> memoryview:
        """All of it, as a copy on another machine has to have it."""
        return memoryview(self._memory)

    @property
    def seal(self) -> tuple[object, ...]:
        """As long as it stays the same, so does all that is in it."""
        return _HEAD.unpack_from(self._memory)

    def begin(self) -> None:
        """What is in it is no snapshot any more."""
        self._write_head(0, 0)

    def finish(self, index: Index) -> None:
        """All pieces are in their places. Raises `OSError` where the index has no room."""
        body = write_index(index)
        at = _PAGE + self.capacity_bytes
        if len(body) > self.index_bytes:
            raise OSError(f"the index takes {len(body)} bytes, more than {self.path} has room for")
        self._memory[at : at + len(body)] = body
        self._write_head(len(body), zlib.crc32(body))

    def index(self) -> Index:
        """What is in it. Raises `IntegrityError`."""
        magic, _, length, check = _HEAD.unpack_from(self._memory)
        at = _PAGE + self.capacity_bytes
        body = self._memory[at : at + length]
        if magic != _MAGIC or not length or zlib.crc32(body) != check:
            raise IntegrityError(f"The snapshot in {self.path} was never finished.")
        return read_index(body)

    def close(self) -> None:
        """Let go of the memory; where somebody still looks at it, it goes with the last of them."""
        try:
            self._memory.close()
        except BufferError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _write_head(self, length: int, check: int) -> None:
        _HEAD.pack_into(self._memory, 0, _MAGIC, self.capacity_bytes, length, check)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
