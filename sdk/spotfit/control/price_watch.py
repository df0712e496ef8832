"""Lists the offers of a backend again at intervals, because prices of spot machines change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from spotfit.control.background_calls import BackgroundCalls
from spotfit.host import log
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Offer
from spotfit.provision.api import Provisioner
from spotfit.provision.offers import list_offers


class PriceWatch:
    """The offers as the backend last listed them. `now` is the owner's `Clock.now()` in seconds."""

    def __init__(self, provisioner: Provisioner, background_calls: BackgroundCalls) -> None:
        self._provisioner = provisioner
        self._background_calls = background_calls
        self._next_at = float("-inf")
        self.listed: tuple[Offer, ...] = ()
        """Empty before the first answer. Prices that could not be read are None."""

    def advance(self, requests: Sequence[GroupRequest], now: float, *, every_s: float) -> None:
        """Start a listing if one is due, and collect its result; does not block.

        `requests` describe the machines. A failed listing is logged, and repeated after `every_s`
        seconds; the last prices are kept.
        """
        if now < self._next_at:
            return
        call = partial(_list_all, self._provisioner, requests)
        result = self._background_calls.run("list offers", call)
        if result is None:
            return
        self._next_at = now + every_s
        if result.error is not None:
            log.warning("offers.not_listed", reason=f"{result.error}")
        else:
            self.listed = result.value


def _list_all(provisioner: Provisioner, requests: Sequence[GroupRequest]) -> tuple[Offer, ...]:
    listings = [list_offers(provisioner, request) for request in requests]
    return tuple(offer for listing in listings for offer in listing.offers)
