"""The offers of a run's backend, listed at the start of a fit."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from spotfit.client.bill_text import LOCAL_PROVISIONER, format_price_range
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.host import log
from spotfit.host.daemon_threads import start_daemon_thread
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Offer
from spotfit.provision.api import Provisioner
from spotfit.provision.offers import OfferListing, list_offers

# The prices are usually cached; a price API that does not respond must not delay the fit for long.
_MAX_WAIT_S = 5.0


class OfferQuery:
    """Lists the offers of a backend in a daemon thread, while the caller uploads the code.

    A backend without `offers` is not queried. Nothing is raised: the offers only describe what the
    run may rent.
    """

    def __init__(self, provisioner: Provisioner, request: GroupRequest) -> None:
        self._provisioner = provisioner
        self._results: SimpleQueue[OfferListing | Exception] | None = None
        if getattr(provisioner, "offers", None) is None:
            return
        results = self._results = SimpleQueue()

        def query() -> None:
            try:
                results.put(list_offers(provisioner, request))
            except Exception as error:  # noqa: BLE001 - each client library has its own errors
                results.put(error)

        # A daemon thread: this process must be able to exit while a price API does not respond.
        start_daemon_thread("spotfit-offers", query)

    def wait(self, timeout_s: float = _MAX_WAIT_S) -> tuple[Offer, ...]:
        """Return the offers, for which it waits at most `timeout_s` seconds; () if it has none.

        Logs the range of prices, each remark of the backend, and why there are no offers. Call it
        once.
        """
        if self._results is None:
            return ()
        try:
            listing = self._results.get(timeout=timeout_s)
        except Empty:
            return _report_failure(f"the backend has not listed them after {timeout_s:g} s")
        if isinstance(listing, Exception):
            return _report_failure(_describe(listing))
        if text := format_price_range(listing.offers):
            log.info("offers.listed", text=f"price of a machine: {text}")
        # Machines of this computer cost nothing: there is nothing to remark.
        for remark in listing.remarks if self._provisioner.name != LOCAL_PROVISIONER else ():
            log.info("offers.remark", text=remark)
        return listing.offers


def query_offers(provisioner: Provisioner, request: GroupRequest) -> OfferListing:
    """Return the offers of a backend, for a fit that cannot start without prices.

    Blocks on the backend's price APIs. Raises `ConfigError` if they cannot be listed.
    """
    try:
        return list_offers(provisioner, request)
    except SpotfitError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The prices of the backend {provisioner.name!r} are unknown: {_describe(error)}",
            do='Set the option prices= of the backend, such as prices={"*": {"spot": 1.2, '
            '"on_demand": 4.1}} in US dollars per hour of a machine.',
        ) from error


def _report_failure(reason: str) -> tuple[Offer, ...]:
    text = "the offers of the backend could not be listed, so that its prices are unknown"
    log.warning("offers.not_listed", text=text, reason=reason)
    return ()


def _describe(error: Exception) -> str:
    is_own = isinstance(error, SpotfitError)
    return str(error) if is_own else f"{type(error).__name__}: {error}"
