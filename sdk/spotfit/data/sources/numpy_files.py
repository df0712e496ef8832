"""NumPy's `.npy` files: a unit is a range of rows, which needs no other part of the file."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy_format

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import column_from_values
from spotfit.data.source import Decode
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile

COLUMN = "data"
UNIT_BYTES = 8 * 2**20
_HEADER_BYTES = 2**12
"""First request; NumPy's headers have about 100 bytes."""


class _Header(NamedTuple):
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    offset: int
    """Where the values begin."""

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True)
class NumpyFormat:
    """Reads arrays whose first dimension are the rows, in the column `data`."""

    identity: str = "npy"

    def inspect(self, file: OpenFile) -> FileContent:
        """Return the type of the array, and ranges of rows."""
        header = _read_header(file)
        rows = header.shape[0]
        step = max(1, UNIT_BYTES // max(header.row_bytes, 1))
        if header.is_fortran and len(header.shape) > 1:
            step = max(rows, 1)  # the values of a row are not next to each other
        units = []
        for first in range(0, rows, step):
            count = min(step, rows - first)
            units.append(FileUnit(first, count, count * header.row_bytes))
        one = np.zeros((1, *header.shape[1:]), header.dtype)
        return FileContent(pa.schema([(COLUMN, column_from_values(one, name=COLUMN).type)]), units)

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch the rows of a unit."""
        if COLUMN not in schema.names:
            return lambda: pa.table({})
        header = _read_header(file)
        start = header.offset + unit.position * header.row_bytes
        body = file.read(start, unit.size_bytes)

        def decode() -> pa.Table:
            values = np.frombuffer(body, header.dtype)
            shape = (unit.rows, *header.shape[1:])
            array = values.reshape(shape[::-1]).T if header.is_fortran else values.reshape(shape)
            return pa.table({COLUMN: column_from_values(array, name=COLUMN)})

        return decode


@lru_cache(maxsize=1024)
def _read_header(file: OpenFile) -> _Header:
    head = file.read(0, min(file.size_bytes, _HEADER_BYTES))
    try:
        return _parse_header(head)
    except (ValueError, EOFError) as error:
        raise ConfigError(
            f"{file.path} is not a .npy file: {error}",
            do="Remove the file, or select files with file_extensions.",
        ) from error


def _parse_header(head: bytes) -> _Header:
    stream = io.BytesIO(head)
    version = npy_format.read_magic(stream)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else _read_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it contains Python objects as a pickle, which are not loaded")
    if not shape:
        raise ValueError("it is a single value, which has no rows")
    return _Header(shape, is_fortran, dtype, stream.tell())


def _read_header_2_0(stream: io.BytesIO) -> Any:
    # Version 3 differs in the encoding of the names of fields only.
    return npy_format.read_array_header_2_0(stream)
