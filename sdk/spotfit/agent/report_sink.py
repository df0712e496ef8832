"""`ReportSink`: writes matched reports to the bucket as numbered chunks of JSON lines."""

from __future__ import annotations

from functools import partial

import msgspec

from spotfit.agent.report_matching import MatchedReport
from spotfit.control.background_calls import BackgroundCalls, RetryingCalls
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger

# One request a second per run, however often the training function reports.
_FLUSH_INTERVAL_S = 1.0
_CHUNK_BYTES = 1 << 20


class ReportSink:
    """Buffers and writes the reports that were matched while this agent led.

    The chunk number grows over all terms of this agent, so that no chunk is overwritten.
    """

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls) -> None:
        self._ledger = ledger
        self._retrying_calls = RetryingCalls(background_calls)
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._pending_chunk: tuple[int, bytes] | None = None
        self._next_chunk_number = 0
        self._next_flush_at = 0.0

    @property
    def has_unwritten(self) -> bool:
        """Whether any report is not in the bucket yet."""
        return bool(self._lines) or self._pending_chunk is not None

    def add(self, round_number: int, report: MatchedReport) -> None:
        """Buffer rank 0's metrics and the checkpoint name of a matched report."""
        # Formatted by hand: the metrics are JSON already, and need not be decoded to be encoded.
        line = b'{"round":%d,"report_index":%d,"checkpoint":%s,"metrics":%s}' % (
            round_number,
            report.report_index,
            msgspec.json.encode(report.checkpoint),
            bytes(report.metrics_by_rank[0]),
        )
        self._lines.append(line)
        self._size_bytes += len(line)

    def flush(self, now: float, *, force: bool) -> None:
        """Write a chunk if one is due or `force` is set; later calls retry a failed write."""
        is_due = force or self._size_bytes > _CHUNK_BYTES or now >= self._next_flush_at
        # One chunk at a time: a later chunk must not be stored without the earlier ones.
        if self._pending_chunk is None and self._lines and is_due:
            self._pending_chunk = (self._next_chunk_number, b"\n".join(self._lines) + b"\n")
            self._next_chunk_number += 1
            self._lines, self._size_bytes = [], 0
            self._next_flush_at = now + _FLUSH_INTERVAL_S
        if self._pending_chunk is not None:
            chunk_number, body = self._pending_chunk
            key = keys.reports(self._ledger.agent_id, chunk_number)
            # Idempotent: a retry after a lost answer writes the same bytes under the same key.
            write = partial(self._ledger.store.put, key, body)
            if self._retrying_calls.run(key, write, now) is not None:
                self._pending_chunk = None
