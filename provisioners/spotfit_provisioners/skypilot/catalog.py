"""Prices in the catalogs that SkyPilot has downloaded for this user. Pure.

A catalog is a CSV file for each cloud, ~/.sky/catalogs/<version>/<cloud>/vms.csv, with the columns
InstanceType, AcceleratorName, AcceleratorCount, Region, AvailabilityZone, Price and SpotPrice:
https://github.com/skypilot-org/skypilot-catalog. It has no license, so that spotfit has no copy.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence

from spotfit.model.offer import Market

_COLUMNS: Mapping[Market, str] = {Market.SPOT: "SpotPrice", Market.ON_DEMAND: "Price"}
_REQUIRED_COLUMNS = frozenset(
    ["InstanceType", "AcceleratorName", "AcceleratorCount", "Region", *_COLUMNS.values()]
)
# Rows of Google's machine types are hosts without GPU, also of types with built-in GPUs:
# https://github.com/skypilot-org/skypilot-catalog/issues/31
_HOSTS_WITHOUT_GPU = "gcp"
_BUILT_IN_GPU = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")

Row = Mapping[str, str]


def parse_catalog(text: Iterable[str]) -> list[Row]:
    """Return the rows of a catalog; none if it has other columns."""
    reader = csv.DictReader(text)
    has_columns = set(reader.fieldnames or ()) >= _REQUIRED_COLUMNS
    return list(reader) if has_columns else []


def find_price(
    rows: Sequence[Row],
    market: Market,
    *,
    cloud: str,
    region: str,
    zone: str = "",
    instance_type: str,
    accelerator: str,
    accelerators: int,
) -> float | None:
    """Return the price of a machine in US dollars per hour; None if it is unknown.

    `region` and `zone` may be '', which stands for all. Without `instance_type`, it is the only
    type that has exactly these accelerators. The highest price of the zones: SkyPilot chooses one.
    """
    local = [
        row
        for row in rows
        if region in ("", row["Region"]) and zone in ("", row.get("AvailabilityZone"))
    ]
    gpus = [
        row
        for row in local
        if accelerator
        and (row["AcceleratorName"] or "").lower() == accelerator.lower()
        and _to_number(row["AcceleratorCount"]) == accelerators
    ]
    if not instance_type:
        types = {row["InstanceType"] for row in gpus}
        # Google's rows of accelerators name no host, which SkyPilot chooses.
        instance_type = types.pop() if len(types) == 1 else ""
    hosts = [row for row in local if row["InstanceType"] == instance_type]
    if not instance_type or not hosts:
        return None
    if cloud != _HOSTS_WITHOUT_GPU:
        return _highest(hosts, market)
    if not accelerators or not accelerator:
        # A host with an accelerator that is not known is no price of the machine.
        return None if instance_type.startswith(_BUILT_IN_GPU) else _highest(hosts, market)
    # Only in zones with both.
    zones = {_zone(row) for row in hosts} & {_zone(row) for row in gpus}
    host, gpu = (
        _highest([row for row in some if _zone(row) in zones], market) for some in (hosts, gpus)
    )
    return None if host is None or gpu is None else host + gpu


def _zone(row: Row) -> tuple[str, str]:
    return row["Region"], row.get("AvailabilityZone") or ""


def _highest(rows: Sequence[Row], market: Market) -> float | None:
    """Return the highest price; None if any row has none, or one that is 0."""
    prices = [_to_number(row[_COLUMNS[market]]) for row in rows]
    return max(prices) if prices and min(prices) > 0 else None


def _to_number(text: str | None) -> float:
    """Return the number; 0 for an empty or invalid field."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
