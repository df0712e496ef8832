"""Lines of text files, as rows of the column `text`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spotfit.data.sources.file_format import OpenFile
from spotfit.data.sources.line_files import LineContent, is_ascii_compatible, is_utf8

_SCHEMA = pa.schema([("text", pa.string())])
_ENDS = b"\r\x0b\x0c\x1c\x1d\x1e"
"""Bytes beside "\\n" at which `str.splitlines` splits."""
_TO_NEWLINE = bytes.maketrans(_ENDS, b"\n" * len(_ENDS))
_OTHER_ENDS = (b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9")
"""The same beyond ASCII, in UTF-8."""
_VISIBLE = np.ones(256, dtype=bool)
"""Whether a line that begins with this byte is not white space: others begin a white space."""
_VISIBLE[[*range(33), 0xC2, 0xE1, 0xE2, 0xE3]] = False


@dataclass(frozen=True)
class TextParser:
    """Splits text at ends of lines."""

    encoding: str = "utf-8"
    drop_empty_lines: bool = True
    """Lines of white space are also empty."""
    quote: bytes = b""

    @property
    def is_divisible(self) -> bool:
        """Whether ends of lines can be found in the bytes."""
        return is_ascii_compatible(self.encoding)

    @property
    def identity(self) -> str:
        """The options."""
        return f"text {self.encoding} {self.drop_empty_lines}"

    def parse(
        self, body: bytes, file: OpenFile, *, is_first: bool, schema: pa.Schema | None
    ) -> pa.Table:
        """Return one row per line, without its end."""
        lines = body.decode(self.encoding).splitlines()
        if self.drop_empty_lines:
            lines = [line for line in lines if line.strip()]
        return pa.table({"text": pa.array(lines, pa.string())})

    def inspect(self, body: bytes, file: OpenFile, *, is_first: bool) -> LineContent:
        """Return the number of lines without making rows of them."""
        if is_utf8(self.encoding) or (self.is_divisible and body.isascii()):
            body.decode(self.encoding)  # raises an error for invalid bytes
            count = _count_lines(body, drop_empty=self.drop_empty_lines)
            if count is not None:
                return LineContent(_SCHEMA, count)
        return LineContent(_SCHEMA, self.parse(body, file, is_first=is_first, schema=None).num_rows)

    def unify(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return the only column."""
        return _SCHEMA


def _count_lines(body: bytes, *, drop_empty: bool) -> int | None:
    """Return the number of lines of UTF-8, as `str.splitlines` splits it; None if unknown."""
    if not body.isascii() and any(end in body for end in _OTHER_ENDS):
        return None
    if any(end in body for end in _ENDS):
        body = body.replace(b"\r\n", b"\n").translate(_TO_NEWLINE)
    if body and not body.endswith(b"\n"):
        body += b"\n"
    values = np.frombuffer(body, np.uint8)
    (ends,) = np.nonzero(values == ord("\n"))
    if not drop_empty or not len(ends):
        return len(ends)
    begins = np.concatenate([[0], ends[:-1] + 1])
    is_visible = _VISIBLE[values[begins]]
    doubtful = zip(begins[~is_visible].tolist(), ends[~is_visible].tolist(), strict=True)
    visible = sum(1 for begin, end in doubtful if body[begin:end].decode().strip())
    return int(np.count_nonzero(is_visible)) + visible
