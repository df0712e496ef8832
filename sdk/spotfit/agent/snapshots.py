"""Snapshots that workers of this node have handed over, until they have a name and are brought."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from msgspec.structs import replace

from spotfit.agent.carrier import Order
from spotfit.agent.copies import Copy, Due, Shelf
from spotfit.checkpoint.bring import SnapshotParcel, packed
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.relay import LANE
from spotfit.checkpoint.segment import Segment
from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.model.holding import Part, State
from spotfit.model.wire import Carry, Named, Snapshot, Start

_metrics = decoder(dict)


class Snapshots:
    """What this node's agent keeps of its workers' snapshots: they lie in `folder`.

    The segments of a round stay until all ranks of a later one have handed over a snapshot of
    theirs: until then they may be all there is to go on from.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._folders = {Path(folder)} if folder else set()
        """Wherever segments were left: where there is no room in memory they lie on the disk."""
        self.shelf = Shelf(Path(folder, "copies"))
        """Copies of a peer's segments."""
        self.copy: Callable[[Due], None] | None = None
        """Has a segment of ours kept by another machine's vault, too."""
        self._copies_to = ""
        self._copied: dict[int, Due] = {}
        """By rank, what was to be copied last."""
        self._ranks: tuple[int, ...] = ()
        self._found: dict[Part, Path] = {}
        self._round = -1
        self._waiting: dict[tuple[int, int], Snapshot] = {}
        """By rank and number of the report, those that have no name yet."""

    def enter(self, start: Start) -> Start:
        """A worker of that round is about to start: where it may leave its snapshots."""
        if start.round != self._round:
            self._round = start.round
            self._waiting.clear()
            self._copied.clear()
            self._free_others(self._left(f"*{LANE}"))  # whoever read through them is gone
        self._copies_to = start.copies_to
        first = start.rank - start.local_rank
        self._ranks = tuple(range(first, first + start.local_world_size))
        remembered = self._remembered(start) if start.memory is not None else ()
        return replace(start, segments=self._folder, remembered=remembered)

    def find(self, part: Part) -> Path | None:
        """Where that part lies, of those that were held at the last look."""
        return self._found.get(part)

    def held(self) -> tuple[Part, ...]:
        """What is whole of all that workers have left here, read anew."""
        places = [*self.shelf.lying.values(), *self._segments()]
        found = sorted(filter(None, map(_found_in, places)), key=itemgetter(0))
        self._found = {part: path for _, part, path in found}  # of one step the last save counts
        return tuple(sorted(self._found))

    def keep(self, rank: int, snapshot: Snapshot) -> None:
        """It is whole."""
        self._waiting[rank, snapshot.n] = snapshot
        self._folders.add(Path(snapshot.segment).parent)

    def named(self, rank: int, named: Named) -> Order | None:
        """How to bring the snapshot that has this name now; None if none waits for it.

        All ranks have made theirs: those of earlier rounds are needed no more.
        """
        snapshot = self._waiting.pop((rank, named.n), None)
        if snapshot is None or not named.name:
            return None
        self._free_others(self._segments())
        self._copy(Copy(self._round, named.n, rank), Path(snapshot.segment))
        metrics = _metrics.decode(named.metrics)
        part = Manifest(
            named.name, self._round, named.n, rank, named.ranks, metrics, (), why=snapshot.why
        )
        parcel = packed(SnapshotParcel(snapshot.segment, part, named.base))
        return Order(self._round, rank, Carry(named.n, named.name, parcel), is_snapshot=True)

    def copy_to(self, vault: str) -> None:
        """Have copies kept there from now on, and of what was last copied elsewhere, too."""
        self._copies_to = vault
        for due in self._copied.values():
            self._send(due._replace(to=vault))

    def _copy(self, copy: Copy, segment: Path) -> None:
        """A segment that is gone by now needs none."""
        with suppress(IntegrityError), Segment.open(segment) as opened:
            self._copied[copy.rank] = Due(copy, segment, opened.seal, self._ranks, self._copies_to)
            self._send(self._copied[copy.rank])

    def _send(self, due: Due) -> None:
        if self.copy is not None and due.to:
            self.copy(due)

    def forget(self, rank: int, n: int) -> None:
        """Its report will never be matched."""
        self._waiting.pop((rank, n), None)

    def take_back(self, before: int) -> None:
        """The training has gone back behind what was saved before that report: nobody is to go on
        from that, nor from what rounds before have left.

        Workers have freed their own segments. All ranks say so, so all machines hear of it.
        """
        self.shelf.take_back(Copy(self._round, before, 0))
        self._free_others(self._segments())
        self._copied = {
            rank: due for rank, due in self._copied.items() if due.copy.report >= before
        }

    def _free_others(self, files: Iterable[Path]) -> None:
        """Those of other rounds."""
        for path in files:
            if not path.name.startswith(f"{self._round}-"):
                with suppress(OSError):
                    path.unlink()

    def _segments(self) -> list[Path]:
        return self._left("*.segment")

    def _left(self, pattern: str) -> list[Path]:
        return [path for folder in self._folders for path in folder.glob(pattern)]

    def _remembered(self, start: Start) -> tuple[str, ...]:
        """The segments of the state to begin from, by rank; empty for what lies elsewhere."""
        found = {
            part.rank: str(path) for part, path in self._found.items() if part.state == start.memory
        }
        return tuple(
            "" if vault else found.get(rank, "gone") for rank, vault in enumerate(start.elsewhere)
        )


def _found_in(path: Path) -> tuple[int, Part, Path] | None:
    """The number of the save in that segment, and what it is; None where its writer died before
    it was whole."""
    try:
        with Segment.open(path) as segment:
            index = segment.index()
    except IntegrityError:
        return None
    number = int(path.name.partition("-")[0])
    return index.save, Part(State(number, index.step), index.rank, index.world_size), path
