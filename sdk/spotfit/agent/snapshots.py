"""Snapshots that workers of this node have handed over, until they have a name and are brought."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from spotfit.agent.carrier import Order
from spotfit.checkpoint.bring import SnapshotParcel, packed
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import decoder
from spotfit.model.wire import Carry, Named, Snapshot, Start

_metrics = decoder(dict)


class Snapshots:
    """What this node's agent keeps of its workers' snapshots: they lie in `folder`.

    The segments of a round stay until a later one has handed over a snapshot of its own.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._round = -1
        self._waiting: dict[tuple[int, int], Snapshot] = {}
        """By rank and number of the report, those that have no name yet."""

    def enter(self, start: Start) -> Start:
        """A worker of that round is about to start: where it may leave its snapshots."""
        if start.round != self._round:
            self._round = start.round
            self._waiting.clear()
        return replace(start, segments=self._folder)

    def keep(self, rank: int, snapshot: Snapshot) -> None:
        """It is whole. Those of earlier rounds are needed no more."""
        self._waiting[rank, snapshot.n] = snapshot
        self._free_others(f"{self._round}-")

    def named(self, rank: int, named: Named) -> Order | None:
        """How to bring the snapshot that has this name now; None if none waits for it."""
        snapshot = self._waiting.pop((rank, named.n), None)
        if snapshot is None or not named.name:
            return None
        metrics = _metrics.decode(named.metrics)
        part = Manifest(named.name, self._round, named.n, rank, named.ranks, metrics, ())
        parcel = packed(SnapshotParcel(snapshot.segment, part, named.base))
        return Order(self._round, rank, Carry(named.n, named.name, parcel), is_snapshot=True)

    def forget(self, rank: int, n: int) -> None:
        """Its report will never be matched."""
        self._waiting.pop((rank, n), None)

    def _free_others(self, begins: str) -> None:
        if not self._folder:
            return
        for segment in Path(self._folder).glob("*.segment"):
            if not segment.name.startswith(begins):
                with suppress(OSError):
                    segment.unlink()
