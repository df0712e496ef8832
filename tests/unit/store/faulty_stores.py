"""Stores in memory whose responses are faulty."""

from __future__ import annotations

from collections import Counter

from spotfit.store.local import MemoryStore


class DamagedResponses(MemoryStore):
    """Cuts the last byte of the first `damaged_reads` responses for every object."""

    def __init__(self, damaged_reads: int = 1) -> None:
        super().__init__()
        self.damaged_reads = damaged_reads
        self.reads: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        body = super().get(key)
        self.reads[key] += 1
        return body[:-1] if self.reads[key] <= self.damaged_reads else body
