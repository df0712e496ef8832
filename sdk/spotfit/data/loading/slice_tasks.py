"""Slices that are transformed elsewhere: their addresses, and what the loader needs of feeders."""

from __future__ import annotations

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


class PendingSlice:
    """A slice that was requested of a feeders; only `feeding.pool` uses its attributes."""

    __slots__ = (
        "awaited_at",
        "has_failed",
        "holders",
        "is_done",
        "losses",
        "number",
        "queued_again_at",
        "sent_at",
        "size_bytes",
        "table",
        "task",
    )

    def __init__(self, number: int, task: SliceTask) -> None:
        self.number = number
        self.task = task
        self.table: pa.Table | None = None
        self.size_bytes = 0
        self.is_done = False
        """Whether no feeder needs to execute it any more: finished, taken or cancelled."""
        self.has_failed = False
        """Whether a feeder has returned an exception, or too many were lost: none gets it again."""
        self.losses = 0
        """How many feeders were lost while they executed it."""
        self.awaited_at = 0.0
        """When a thread began to wait for it."""
        self.holders: list[Any] = []
        """The feeders that it was sent to and that have not answered."""
        self.sent_at = 0.0
        """When it was last sent."""
        self.queued_again_at = 0.0
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
