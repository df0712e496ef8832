"""Reads windows of an epoch in threads, within a limit on bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.formats.column_arrays import arrow_array
from spotfit.data.loading.lane_blocks import LaneBlock
from spotfit.data.loading.task_pool import TaskPool
from spotfit.data.order import EpochOrder, UnitPart, Window
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.source import Decode

FETCH_THREADS = 16
"""Requests at a time to buckets. A row group of 1 MiB arrives after 30 to 100 ms."""
_INITIAL_EXPANSION = 2.0
"""Assumed size of windows, relative to that of the manifest, until the first are read."""


class WindowReader:
    """Reads windows in the threads of pools, and counts the bytes that they hold.

    `fetch_pool` sends the requests for units in a bucket, and `pool` decodes their bytes and reads
    other units. Many requests are sent at a time, because each waits for the latency of the bucket.
    Few threads decode: each of them has a heap of its own in pyarrow's memory pool.
    """

    def __init__(
        self,
        manifest: UnitManifest,
        order: EpochOrder,
        *,
        columns: Sequence[str] | None,
        limit_bytes: int,
        pool: TaskPool,
        fetch_pool: TaskPool,
    ) -> None:
        self._manifest = manifest
        self._order = order
        self._limit_bytes = limit_bytes
        self._pool = pool
        self._fetch_pool = fetch_pool
        self._columns = columns
        total_bytes = int(manifest.unit_bytes.sum())
        self._row_bytes = _INITIAL_EXPANSION * total_bytes / max(order.row_count, 1)
        self._held_bytes = 0
        self._unread: set[Future[pa.Table]] = set()
        self._read: deque[tuple[LaneBlock, int]] = deque()
        self._read_bytes = self._read_rows = 0

    def locate(self, lane: int, row: int) -> LaneBlock:
        """Return the window that contains a row of a lane, unread."""
        window = self._order.window_at(lane, row)
        return LaneBlock(lane, window.first, window.end, window.number, parts=window.parts)

    def has_space(self, windows: Collection[LaneBlock]) -> bool:
        """Whether these windows can be requested within the limit on bytes."""
        self._count_read_windows()
        rows = sum(window.rows for window in windows)
        return not rows or self._held_bytes + rows * self._row_bytes <= self._limit_bytes

    def request(self, window: LaneBlock, urgency: int) -> None:
        """Read a window in the threads."""
        parts = [self._read_part(part, urgency) for part in window.parts]
        window.held_bytes = int(window.rows * self._row_bytes)
        self._held_bytes += window.held_bytes
        window.future = self._pool.after(parts, urgency, partial(self._assemble, window))
        self._unread.add(window.future)
        window.future.add_done_callback(self._unread.discard)

    def request_all(self, windows: Iterable[LaneBlock], urgency: int) -> None:
        """Read windows, also beyond the limit, but those one at a time; waits until others are.

        While a window is assembled, it is in memory twice.
        """
        for window in windows:
            if not self.has_space([window]):
                for _ in as_completed(tuple(self._unread)):
                    pass
            self.request(window, urgency)

    def release(self, window: LaneBlock) -> None:
        """Count the bytes of a window no more."""
        self._held_bytes -= window.held_bytes
        window.held_bytes = 0

    def _count_read_windows(self) -> None:
        """Replace estimated sizes by those of the windows that the threads have read."""
        while self._read:
            window, size_bytes = self._read.popleft()
            self._read_bytes += size_bytes
            self._read_rows += window.rows
            self._row_bytes = self._read_bytes / self._read_rows
            if window.held_bytes:
                self._held_bytes += size_bytes - window.held_bytes
                window.held_bytes = size_bytes

    def _read_part(self, part: UnitPart, urgency: int) -> Future[pa.Table]:
        if not self._manifest.is_fetched(part.unit):
            return self._pool.submit(urgency, lambda: self._decode(part, self._fetch(part)))
        fetched = self._fetch_pool.submit(urgency, partial(self._fetch, part))
        return self._pool.after([fetched], urgency, lambda one: self._decode(part, one.pop()))

    def _fetch(self, part: UnitPart) -> Decode:
        with self._error_note(part.unit):
            return self._manifest.fetch_part(*part, self._columns)

    def _decode(self, part: UnitPart, decode: Decode) -> pa.Table:
        unit, first, rows = part
        with self._error_note(unit):
            table = decode()
        if table.num_rows != rows:
            raise ConfigError(
                f"{_unit_name(self._manifest, unit)} has fewer rows than when it was listed: "
                f"{table.num_rows} instead of {rows} from row {first} on.",
                do="Do not change files while a run reads them.",
            )
        return table

    @contextmanager
    def _error_note(self, unit: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"while {_unit_name(self._manifest, unit)} was read")
            raise

    def _assemble(self, block: LaneBlock, tables: list[pa.Table]) -> pa.Table:
        table = concat_blocks(tables)
        window = Window(block.number, block.first, block.rows, tuple(block.parts))
        permutation = self._order.permutation(block.lane, window)
        if permutation is not None:
            table = table.take(arrow_array(permutation))
        self._read.append((block, table.nbytes))
        return table


def _unit_name(manifest: UnitManifest, unit: int) -> str:
    """Return a name of a unit for messages: its number and its file."""
    source = int(manifest.unit_sources[unit])
    units, index = manifest.source_units[source], int(manifest.unit_indices[unit])
    name = f"unit {index}"
    if len(manifest.sources) > 1:
        name += f" of source {source}"
    if units.files:
        file = units.files[int(units.unit_files[index])]
        name += f" ({file.url.rstrip('/')}/{file.key})"
    return name
