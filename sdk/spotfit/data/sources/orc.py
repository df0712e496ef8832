"""ORC files: a unit is a stripe, which is decoded on its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.orc

from spotfit.core.errors import ConfigError
from spotfit.data.schema import fixed_width_bytes
from spotfit.data.source import Decode
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile
from spotfit.data.sources.range_reader import RangeReader


@dataclass(frozen=True)
class OrcFormat:
    """Reads stripes."""

    identity: str = "orc"

    def inspect(self, file: OpenFile) -> FileContent:
        """Return columns and stripes; pyarrow has the number of rows of a stripe by reading it."""
        reader = _open(file)
        name = reader.schema.names[:1]
        rows = [reader.read_stripe(index, name).num_rows for index in range(reader.nstripes)]
        stored_bytes = file.size_bytes // max(len(rows), 1)
        row_bytes = sum(fixed_width_bytes(field.type) for field in reader.schema)
        units = [
            FileUnit(index, count, max(stored_bytes, int(count * row_bytes)))
            for index, count in enumerate(rows)
        ]
        return FileContent(reader.schema, units)

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch nothing: pyarrow requests the ranges of a stripe while it decodes."""
        return partial(self._read, file, unit, schema)

    def _read(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> pa.Table:
        reader = _open(file)
        names = [name for name in reader.schema.names if name in schema.names]
        if not names:
            return pa.table({})
        return pa.Table.from_batches([reader.read_stripe(unit.position, names)])


def _open(file: OpenFile) -> pyarrow.orc.ORCFile:
    try:
        return pyarrow.orc.ORCFile(pa.PythonFile(RangeReader(file), "r"))
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"{file.path} is not an ORC file: {error}",
            do="Remove the file, or select files with file_extensions.",
        ) from error
