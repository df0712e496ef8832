"""Jobs that are replayed on recorded markets to estimate their cost, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from spotfit.model.offer import Market


class ReplayedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """An offer as it is replayed: the price of the listing, the outages of a recording."""

    market: Market
    machines: int
    """For all workers."""
    usd_per_hour: float
    """Of all these machines."""
    slots: int = 1
    """Workers per machine."""
    network: str = ""
    """As in `Offer.network`."""


class ReplayedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of an elastic job, which trains with the machines that are granted."""

    min_workers: int
    max_workers: int
    loss_pause_s: float
    """For which the loss of a machine interrupts all workers."""
    growth_pause_s: float
    """For which further machines interrupt all workers."""


class ReplayedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A training whose machines are rented together from one of the offers at a time.

    Those of an elastic group are rented one by one, also from several offers.
    """

    offers: tuple[ReplayedOffer, ...]
    """Those that the run may use."""
    work_s: float
    """Training time with all machines."""
    changeover_s: float
    """From the request of machines to their first progress, including work that is repeated."""
    deadline_s: float | None = None
    """From the start; None for none."""
    group: ReplayedGroup | None = None
    """The workers of an elastic group; None for a fixed number of machines."""


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job that was started at one time of one recording."""

    recording: str
    usd: float
    finish_s: float | None
    """From the start; None if the training did not finish in several times its training time."""
    is_late: bool
    """Whether the deadline was missed."""


class MarketReplay(Protocol):
    """Recorded markets. The entry point in `spotfit.estimators` returns one for a folder or None.

    It raises `ConfigError` for a folder without recordings.
    """

    @property
    def names(self) -> Sequence[str]:
        """The names of the recordings."""

    @property
    def remarks(self) -> Sequence[str]:
        """A sentence for each file that is not used, for the user."""

    def replay(self, job: ReplayedJob, *, max_decisions: int) -> Sequence[ReplayOutcome]:
        """Replay the job with the production policy, from several times of every recording.

        Deterministic. `max_decisions` bounds the computing time: with a small one a long job starts
        once, and only in some of the recordings.
        """
