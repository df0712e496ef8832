"""The messages between a leader and the process of the user's callbacks."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.core.ids import RunId


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Where the callbacks are. The first frame, sent once; it holds the run's key."""

    storage_url: str
    luggage: dict[str, Any]
    secret: str
    run_id: RunId
    """The run that key is used for."""
    scratch: str = ""

    def __repr__(self) -> str:
        return f"Hello({self.storage_url!r})"


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A report of all ranks, in order of rank, and the name of its committed checkpoint."""

    metrics: tuple[msgspec.Raw, ...]
    checkpoint: str | None = None


class RankTold(msgspec.Struct, frozen=True):
    """How one rank failed, and where its pickled exception lies, if it has one."""

    rank: int
    told: str
    pickle_key: str | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A round failed on these ranks."""

    ranks: tuple[RankTold, ...]


ToAudience = Hello | Reported | Failed


class Heard(msgspec.Struct, frozen=True):
    """One frame was dealt with; `trouble` is the traceback, if a callback raised."""

    trouble: str | None = None
    pickle_key: str | None = None
    """Where what it raised lies, pickled and sealed, if it can be pickled."""
