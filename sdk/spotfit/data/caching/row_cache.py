"""Rows of one dataset that are kept: in the memory of this process, and in files of the machine."""

from __future__ import annotations

import math
import threading
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import ErrorCollector
from spotfit.host import log

if TYPE_CHECKING:
    from spotfit.data.caching.cache_files import CacheFiles


class CacheLimits(NamedTuple):
    """Where rows are kept, and how many bytes of them."""

    memory_bytes: int = 0
    """In each process that reads them."""
    disk_bytes: int = 0
    """In files on each machine."""
    directory: str | None = None
    """Of the files; None: a temporary one of the run."""


def cache_limits(
    memory_bytes: float, disk_bytes: float, directory: str | Path | None
) -> CacheLimits:
    """Return the limits of `cache(...)`. Raises `ConfigError`, or `ConfigErrors` with all."""
    errors = ErrorCollector()
    errors.check(lambda: _check_size("memory_bytes", memory_bytes))
    errors.check(lambda: _check_size("disk_bytes", disk_bytes))
    if not memory_bytes and not disk_bytes:
        errors.add(
            ConfigError(
                "cache() keeps no rows without a limit.",
                do="Pass disk_bytes, memory_bytes or both, such as cache(disk_bytes=200 * 2**30).",
            )
        )
    if directory is not None:
        errors.check(lambda: _check_directory(directory, disk_bytes))
    errors.raise_all()
    path = None if directory is None else str(directory)
    return CacheLimits(int(memory_bytes), int(disk_bytes), path)


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, Real) or value is True or value is False:
        raise ConfigTypeError(
            f"cache({name}={value!r}) must be a number of bytes.",
            do=f"Write {name}=20 * 2**30 for 20 GiB.",
        )
    if not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"cache({name}={value!r}) must be a number of bytes from 0 on.",
            do=f"Write {name}=20 * 2**30 for 20 GiB.",
        )


def _check_directory(directory: object, disk_bytes: float) -> None:
    setting = f"cache(directory={str(directory)!r})"
    if not isinstance(directory, str | Path) or not Path(directory).is_absolute():
        raise ConfigError(
            f"{setting} is not the absolute path of a directory.",
            do="Pass a local directory of the machines, such as '/mnt/nvme/cache'. To write the "
            "rows to a bucket once, use materialize(url).",
        )
    if not disk_bytes:
        raise ConfigError(
            f"{setting} writes no files without disk_bytes.",
            do="Pass disk_bytes, the limit on the files in the directory.",
        )


class RowCache:
    """Tables by name. Thread-safe.

    What is kept stays until the end, and further tables are not kept when the limit is reached. In
    a random order, a removal of those that were used least recently would leave fewer tables that
    the next epoch needs.

    Args:
        group: Identifies the rows; the names of other groups are independent.
    """

    def __init__(self, limits: CacheLimits, group: str) -> None:
        self.user_code = threading.Lock()
        """Held while functions of the user are called, which need not be thread-safe."""
        self._memory_bytes = limits.memory_bytes
        self._files = _open_files(limits, group) if limits.disk_bytes else None
        self._lock = threading.Lock()
        self._tables: dict[str, pa.Table] = {}
        self._size_bytes = 0
        self._is_full = False

    def contains(self, name: str) -> bool:
        """Whether `get` probably returns a table."""
        return name in self._tables or (self._files is not None and self._files.contains(name))

    def get(self, name: str) -> pa.Table | None:
        """Return a table, which must not be modified; None if it is not kept."""
        table = self._tables.get(name)
        if table is None and self._files is not None:
            table = self._files.read(name)
            if table is not None:
                self._keep(name, table)
        return table

    def put(self, name: str, table: pa.Table) -> None:
        """Keep a table if there is space."""
        self._keep(name, table)
        if self._files is not None and _can_be_stored(table.schema):
            self._files.write(name, table)

    def _keep(self, name: str, table: pa.Table) -> None:
        if self._size_bytes + table.nbytes <= self._memory_bytes and name not in self._tables:
            table = _without_other_rows(table)
        with self._lock:
            size_bytes = self._size_bytes + table.get_total_buffer_size()
            if name in self._tables:
                return
            if size_bytes <= self._memory_bytes:
                self._tables[name] = table
                self._size_bytes = size_bytes
                return
            is_reported, self._is_full = self._is_full, True
        # Files that have no more space are reported by themselves.
        if self._memory_bytes and self._files is None and not is_reported:
            log.info(
                "data.cache_full",
                place="memory",
                size_bytes=self._size_bytes,
                limit_bytes=self._memory_bytes,
                reason="the limit is reached; other rows are read and computed in every epoch",
            )


def _without_other_rows(table: pa.Table) -> pa.Table:
    """Return a copy if the table is a part of a larger one, whose buffers it keeps in memory."""
    if table.get_total_buffer_size() <= 2 * table.nbytes:
        return table
    return table.take(pa.array(range(table.num_rows), pa.int64()))


def _open_files(limits: CacheLimits, group: str) -> CacheFiles | None:
    try:
        # Not at the top: Windows has no such locks.
        from spotfit.data.caching.cache_directories import open_files

        return open_files(group, directory=limits.directory, limit_bytes=limits.disk_bytes)
    except (ImportError, OSError) as error:
        directory = limits.directory or "a temporary directory"
        log.warning("data.cache_not_written", directory=directory, reason=str(error))
        return None


def _can_be_stored(schema: pa.Schema) -> bool:
    """Whether a file keeps the types: it does not for pickled Python objects."""
    return bool(pa.ipc.read_schema(schema.serialize()).equals(schema))
