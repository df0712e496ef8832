"""Prices in SkyPilot's catalogs."""

from __future__ import annotations

import pytest

from spotfit.model.offer import Market
from spotfit_provisioners.skypilot.catalog import find_price, parse_catalog

AWS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
m6i.xlarge,,,4.0,16.0,,0.192,0.065,us-east-1,use1-az1,x86_64
m6i.xlarge,,,4.0,16.0,,0.192,0.071,us-east-1,use1-az2,x86_64
m6i.xlarge,,,4.0,16.0,,0.2,0.05,us-west-2,usw2-az1,x86_64
p3.2xlarge,V100,1.0,8.0,61.0,"{'Gpus': [{'Name': 'V100'}]}",3.06,,us-east-1,use1-az1,x86_64
p3.8xlarge,V100,4.0,32.0,244.0,,0.0,0.0,us-east-1,use1-az1,x86_64
g6.xlarge,L4,1.0,4.0,16.0,,0.8,0.3,us-east-1,use1-az1,x86_64
g6.2xlarge,L4,1.0,8.0,32.0,,0.98,0.4,us-east-1,use1-az1,x86_64
"""
GCP = """\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
n1-standard-8,8.0,30.0,,,,us-central1,us-central1-a,0.38,0.08
n1-standard-8,8.0,30.0,,,,us-central1,us-central1-c,0.39,0.09
a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,8.0,2.0
,,,T4,1,,us-central1,us-central1-a,0.35,0.11
,,,T4,2,,us-central1,us-central1-a,0.7,0.22
,,,H100,8,,us-central1,us-central1-a,80.0,20.0
"""


def price(
    text: str,
    market: Market,
    region: str,
    instance_type: str,
    accelerator: str = "",
    accelerators: int = 0,
) -> float | None:
    return find_price(
        parse_catalog(text.splitlines()),
        market,
        cloud="gcp" if text is GCP else "aws",
        region=region,
        instance_type=instance_type,
        accelerator=accelerator,
        accelerators=accelerators,
    )


@pytest.mark.parametrize(
    ("market", "region", "instance_type", "accelerator", "count", "usd"),
    [
        (Market.SPOT, "us-east-1", "m6i.xlarge", "", 0, 0.071),
        (Market.ON_DEMAND, "us-east-1", "m6i.xlarge", "", 0, 0.192),
        (Market.ON_DEMAND, "", "m6i.xlarge", "", 0, 0.2),
        (Market.ON_DEMAND, "us-east-1", "", "V100", 1, 3.06),
        (Market.ON_DEMAND, "us-east-1", "", "v100", 1, 3.06),
        (Market.SPOT, "us-east-1", "p3.2xlarge", "", 0, None),
        (Market.ON_DEMAND, "us-east-1", "p3.8xlarge", "", 0, None),
        (Market.ON_DEMAND, "us-east-1", "", "L4", 1, None),
        (Market.ON_DEMAND, "us-east-1", "", "H100", 8, None),
        (Market.ON_DEMAND, "eu-west-1", "m6i.xlarge", "", 0, None),
        (Market.ON_DEMAND, "us-east-1", "", "", 0, None),
    ],
)
def test_price_of_the_catalog(
    market: Market,
    region: str,
    instance_type: str,
    accelerator: str,
    count: int,
    usd: float | None,
) -> None:
    assert price(AWS, market, region, instance_type, accelerator, count) == usd


@pytest.mark.parametrize(
    ("market", "instance_type", "accelerator", "count", "usd"),
    [
        (Market.ON_DEMAND, "n1-standard-8", "", 0, 0.39),
        # T4 is in one of the zones of the host.
        (Market.ON_DEMAND, "n1-standard-8", "T4", 2, 0.38 + 0.7),
        (Market.SPOT, "a3-highgpu-8g", "H100", 8, 22.0),
        (Market.SPOT, "a3-highgpu-8g", "", 0, None),
        (Market.SPOT, "a3-highgpu-8g", "H100", 4, None),
        (Market.SPOT, "", "H100", 8, None),
    ],
)
def test_rows_of_google_are_hosts_without_gpus(
    market: Market, instance_type: str, accelerator: str, count: int, usd: float | None
) -> None:
    found = price(GCP, market, "us-central1", instance_type, accelerator, count)
    assert found == (None if usd is None else pytest.approx(usd))


def test_one_zone_is_selected() -> None:
    rows = parse_catalog(AWS.splitlines())
    for zone, usd in {"use1-az1": 0.065, "use1-az2": 0.071, "use1-az3": None}.items():
        found = find_price(
            rows,
            Market.SPOT,
            cloud="aws",
            region="us-east-1",
            zone=zone,
            instance_type="m6i.xlarge",
            accelerator="",
            accelerators=0,
        )
        assert found == usd


@pytest.mark.parametrize("text", ["", "a,b\n1,2", "InstanceType,Region,Price\nx,y,1"])
def test_file_with_other_columns_has_no_prices(text: str) -> None:
    assert parse_catalog(text.splitlines()) == []


@pytest.mark.parametrize("value", ["", "nan", "inf", "-1", "cheap", "0.0"])
def test_field_that_is_no_price_is_unknown(value: str) -> None:
    text = AWS.replace("0.065", value)
    assert price(text, Market.SPOT, "us-east-1", "m6i.xlarge") is None


def test_short_rows_are_unknown() -> None:
    text = AWS.splitlines()[0] + "\nm6i.xlarge,,\n"
    assert price(text, Market.SPOT, "", "m6i.xlarge", "V100", 1) is None
