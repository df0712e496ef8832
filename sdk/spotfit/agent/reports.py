"""Matched reports on their way to the bucket, in numbered chunks, whoever they were matched for."""

from __future__ import annotations

import msgspec

from spotfit.agent.hub import Told
from spotfit.control.errands import Errands, Insistent
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger

_EVERY_S = 1.0
_CHUNK_BYTES = 1 << 20


class ReportSink:
    """One numbering for an agent's whole life: a chunk is never written over."""

    def __init__(self, ledger: Ledger, errands: Errands) -> None:
        self._ledger = ledger
        self._errands = Insistent(errands)
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._chunk: tuple[int, bytes] | None = None
        self._next = 0
        self._due_at = 0.0

    @property
    def waiting(self) -> bool:
        """Whether anything is not in the bucket yet."""
        return bool(self._lines) or self._chunk is not None

    def add(self, round_number: int, told: Told) -> None:
        """One report of the whole group: rank 0's metrics, and the checkpoint's name."""
        line = b'{"round":%d,"n":%d,"checkpoint":%s,"metrics":%s}' % (
            round_number,
            told.n,
            msgspec.json.encode(told.checkpoint),
            bytes(told.metrics[0]),
        )
        self._lines.append(line)
        self._size_bytes += len(line)

    def flush(self, now: float, *, at_once: bool) -> None:
        """Write what is due, at most one chunk at a time; one that failed is tried again."""
        big = self._size_bytes > _CHUNK_BYTES
        if self._chunk is None and self._lines and (at_once or big or now >= self._due_at):
            self._chunk = (self._next, b"\n".join(self._lines) + b"\n")
            self._next += 1
            self._lines, self._size_bytes = [], 0
            self._due_at = now + _EVERY_S
        if self._chunk is not None:
            self._write(*self._chunk, now)

    def _write(self, n: int, body: bytes, now: float) -> None:
        key = keys.reports(self._ledger.me, n)
        if self._errands.run(key, lambda: self._ledger.store.put(key, body), now) is not None:
            self._chunk = None
