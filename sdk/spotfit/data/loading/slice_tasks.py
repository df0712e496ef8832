"""Slices that are transformed elsewhere: their addresses, and what the loader needs of feeders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from spotfit.data.order import EpochOrder, OrderSettings


class SliceTask(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The address of a slice."""

    dataset: str
    """Name of the trainer's dataset."""
    epoch: int
    order: OrderSettings
    lane: int
    number: int
    """The slice begins at row `number` * `slice_rows` of the lane."""


@dataclass(eq=False, slots=True)
class PendingSlice:
    """A slice that was requested of feeders; only `feeding.pool` uses its attributes."""

    number: int
    task: SliceTask
    table: pa.Table | None = None
    size_bytes: int = 0
    is_done: bool = False
    """Whether no feeder needs to execute it any more: finished, taken or cancelled."""
    has_failed: bool = False
    """Whether a feeder has returned an exception, or too many were lost: none gets it again."""
    losses: int = 0
    """How many feeders were lost while they executed it."""
    awaited_at: float | None = None
    """When a thread began to wait for it; None: none has."""
    holders: list[Any] = field(default_factory=list)
    """The feeders that it was sent to and that have not answered."""
    sent_at: float = 0.0
    """When it was last sent."""
    queued_again_at: float = 0.0
    """When it was last queued for another feeder because it was late."""


class SliceFeeders(Protocol):
    """The feeders of one dataset, as its loader sees them: `PoolSliceFeeders`."""

    @property
    def has_credit(self) -> bool:
        """Whether the feeders could begin with a further slice, so that it should be requested."""
        ...

    def request(self, order: EpochOrder, lane: int, number: int) -> PendingSlice:
        """Request a slice, which is then passed to `take` or `cancel`; returns at once."""
        ...

    def take(self, pending: PendingSlice) -> pa.Table:
        """Return the rows of a slice, from a feeder or executed in this thread.

        Raises what user code raises.
        """
        ...

    def cancel(self, pending: PendingSlice) -> None:
        """Drop a slice that is not needed any more."""
        ...
