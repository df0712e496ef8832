"""A Checkpointer's snapshots, on their way from a worker to its agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from spotfit.checkpoint.saved import AT_ONCE, InMemory, Opened, Saved, open_saved, reopened
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, read_index
from spotfit.core.ids import RunId
from spotfit.host import log
from spotfit.ledger.journal import Journal
from spotfit.model.cadence import Odds
from spotfit.model.holding import Part
from spotfit.model.metrics import metrics_to_json
from spotfit.model.vault import COPY_BYTES_PER_S
from spotfit.model.wire import (
    Carried,
    Committed,
    Damaged,
    Files,
    Gathered,
    Named,
    Snapshot,
    Start,
    TakenBack,
    ToWorker,
    Uncarried,
    Unsaved,
)
from spotfit.store.api import Store
from spotfit.worker.handover import IN_MEMORY, Fate
from spotfit.worker.talk import Talk

if TYPE_CHECKING:
    from spotfit.checkpoint.peer import InPeer
    from spotfit.ship.certificate import Contexts

Found = TypeVar("Found")


class Desk(Protocol):
    """What a session lets its parts do."""

    reports: int
    """How many were made."""

    @property
    def resizes(self) -> bool:
        """Whether the group may go on with another number of workers."""
        ...

    def next_report(self) -> int:
        """The number of a report that is about to be made."""
        ...

    def drain(self) -> None:
        """Take what the agent has told."""
        ...

    def replaced(self) -> bool:
        """Whether whoever goes could be done without at once."""
        ...

    def notice(self) -> float | None:
        """In how many seconds the first machine of the group goes; None where none is known to."""
        ...

    def all_leave(self) -> bool:
        """Whether no machine of the group stays, as far as is known."""
        ...

    def advice(self) -> tuple[float, str] | None:
        """When a machine of the group was last said to be in danger, and how; None if never."""
        ...

    def wait_for(
        self, ready: Callable[[], Found | None], *, what: str | None = None
    ) -> Found | None:
        """What `ready` gives once it gives something."""
        ...

    def gather(self, kind: str, value: bytes = b"") -> bytes:
        """Rank 0's value, once all ranks have come."""
        ...


class Snapshots:
    """The `Handover` of one worker in one round."""

    def __init__(self, desk: Desk, start: Start, talk: Talk, store: Store) -> None:
        self._desk = desk
        self._start = start
        self._talk = talk
        self._store = store
        self._fates: dict[int, Fate] = {}
        self._names: dict[str, int] = {}
        self._segments = 0
        """How many were named."""

    @property
    def folders(self) -> list[Path]:
        spare = Path(self._start.scratch, "segments")
        return [Path(self._start.segments), spare] if self._start.segments else [spare]

    def path_for(self, folder: Path) -> Path:
        self._segments += 1
        return folder / f"{self._start.round}-{self._start.rank}-{self._segments}.segment"

    def give(self, metrics: dict[str, Any], segment: Path, why: str = "") -> int:
        n = self._desk.next_report()
        self._fates[n] = "given"
        self._talk.send(Snapshot(n, msgspec.Raw(metrics_to_json(metrics)), str(segment), why))
        return n

    def withhold(self, metrics: dict[str, Any], why: str) -> None:
        n = self._desk.next_report()
        log.warning("checkpoint.withheld", rank=self._start.rank, why=why)
        self._talk.send(Files(n, msgspec.Raw(metrics_to_json(metrics)), shares=True))
        self._talk.send(Unsaved(n, why))

    def fate(self, n: int) -> Fate:
        self._desk.drain()
        return self._fates[n]

    def wait(self, n: int) -> Fate:
        self._desk.wait_for(
            lambda: None if self._fates[n] == "given" else True, what="an earlier snapshot"
        )
        return self._fates[n]

    def close(self) -> None:
        """Wait until none is with the agent."""
        self._desk.wait_for(
            lambda: None if "given" in self._fates.values() else True, what="its snapshots"
        )

    def take_back(self) -> None:
        self._talk.send(TakenBack(self._desk.reports))

    def agreed(self, kind: str, value: bytes) -> bytes:
        return self._desk.gather(kind, value)

    def take(self, frame: ToWorker) -> bool:
        """Whether the frame was about one of ours, and nobody else has to know."""
        match frame:
            case Named(n=n, name=name) if n in self._fates:
                self._names[name] = n
                if not name:
                    self._lose(n, "the others went on without this rank")
            case Carried(n=n) if n in self._fates:
                if self._fates[n] == "given":  # what others' parts are missing of stays lost
                    self._fates[n] = "carried"
            case Uncarried(n=n, why=why) if n in self._fates:
                self._lose(n, why)
            case Gathered(kind="report", seq=n, missing=missing, why=why) if n in self._fates:
                self._lose(n, why or f"ranks {missing} did not come")
            case Committed(name=name) if name in self._names:
                self._fates[self._names[name]] = "committed"
                return False
            case _:
                return False
        return True

    def _lose(self, n: int, why: str) -> None:
        if self._fates[n] == "lost":
            return
        log.warning("checkpoint.lost", rank=self._start.rank, n=n, why=why.strip().splitlines()[-1])
        self._fates[n] = "lost"

    @property
    def resizes(self) -> bool:
        return self._desk.resizes

    @property
    def odds(self) -> Odds:
        return self._start.odds

    def notice(self) -> float | None:
        return self._desk.notice()

    def replaced(self) -> bool:
        return self._desk.replaced()

    def peer_bytes_per_s(self) -> float:
        if not self._start.copies_to or self._desk.all_leave():
            return 0.0
        return COPY_BYTES_PER_S / self._start.local_world_size  # one vault sends for all of them

    def advice(self) -> tuple[float, str] | None:
        return self._desk.advice()

    # --- what there is to go on from -----------------------------------------------------------

    @property
    def begun_from(self) -> str | None:
        return self._start.checkpoint

    @property
    def has_snapshots(self) -> bool:
        return self._start.snapshots

    def open_memory(self) -> Saved | None:
        if self._start.memory is None:
            return None
        ranks = range(len(self._start.remembered))
        with ThreadPoolExecutor(AT_ONCE, "spotfit-indices") as readers:
            return Saved(readers.map(self._remembered, ranks), IN_MEMORY)

    def _remembered(self, rank: int, index: Index | None = None) -> InMemory | InPeer:
        """What that rank saved: from this machine's memory, else from another's."""
        from spotfit.checkpoint.peer import InPeer  # with TLS: no first step shall wait for it

        path = self._start.remembered[rank]
        if path:
            return InMemory(Segment.open(Path(path)))
        assert self._start.memory is not None
        part = Part(self._start.memory, rank, len(self._start.remembered))
        return InPeer(self._start.elsewhere[rank], part, self._tls.client, index)

    @cached_property
    def _tls(self) -> Contexts:
        from spotfit.ship.certificate import contexts

        return contexts(self._start.secret, RunId(self._start.run_id))

    def open(self, name: str) -> Saved | None:
        return open_saved(self._store, name)

    def mistrust(self, name: str) -> None:
        self._talk.send(Damaged(name))

    def reopen(self, opened: Opened) -> Saved:
        if opened.name != IN_MEMORY:
            return reopened(self._store, opened)
        indices = [read_index(body) for _, body in opened.parts]
        return Saved([self._remembered(index.rank, index) for index in indices], IN_MEMORY)

    def committed(self) -> Iterator[str]:
        names = [one.name for one in Journal(self._store).catch_up().checkpoints]
        yield from dict.fromkeys(reversed(names))

    def earlier(self) -> Iterator[str]:
        names = [one.name for one in Journal(self._store).catch_up().checkpoints]
        begun_from = self.begun_from
        if begun_from in names:
            names = names[: names.index(begun_from)]
        yield from dict.fromkeys(reversed(names))
