"""Renewal of the leader's lease.

The lease is an object in the bucket whose contents change with every renewal. Other agents elect a
new leader if it does not change for `RunTiming.lease_timeout_s` of their own clocks.
"""

from __future__ import annotations

import math

from spotfit.control.background_calls import BackgroundCalls
from spotfit.ledger.run import Ledger

# Short against the lease timeout (20 s): the other agents count the time since the last renewal.
_RETRY_DELAY_S = 0.1


class Lease:
    """Renews the lease of one term of leadership."""

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls, now: float) -> None:
        self._ledger = ledger
        self._background_calls = background_calls
        self._next_renewal_at = now
        self._is_renewing = False

    def renew_soon(self, now: float) -> None:
        """Renew at the next opportunity: the other agents start to use another timeout."""
        self._next_renewal_at = now

    def renew_if_due(self, interval_s: float, now: float) -> None:
        """Start a renewal if one is due, and record the result of the one in progress."""
        # During a renewal its result is collected, however early that is.
        if not self._is_renewing and now < self._next_renewal_at:
            return
        result = self._background_calls.run("lease", self._ledger.renew_lease)
        self._is_renewing = result is None
        if result is not None:
            self._next_renewal_at = now + (interval_s if result.error is None else _RETRY_DELAY_S)

    def next_wake(self) -> float:
        """Time of the next renewal; infinity during a renewal, whose end wakes the event loop."""
        return math.inf if self._is_renewing else self._next_renewal_at
