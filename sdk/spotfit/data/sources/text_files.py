"""Lines of text files, as rows of the column `text`."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from spotfit.data.sources.file_source import OpenFile
from spotfit.data.sources.line_files import is_ascii_compatible

_SCHEMA = pa.schema([("text", pa.string())])


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

    def unify(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return the only column."""
        return _SCHEMA
