"""Tables of the client that the workers read from the run's storage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import AlreadyExistsError, IntegrityError
from spotfit.data.source import SourceUnits
from spotfit.data.sources.tables import TableSource, even_units, table_storage
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.transfer import download_bytes

# The pickle of a dataset is loaded by every worker; a larger table is read when it is needed.
_MAX_PICKLED_BYTES = 2**20


@contextmanager
def tables_stored_in(store: Store) -> Iterator[None]:
    """Pickle large tables as references to objects, which pickling writes to `store`.

    `store` is rooted at the run's directory, and the machines can open its URL. Pickling may raise
    the errors of `Store.create`.
    """
    token = table_storage.set(partial(_store_table, store))
    try:
        yield
    finally:
        table_storage.reset(token)


def _store_table(store: Store, source: TableSource) -> StoredTableSource | None:
    if source.table.nbytes <= _MAX_PICKLED_BYTES:
        return None
    body = _encode(source.table)
    sha256 = hashlib.sha256(body).hexdigest()
    key = f".spotfit/data/{sha256}.arrow"
    with suppress(AlreadyExistsError):  # the key is the hash of the content
        store.create(key, body)
    schema = source.table.schema.serialize().to_pybytes()
    size = source.table.num_rows, source.table.nbytes
    return StoredTableSource(store.url, key, sha256, source.identity, schema, *size)


def _encode(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@dataclass(frozen=True)
class StoredTableSource:
    """The rows of an Arrow IPC file in the run's storage, which is verified by its hash."""

    url: str
    """Address of the run's directory."""
    key: str
    sha256: str
    identity: str
    """That of the table from which the file was written."""
    encoded_schema: bytes
    row_count: int
    size_bytes: int
    """Size of the rows in memory."""

    def list_units(self) -> SourceUnits:
        """Return the units of the table from which the file was written."""
        return even_units(self.row_count, self.size_bytes)

    def schema(self, _units: SourceUnits) -> pa.Schema:
        """Return the table's schema."""
        return pa.ipc.read_schema(pa.py_buffer(self.encoded_schema))

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit; the first call downloads the file.

        Raises `IntegrityError` if the file was modified, and `NotFoundError`.
        """
        table = self._table if columns is None else self._table.select(list(columns))
        return table.slice(int(units.unit_positions[unit]), int(units.unit_rows[unit]))

    @cached_property
    def _table(self) -> pa.Table:
        body = download_bytes(open_store(self.url), self.key)
        if hashlib.sha256(body).hexdigest() != self.sha256:
            raise IntegrityError(
                f"The rows of a dataset in {self.url}/{self.key} were modified.",
                do="Start the run again from the client: it writes the rows again once the object "
                "is deleted.",
            )
        return pa.ipc.open_file(pa.py_buffer(body)).read_all()
