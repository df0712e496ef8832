"""Machines that cannot open the bucket or cannot reach each other, on a simulated cloud.

The bucket is an S3 server that rejects requests for another region as S3 does; clients are real.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ControllerError
from spotfit.model.events import NodeLost
from spotfit.model.group import Unreachable
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos import faulty_store_proxy
from spotfit_localsim.live.network_faults import BucketRegion
from tests.live.cloud import events_of, eventually

pytestmark = [
    pytest.mark.real_time("machines exit after 30 s"),
    pytest.mark.timeout(240),
]

REGION = "eu-west-1"
"""Of the bucket. Clients without a region use us-east-1."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an S3 server in REGION, of which only this computer knows the region."""
    with faulty_store_proxy() as address:
        for name, text in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_REGION", REGION),
        ):
            monkeypatch.setenv(name, text)
        request = urllib.request.Request(f"{address}/runs", method="PUT")  # noqa: S310 - loopback
        urllib.request.urlopen(request).close()  # noqa: S310 - loopback
        network_faults.set_region(address, BucketRegion(REGION))
        yield address


class CloudInAnotherRegion:
    """A simulated AWS Batch, whose machines have no AWS_REGION."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = f"s3://runs/{folder.name}"  # a process has one client per endpoint
        self.sims: list[SimProvisioner] = []

    def fit(self, workers: int, **options: Any) -> spotfit.Result:
        sim = SimProvisioner.with_options(
            cloud="aws_batch", root=str(self.folder / "cloud"), boot_s=0.1, **options
        )
        sim.start_simulator()
        self.sims.append(sim)
        return spotfit.DataParallelTrainer(
            sum_of_ranks,
            scaling_config=spotfit.ScalingConfig(num_workers=workers),
            run_config=spotfit.RunConfig(storage_path=self.storage, name="run"),
            provisioner=f"sim://aws_batch?root={sim.root}",
        ).fit()

    @property
    def machines(self) -> list[dict[str, Any]]:
        return list(self.sims[-1].call_simulator("machines"))


@pytest.fixture
def another_region(tmp_path: Path, bucket: str) -> Iterator[CloudInAnotherRegion]:
    cloud = CloudInAnotherRegion(tmp_path)
    yield cloud
    for sim in cloud.sims:
        eventually(lambda: all(one["state"] == "over" for one in cloud.machines))
        sim.call_simulator("leave", {"machines": True})


def sum_of_ranks() -> int:
    context = spotfit.get_context()
    ranks = spotfit.collective.broadcast_from_rank_zero(list(range(context.get_world_size())))
    return sum(ranks)


def losses(storage: str) -> list[NodeLost]:
    return [event for event in events_of(f"{storage}/run") if isinstance(event, NodeLost)]


def test_machines_elsewhere_open_a_bucket_by_the_region_in_its_url(
    another_region: CloudInAnotherRegion,
) -> None:
    assert another_region.fit(2).return_value == 1


def test_machines_that_sign_for_another_region_end_the_run_with_the_remedy(
    another_region: CloudInAnotherRegion, bucket: str
) -> None:
    network_faults.set_region(bucket, BucketRegion(REGION, is_announced=False))
    with pytest.raises(ControllerError) as error_info:
        another_region.fit(2)
    assert "2 machines" in str(error_info.value)
    assert "?region=" in str(error_info.value)
    assert {one.unreachable for one in losses(another_region.storage)} == {Unreachable.ACCESS}
    assert len(another_region.machines) <= 3


def test_machines_without_a_route_to_the_bucket_end_the_run_with_the_remedy(
    another_region: CloudInAnotherRegion,
) -> None:
    with pytest.raises(ControllerError) as error_info:
        another_region.fit(2, firewall="storage")
    assert "a route to the storage" in str(error_info.value)
    assert {one.unreachable for one in losses(another_region.storage)} == {Unreachable.STORAGE}
    assert len(another_region.machines) <= 3


def test_machines_that_cannot_reach_each_other_end_the_run_with_the_remedy(
    another_region: CloudInAnotherRegion,
) -> None:
    with pytest.raises(ControllerError) as error_info:
        another_region.fit(3, firewall="machines")
    text = str(error_info.value)
    assert "Open TCP between the machines" in text
    lost = losses(another_region.storage)
    assert {one.unreachable for one in lost} == {Unreachable.LEADER}
    assert "did not reach the leader at 127.1.0." in text
    assert len(another_region.machines) <= 4
