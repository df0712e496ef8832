"""The lease: how a leader's successors know that it lives."""

from __future__ import annotations

import math

from spotfit.control.errands import Errands
from spotfit.ledger.run import Ledger

_AGAIN_S = 0.1


class Lease:
    """One term's. A renewal that failed is made up for soon: others count the seconds."""

    def __init__(self, ledger: Ledger, errands: Errands, now: float) -> None:
        self._ledger = ledger
        self._errands = errands
        self._due_at = now
        self._renewing = False

    def hasten(self, now: float) -> None:
        """The next renewal is due, whenever it was: from now on others count otherwise."""
        self._due_at = now

    def keep(self, every_s: float, now: float) -> None:
        """Renew it where that is due, and take in how that went."""
        if not self._renewing and now < self._due_at:
            return
        done = self._errands.run("lease", self._ledger.renew_lease)
        self._renewing = done is None
        if done is not None:
            self._due_at = now + (every_s if done.error is None else _AGAIN_S)

    def next_wake(self) -> float:
        """When to `keep` it again; a renewal under way wakes by itself."""
        return math.inf if self._renewing else self._due_at
