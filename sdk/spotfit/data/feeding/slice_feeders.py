"""The feeders of one dataset, as its loader sees them."""

from __future__ import annotations

import pyarrow as pa

from spotfit.data.feeding.pool import FeederPool
from spotfit.data.loading.slice_tasks import PendingSlice, SliceTask
from spotfit.data.order import EpochOrder


class PoolSliceFeeders:
    """Transforms the slices of the dataset `name` in the feeders of a pool."""

    def __init__(self, pool: FeederPool, name: str) -> None:
        self._pool = pool
        self._name = name

    @property
    def has_credit(self) -> bool:
        """Whether the feeders could begin with a further slice, so that it should be requested."""
        return self._pool.has_credit

    def request(self, order: EpochOrder, lane: int, number: int) -> PendingSlice:
        """Request a slice, which is then passed to `take` or `cancel`; returns at once."""
        return self._pool.request(
            SliceTask(
                dataset=self._name,
                epoch=order.epoch,
                order=order.settings,
                lane=lane,
                number=number,
            )
        )

    def take(self, pending: PendingSlice) -> pa.Table:
        """Return the rows of a slice; see `FeederPool.take`."""
        return self._pool.take(pending)

    def cancel(self, pending: PendingSlice) -> None:
        """Drop a slice that is not needed any more."""
        self._pool.cancel(pending)
