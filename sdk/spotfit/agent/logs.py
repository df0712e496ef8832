"""The output of this node's workers, kept in the bucket; no line is lost in silence."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from spotfit.core.clock import Clock
from spotfit.core.codec import encode
from spotfit.core.errors import AlreadyExistsError, StoreError, TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.store.api import Store

CHUNK_BYTES = 256 * 1024
HELD_BYTES = 8 * 2**20
_PAUSE_S = 0.5
_AGAIN_S = 0.5


class LogShipper:
    """Takes lines from the agent's thread and writes them in a thread of its own.

    When the bucket is slower than the workers, lines beyond `held_bytes` are dropped, and a line
    says how many.
    """

    def __init__(
        self,
        store: Store,
        agent: AgentId,
        *,
        wall_ms: Callable[[], int],
        clock: Clock,
        pause_s: float = _PAUSE_S,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        self._store = store
        self._agent = agent
        self._wall_ms = wall_ms
        self._clock = clock
        self._pause_s = pause_s
        self._limit_bytes = held_bytes
        self._held: collections.deque[bytes] = collections.deque()
        self._held_bytes = 0
        self._dropped = 0
        self._written = 0
        self._ending = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._ship, name="spotfit-logs", daemon=True)
        self._thread.start()

    def line(self, round_number: int, rank: int, stream: str, text: str) -> None:
        """One line of a worker. `rank` -1 is the callbacks' process. Never blocks."""
        with self._change:
            if self._held_bytes >= self._limit_bytes:
                self._dropped += 1
                return
            self._tell_of_dropped(round_number, rank)
            self._hold(t=self._wall_ms(), round=round_number, rank=rank, stream=stream, text=text)

    def close(self, *, patience_s: float = 10.0) -> None:
        """Write what is left and a last line `{"end": true}`; gives up after `patience_s`."""
        with self._change:
            self._tell_of_dropped(-1, -1)
            self._hold(end=True)
            self._ending = True
            self._change.notify()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.warning("logs.unwritten", held_bytes=self._held_bytes)

    def _tell_of_dropped(self, round_number: int, rank: int) -> None:
        if self._dropped:
            told = f"[spotfit] {self._dropped} lines were dropped here: the bucket was too slow"
            self._hold(t=self._wall_ms(), round=round_number, rank=rank, stream="err", text=told)
            self._dropped = 0

    def _hold(self, **fields: Any) -> None:
        body = encode(fields) + b"\n"
        self._held.append(body)
        self._held_bytes += len(body)
        if len(self._held) == 1 or self._held_bytes >= CHUNK_BYTES:
            self._change.notify()

    # --- in the thread -------------------------------------------------------------------------

    def _ship(self) -> None:
        while True:
            chunk, last = self._next_chunk()
            if chunk and not self._write(chunk):
                return
            if last:
                return

    def _next_chunk(self) -> tuple[bytes, bool]:
        """Wait for a first line, then a moment for more."""
        with self._change:
            self._change.wait_for(lambda: self._held or self._ending)
            self._change.wait_for(
                lambda: self._ending or self._held_bytes >= CHUNK_BYTES, self._pause_s
            )
            lines: list[bytes] = []
            size = 0
            while self._held and size < CHUNK_BYTES:
                lines.append(self._held.popleft())
                size += len(lines[-1])
            self._held_bytes -= size
            return b"".join(lines), self._ending and not self._held

    def _write(self, chunk: bytes) -> bool:
        """True once the chunk is there, however long the bucket is away; False where it refuses."""
        while True:
            try:
                self._store.create(keys.logs(self._agent, self._written), chunk)
            except AlreadyExistsError:
                pass  # our own try, whose answer was lost: nobody else writes this key
            except TransientStoreError as away:
                log.debug("logs.again", why=str(away))
                self._clock.wait(_AGAIN_S)
                continue
            except StoreError as refused:
                log.error("logs.refused", why=str(refused))
                return False
            self._written += 1
            return True
