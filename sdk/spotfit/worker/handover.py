"""What a Checkpointer asks of whoever it runs in: take a snapshot over, tell of it, find one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from spotfit.checkpoint.saved import Opened, Saved
from spotfit.model.cadence import Odds

IN_MEMORY = "in memory"
"""What a state is called that is no checkpoint yet."""

Fate = Literal["given", "carried", "committed", "lost"]
"""A snapshot is with the agent, in the bucket as far as this rank goes, a checkpoint, or gone."""


class Handover(Protocol):
    """The snapshots of one rank."""

    @property
    def folders(self) -> Sequence[Path]:
        """Where segments may lie: shared memory, and last the disk, should that be full."""
        ...

    def path_for(self, folder: Path) -> Path:
        """A name there for a segment, another one each time."""
        ...

    def give(self, metrics: dict[str, Any], segment: Path, why: str = "") -> int:
        """Hand over the snapshot in that segment, as this rank's next report. Waits for nobody.

        `why` it is saved just now stands in the run's story.

        The segment is not to be touched until the snapshot's fate is another than "given".
        """
        ...

    def withhold(self, metrics: dict[str, Any], why: str) -> None:
        """Take part in the report without a snapshot: there will be no such checkpoint."""
        ...

    def fate(self, n: int) -> Fate:
        """How far that one has come, as far as it is known here."""
        ...

    def wait(self, n: int) -> Fate:
        """How far that one has come, once it is not with the agent any more."""
        ...

    def take_back(self) -> None:
        """All ranks go back to a checkpoint: from what was given so far, and what was in memory
        before, nobody is to go on any more. Waits for nobody; no later life misses it."""
        ...

    def agreed(self, kind: str, value: bytes) -> bytes:
        """Rank 0's value; all ranks have to ask."""
        ...

    @property
    def resizes(self) -> bool:
        """Whether the group may go on with another number of workers."""
        ...

    @property
    def odds(self) -> Odds:
        """What the group has to expect."""
        ...

    def notice(self) -> float | None:
        """In how many seconds the first machine of the group goes; None where none is known to."""
        ...

    def replaced(self) -> bool:
        """Whether whoever goes could be done without at once: only a save is waited for."""
        ...

    def peer_bytes_per_s(self) -> float:
        """How fast this rank's copies go to another machine, while those of all ranks of this one
        do; 0 where none are kept, or none stays that could keep them."""
        ...

    def advice(self) -> tuple[float, str] | None:
        """When a machine of the group was last said to be in danger, and how; None if never."""
        ...

    @property
    def begun_from(self) -> str | None:
        """The checkpoint to go on from."""
        ...

    @property
    def has_snapshots(self) -> bool:
        """Whether any checkpoint is committed that a Checkpointer saved."""
        ...

    def open_memory(self) -> Saved | None:
        """The state in memory to go on from; None if there is none, for any rank.

        Asks all machines that hold parts of it: for one rank to do. Raises `IntegrityError`.
        """
        ...

    def open(self, name: str) -> Saved | None:
        """That checkpoint; None if no Checkpointer saved it. Raises `IntegrityError`."""
        ...

    def mistrust(self, name: str) -> None:
        """That checkpoint cannot be read: no snapshot is to share any of its files."""
        ...

    def reopen(self, opened: Opened) -> Saved:
        """That state, which another rank has opened. Raises `IntegrityError`."""
        ...

    def committed(self) -> Iterator[str]:
        """All checkpoints there are by now, the latest first."""
        ...

    def earlier(self) -> Iterator[str]:
        """Checkpoints before that one, the latest first."""
        ...
