"""Sequential reading of a file of a store, for formats whose headers are all over the file."""

from __future__ import annotations

import io
from typing import NamedTuple

from spotfit.data.sources.file_format import OpenFile

_WINDOW_BYTES = 8 * 2**20
"""The largest request, of a file that is read without gaps."""


class _RequestCost(NamedTuple):
    first_bytes: int
    """Length of a request after a gap: a header, and more headers of small records."""
    gap_bytes: int
    """From this length on, a further request takes less time than reading the gap."""


_LOCAL = _RequestCost(4 * 2**10, 64 * 2**10)
_REMOTE = _RequestCost(64 * 2**10, 2**20)


class RangeReader(io.RawIOBase):
    """A read-only file that fetches ranges of 4 KiB to 8 MiB, longer ones where reads are dense.

    Large contents between small reads are skipped.
    """

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0
        self._window = b""
        self._window_start = 0
        self._cost = _REMOTE if file.file.is_remote else _LOCAL
        self._fetch_bytes = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, fewer at the end. Raises `ConfigError` if the file was changed."""
        rest = max(0, self._file.size_bytes - self._position)
        size = rest if size < 0 else min(size, rest)
        offset = self._position - self._window_start
        if offset < 0 or offset + size > len(self._window):
            self._fetch_bytes = self._next_fetch_bytes()
            length = min(max(size, self._fetch_bytes), rest)
            self._window_start, offset = self._position, 0
            self._window = self._file.read(self._position, length)
        self._position += size
        return self._window[offset : offset + size]

    def _next_fetch_bytes(self) -> int:
        gap = self._position - self._window_start - len(self._window)
        if not self._fetch_bytes or not -len(self._window) < gap < self._cost.gap_bytes:
            return self._cost.first_bytes
        return min(2 * self._fetch_bytes, _WINDOW_BYTES)
