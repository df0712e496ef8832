"""Snapshots in local mode: brought to a temporary folder at once, and reported from there."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from spotfit.checkpoint.bring import SnapshotParcel, bring_snapshot
from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.saved import Opened, Saved, open_folder, reopened
from spotfit.host import log
from spotfit.model.cadence import Odds
from spotfit.model.metrics import plain_json
from spotfit.model.ranks import Ranks
from spotfit.store.api import Store
from spotfit.store.opening import open_store
from spotfit.worker.handover import Fate

Broadcast = Callable[[Any], Any]
Reported = Callable[[dict[str, Any], Checkpoint], None]


class LocalSnapshots:
    """Those of one process, and of its peers, if a launcher has started any."""

    def __init__(self, ranks: Ranks, broadcast: Broadcast, reported: Reported) -> None:
        self._ranks = ranks
        self._broadcast = broadcast
        self._reported = reported
        self._given = 0
        self._segments = 0
        self._last: str | None = None
        self._brought: list[str] = []

    @property
    def folders(self) -> list[Path]:
        return [self._root / "segments"]

    def path_for(self, folder: Path) -> Path:
        self._segments += 1
        return folder / f"{self._ranks.world_rank}-{self._segments}.segment"

    def give(self, metrics: dict[str, Any], segment: Path, why: str = "") -> int:
        n, self._given = self._given, self._given + 1
        name, rank = f"checkpoint_{n:06d}", self._ranks.world_rank
        ranks = tuple(range(self._ranks.world_size))
        part = Manifest(name, 0, n, rank, ranks, plain_json(metrics), (), why=why)
        bring_snapshot(self._store, SnapshotParcel(str(segment), part, self._last or ""))
        self._last = name
        self._brought.append(name)
        self._reported(metrics, Checkpoint.in_store(self._store, name))
        return n

    def withhold(self, metrics: dict[str, Any], why: str) -> None:
        self._given += 1
        log.warning("checkpoint.withheld", rank=self._ranks.world_rank, why=why)

    def fate(self, n: int) -> Fate:
        return "committed"

    def wait(self, n: int) -> Fate:
        return "committed"

    def take_back(self) -> None:
        """No life comes after this one."""

    def agreed(self, kind: str, value: bytes) -> bytes:
        told: bytes = self._broadcast(value)
        return told

    @property
    def resizes(self) -> bool:
        return False

    @property
    def odds(self) -> Odds:
        return Odds()

    def advice(self) -> tuple[float, str] | None:
        return None

    def notice(self) -> float | None:
        return None

    def replaced(self) -> bool:
        return False

    def peer_bytes_per_s(self) -> float:
        return 0.0

    @property
    def begun_from(self) -> str | None:
        return self._last

    @property
    def has_snapshots(self) -> bool:
        return self._last is not None

    def open_memory(self) -> Saved | None:
        return None

    def open(self, name: str) -> Saved | None:
        return open_folder(self._store, name)

    def mistrust(self, name: str) -> None:
        self._brought = [one for one in self._brought if one != name]
        self._last = None if name == self._last else self._last

    def reopen(self, opened: Opened) -> Saved:
        return reopened(self._store, opened)

    def committed(self) -> Iterator[str]:
        yield from reversed(self._brought)

    def earlier(self) -> Iterator[str]:
        yield from ()

    @cached_property
    def _root(self) -> Path:
        root = Path(self._broadcast(tempfile.mkdtemp(prefix="spotfit-checkpoints-")))
        weakref.finalize(self, _forget, root / "segments", self._ranks.world_rank)
        return root

    @cached_property
    def _store(self) -> Store:
        return open_store(str(self._root))


def _forget(segments: Path, rank: int) -> None:
    """This process goes, and with it what no checkpoint needs."""
    for path in segments.glob(f"{rank}-*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # a peer has some, or there are none
        segments.rmdir()
