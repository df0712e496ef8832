"""The machines for feeders of a run, before anything is rented: offers, networks and price."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from spotfit.client.offer_query import query_offers
from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupRequest
from spotfit.model.spec import FeederSpec
from spotfit.provision.api import Provisioner
from spotfit.provision.feeder_backend import FeederBackendProvisioner, backends_of
from spotfit.provision.offers import highest_default_price


def feeder_request(spec: FeederSpec, workers: GroupRequest) -> GroupRequest:
    """Return a request for one machine for feeders, like `workers`, the one for all workers."""
    return replace(
        workers, num_workers=1, total_workers=1, resources_per_worker=spec.resources, role="feed"
    )


def plan_feeders(
    spec: FeederSpec, provisioner: Provisioner, workers: GroupRequest, *, needs_price: bool
) -> FeederSpec:
    """Return the feeders with their price and, of a backend of their own, offers and networks.

    Nothing is asked for without machines, and if neither the price is needed nor feeders have a
    backend of their own. `workers` is the request for all workers. Raises `ConfigError` if
    that backend has no machines in a network of the workers.
    """
    is_separate = isinstance(provisioner, FeederBackendProvisioner)
    if not spec.max_nodes or not (needs_price or is_separate):
        return spec
    *_, backend = backends_of(provisioner)
    listing = query_offers(provisioner, feeder_request(spec, workers))
    spec = replace(spec, usd_per_hour=highest_default_price(listing, backend.traits))
    if not isinstance(provisioner, FeederBackendProvisioner):
        return spec
    networks = provisioner.networks_of(listing.offers)
    of_workers = {one.network for one in query_offers(provisioner, workers).offers}
    common = tuple(one for one in networks if one in of_workers)
    if not common:
        raise ConfigError(
            f"Feeders(provisioner=…) rents machines in {_names(networks)}, and those of the "
            f"workers are in {_names(sorted(of_workers))}: they cannot connect to each other.",
            do="Name machines for feeders in a region, infrastructure or subnet of the workers.",
        )
    return replace(spec, offers=listing.offers, networks=common)


def _names(networks: Iterable[str]) -> str:
    return ", ".join(one or "a network without a name" for one in networks)
