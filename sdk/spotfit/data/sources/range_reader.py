"""Sequential reading of a file of a store, for formats whose headers are all over the file."""

from __future__ import annotations

import io

from spotfit.data.sources.file_source import OpenFile

_WINDOW_BYTES = 8 * 2**20


class RangeReader(io.RawIOBase):
    """A read-only file that fetches 8 MiB at once, from wherever it is read."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0
        self._window = b""
        self._window_start = 0

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
            length = min(max(size, _WINDOW_BYTES), rest)
            self._window_start, offset = self._position, 0
            self._window = self._file.read(self._position, length)
        self._position += size
        return self._window[offset : offset + size]
