"""The offers of SkyPilot: spot and on-demand machines in each allowed infrastructure."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing, offer_name
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.prices.given import given_price
from spotfit_provisioners.skypilot import catalog
from spotfit_provisioners.skypilot.options import SkyPilotOptions

BACKEND = "skypilot"


class SkyPilotCatalog(NamedTuple):
    """A catalog file of this user, or why there is none."""

    rows: list[catalog.Row]
    source: str = ""
    as_of_s: float = 0.0
    problem: str = ""


def allowed_offers(options: SkyPilotOptions) -> tuple[Offer, ...]:
    """Return a spot and an on-demand offer for each entry of `infra`, without prices."""
    return tuple(
        Offer(
            name=offer_name(BACKEND, market, infra, options.instance_type),
            provisioner=BACKEND,
            market=market,
            region=_split(infra)[1],
            zone=_split(infra)[2],
            machine_type=options.instance_type,
            network=infra,
            options={"infra": infra} if infra else {},
        )
        for market in Market
        for infra in options.infra or ("",)
    )


def default_offer_name(options: SkyPilotOptions, network: str = "") -> str:
    """Return the name of the offer that is rented without an offer in the request.

    `network` is the entry of `infra` of the group, '' if SkyPilot chooses among all. The result is
    '' if SkyPilot also chooses the entry or the market.
    """
    markets = {"only": Market.SPOT, "never": Market.ON_DEMAND}
    entries = (network,) if network else options.infra or ("",)
    if options.spot not in markets or len(entries) > 1:
        return ""
    name = offer_name(BACKEND, markets[options.spot], *entries, options.instance_type)
    # The machines of an earlier fit may be in an infrastructure that is not allowed any more.
    return name if name in {one.name for one in allowed_offers(options)} else ""


def list_offers(request: GroupRequest, options: SkyPilotOptions, *, now_s: float) -> OfferListing:
    """Return a spot and an on-demand offer for each entry of `infra`.

    The catalogs of this user have the prices, at the age of their files. SkyPilot renews them when
    it is used; a remote API server has its own.
    """
    remarks: dict[str, None] = {}
    accelerators = hardware.count_gpus(request.resources_per_worker, options.workers_per_node)
    catalogs: dict[str, SkyPilotCatalog] = {}

    def listed_price(infra: str, market: Market) -> Price | None:
        cloud, region, zone = _split(infra)
        if cloud not in catalogs:
            catalogs[cloud] = read_catalog(cloud)
        found = catalogs[cloud]
        price = catalog.find_price(
            found.rows,
            market,
            cloud=cloud,
            region=region,
            zone=zone,
            instance_type=options.instance_type,
            accelerator=options.accelerator,
            accelerators=accelerators,
        )
        if price is not None:
            return Price(usd_per_hour=price, source=found.source, as_of_s=found.as_of_s)
        machine = options.instance_type or options.accelerator or "the machine"
        missing = f"No {market.value} price of {machine} in {infra or 'any infrastructure'}."
        remarks[found.problem or missing] = None
        return None

    offers = tuple(
        replace(
            offer,
            price=given_price(options.prices, options.instance_type, offer.market, now_s=now_s)
            or listed_price(offer.network, offer.market),
        )
        for offer in allowed_offers(options)
    )
    return OfferListing(offers=offers, remarks=tuple(remarks), default=default_offer_name(options))


def read_catalog(cloud: str) -> SkyPilotCatalog:
    """Read the newest catalog of a cloud, such as 'aws', that SkyPilot has stored for this user."""
    if not cloud:
        return SkyPilotCatalog([], problem="SkyPilotOptions(infra) is not set: prices are unknown.")
    try:
        folder = Path.home() / ".sky" / "catalogs"
        # v10 is newer than v9.
        versions = sorted(folder.glob(f"v*/{cloud}/vms.csv"), key=_version)
        path = versions[-1]
        with path.open(encoding="utf-8", newline="") as file:
            rows = catalog.parse_catalog(file)
            as_of_s = path.stat().st_mtime
    # RuntimeError: the user has no home directory; ValueError: not UTF-8.
    except (IndexError, OSError, RuntimeError, ValueError, csv.Error) as error:
        reason = "there is none" if isinstance(error, IndexError) else str(error)
        return SkyPilotCatalog(
            [],
            problem=f"SkyPilot's catalog of {cloud} cannot be read: {reason}. `sky show-gpus` "
            "downloads it; or set the option prices.",
        )
    return SkyPilotCatalog(
        rows, source=f"SkyPilot catalog {path.parts[-3]}, highest of the zones", as_of_s=as_of_s
    )


def _split(infra: str) -> tuple[str, str, str]:
    """Return cloud, region and zone of an infrastructure; '' for what it does not name."""
    cloud, _, place = infra.partition("/")
    region, _, zone = place.partition("/")
    return cloud.lower(), region, zone


def _version(path: Path) -> int:
    text = path.parts[-3].removeprefix("v")
    return int(text) if text.isdecimal() else -1
