"""`FeederDirectory`: sends workers the list of feeders, and measures their waits for rows."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.model.topology import FeederAddress
from spotfit.protocol.worker_agent import FeedersChanged

MEASURED_S = 60.0
"""Period over which the share of waiting is measured."""


class _Wait(NamedTuple):
    received_at: float
    rank: int
    waited_s: float
    elapsed_s: float


class FeederDirectory:
    """For one term of leadership. `now` is event-loop time in seconds."""

    def __init__(self) -> None:
        self._feeders: tuple[FeederAddress, ...] = ()
        self._round = -1
        self._sent: dict[int, tuple[FeederAddress, ...]] = {}
        """By rank of the round, the feeders that it was sent."""
        self._measured_since = 0.0
        self._waits: deque[_Wait] = deque()

    def update(
        self, coordinator: RoundCoordinator, feeders: tuple[FeederAddress, ...], now: float
    ) -> list[OutgoingFrame]:
        """Take what the workers of the open round report; return the frames for them.

        Each rank whose training function was called gets the list of feeders once, and again when
        it changes.
        """
        if (coordinator.round, feeders) != (self._round, self._feeders):
            if coordinator.round != self._round:
                self._sent.clear()
            self._round, self._feeders = coordinator.round, feeders
            self._measured_since = now
            self._waits.clear()
        while coordinator.data_waits:
            rank, message = coordinator.data_waits.popleft()
            self._waits.append(_Wait(now, rank, message.waited_s, message.elapsed_s))
        ranks = [
            rank
            for rank in coordinator.running_ranks - coordinator.returned_ranks
            if self._sent.get(rank, ()) != feeders
        ]
        self._sent |= dict.fromkeys(ranks, feeders)
        return [(rank, FeedersChanged(feeders=feeders)) for rank in sorted(ranks)]

    def measured_s(self, feeders: tuple[FeederAddress, ...], now: float) -> float:
        """Return for how long the waits were measured with these feeders."""
        return now - self._measured_since if feeders == self._feeders else 0.0

    def wait_share(self, feeders: tuple[FeederAddress, ...], now: float) -> float | None:
        """Return the share of the last minute for which the rank that waits most has waited.

        None if it was not measured for a minute with these feeders.
        """
        if self.measured_s(feeders, now) < MEASURED_S:
            return None
        # Here, and not only while a round is open: those of the last round may be long ago.
        while self._waits and self._waits[0].received_at < now - MEASURED_S:
            self._waits.popleft()
        waited: dict[int, float] = {}
        elapsed: dict[int, float] = {}
        for one in self._waits:
            waited[one.rank] = waited.get(one.rank, 0.0) + one.waited_s
            elapsed[one.rank] = elapsed.get(one.rank, 0.0) + one.elapsed_s
        # A step takes as long as that of the slowest rank.
        return max((min(waited[rank] / elapsed[rank], 1.0) for rank in waited), default=None)
