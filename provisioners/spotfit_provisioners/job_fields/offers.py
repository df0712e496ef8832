"""The offer that a group request names, checked against the options of the backend."""

from __future__ import annotations

from collections.abc import Collection

from spotfit.core.errors import ConfigError
from spotfit.model.offer import Offer


def unrentable_offer_error(offer: Offer, reason: str, *, do: str) -> ConfigError:
    """Return the error for an offer that the options of the backend cannot rent."""
    return ConfigError(f"The offer {offer.name} cannot be rented: {reason}", do=do)


def check_offer(
    offer: Offer, *, provisioner: str, region: str = "", machine_types: Collection[str] = ()
) -> None:
    """Raise `ConfigError` unless the offer is one of this backend, region and machine type.

    '' and an empty collection allow every value, as an offer without region or type is allowed.
    """
    do = "Name an offer that `list_offers` returns for these options, or change the options."
    if offer.provisioner != provisioner:
        reason = f"it is one of {offer.provisioner}, and the backend is {provisioner}."
        raise unrentable_offer_error(offer, reason, do=do)
    if region and offer.region not in ("", region):
        reason = f"it is in {offer.region}, and the option region is {region}."
        raise unrentable_offer_error(offer, reason, do=do)
    if machine_types and offer.machine_type not in ("", *machine_types):
        allowed = ", ".join(machine_types)
        reason = f"its machine type is {offer.machine_type}, and the options allow {allowed}."
        raise unrentable_offer_error(offer, reason, do=do)
