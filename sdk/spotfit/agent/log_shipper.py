"""Shipping of worker output to the bucket as numbered chunks of JSON lines.

Lines are never dropped silently: when the bucket is too slow, the log says how many are missing.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from spotfit.core.clock import Clock
from spotfit.core.codec import encode
from spotfit.core.errors import StoreError, TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.store.api import Store

# Large enough that requests are a small part of the cost, small enough to follow a run by reading.
CHUNK_BYTES = 256 * 1024
# Bounds the memory of the agent while the bucket is unreachable.
MAX_BUFFER_BYTES = 8 * 2**20
# Bounds the number of requests per agent to two a second.
_FLUSH_INTERVAL_S = 0.5
_RETRY_DELAY_S = 0.5


class LogShipper:
    """Buffers lines of the agent's thread and writes them to the bucket in another thread.

    While more than `MAX_BUFFER_BYTES` are buffered, lines are dropped and counted.
    """

    def __init__(
        self,
        store: Store,
        agent_id: AgentId,
        *,
        wall_ms: Callable[[], int],
        clock: Clock,
        flush_interval_s: float = _FLUSH_INTERVAL_S,
    ) -> None:
        self._store = store
        self._agent_id = agent_id
        self._wall_ms = wall_ms
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        self._buffer: collections.deque[bytes] = collections.deque()
        self._buffered_bytes = 0
        self._dropped_lines = 0
        self._written_chunks = 0
        self._is_closing = False
        self._is_writing = False
        """Whether lines were taken off the buffer that are not stored yet."""
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="spotfit-logs", daemon=True)
        self._thread.start()

    def add_line(self, round_number: int, rank: int, stream: str, text: str) -> None:
        """Buffer a line of worker or sidecar output, which a thread writes to the bucket later.

        `rank` is global, or a pseudo-rank such as `keys.SIDECAR_RANK`, with round -1. `stream` is
        "out" or "err". Over 8 MiB of unwritten lines, the line is dropped and counted in the log.
        """
        with self._condition:
            if self._buffered_bytes >= MAX_BUFFER_BYTES:
                self._dropped_lines += 1
                return
            self._report_dropped_lines(round_number, rank)
            self._append(t=self._wall_ms(), round=round_number, rank=rank, stream=stream, text=text)

    @property
    def has_unwritten(self) -> bool:
        """Whether lines are not in the bucket yet; False also if access to it was denied."""
        return (bool(self._buffer) or self._is_writing) and self._thread.is_alive()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Write the buffered lines and a final `{"end": true}`; wait at most `timeout_s` seconds.

        Call it once, after the last `add_line`. Lines that could not be written in time are lost,
        with a warning in the agent's log.
        """
        with self._condition:
            self._report_dropped_lines(-1, -1)
            self._append(end=True)
            self._is_closing = True
            self._condition.notify()
        # Bounded: the machine of a preempted node is taken away whether the bucket answers or not.
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("logs.flush_timed_out", unwritten_bytes=self._buffered_bytes)

    def _report_dropped_lines(self, round_number: int, rank: int) -> None:
        if self._dropped_lines:
            text = (
                f"[spotfit] {self._dropped_lines} lines were dropped here: the bucket was too slow"
            )
            self._append(t=self._wall_ms(), round=round_number, rank=rank, stream="err", text=text)
            self._dropped_lines = 0

    def _append(self, **fields: Any) -> None:
        body = encode(fields) + b"\n"
        self._buffer.append(body)
        self._buffered_bytes += len(body)
        # The writer waits for the first line, then for a full chunk: others need not wake it.
        if len(self._buffer) == 1 or self._buffered_bytes >= CHUNK_BYTES:
            self._condition.notify()

    # --- writer thread -------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._condition:
                self._condition.wait_for(lambda: self._buffer or self._is_closing)
                # Then up to the flush interval for more lines: fewer and larger objects.
                self._condition.wait_for(
                    lambda: self._is_closing or self._buffered_bytes >= CHUNK_BYTES,
                    self._flush_interval_s,
                )
                lines: list[bytes] = []
                size = 0
                while self._buffer and size < CHUNK_BYTES:
                    lines.append(self._buffer.popleft())
                    size += len(lines[-1])
                self._buffered_bytes -= size
                self._is_writing = bool(lines)
                is_last = self._is_closing and not self._buffer
            # Without the lock: `add_line` must not wait for the bucket.
            if lines and not self._try_write(b"".join(lines)):
                return
            self._is_writing = False

    def _try_write(self, chunk: bytes) -> bool:
        """Return True once the chunk is stored, False if access is denied.

        Retries transient errors indefinitely: `close` bounds the total time.
        """
        while True:
            try:
                # Not `create`, which the store sends once only: the key has one writer, and a
                # repeated write stores the same bytes.
                self._store.put(keys.logs(self._agent_id, self._written_chunks), chunk)
            except TransientStoreError as error:
                log.debug("logs.write_retried", reason=str(error))
                self._clock.wait(_RETRY_DELAY_S)
                continue
            except StoreError as error:
                log.error("logs.write_denied", reason=str(error))
                return False
            self._written_chunks += 1
            return True
