"""Machines that cannot open the bucket or cannot reach each other, on a simulated cloud.

The bucket is an S3 server that rejects requests for another region as S3 does; clients are real.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ControllerError
from spotfit.model.events import GroupSubmitted, NodeLost, RoundOpened
from spotfit.model.group import Unreachable
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos_runs import faulty_store_proxy
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


def test_replacement_waits_for_capacity_in_the_region_of_the_standing_machine(
    tmp_path: Path,
) -> None:
    # The simulator has one list of queues. Batch does not restart the machine: the run replaces it.
    queues = "sim-east-1:east,sim-west-1:west"
    sim = SimProvisioner.with_options(cloud="aws_batch", root=str(tmp_path / "cloud"))
    sim.start_simulator()
    handle = spotfit.DataParallelTrainer(
        train_until_marked,
        train_loop_config={"mark": str(tmp_path / "enough")},
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
        provisioner=f"sim://aws_batch?root={sim.root}&queues={queues}&attempts=1",
    ).submit()
    url = f"{tmp_path}/runs/run"
    eventually(lambda: any(isinstance(event, RoundOpened) for event in events_of(url)))
    sim.call_simulator("trouble", {"kind": "capacity", "times": 1_000_000})
    sim.call_simulator("reclaim", {"notice": False})

    def replacements() -> list[GroupSubmitted]:
        return [event for event in events_of(url) if isinstance(event, GroupSubmitted)][1:]

    eventually(replacements)
    before = sum(sim.call_simulator("asked").values())
    # The leader observes the group many times; pending_timeout_s is 0 on a simulated cloud.
    eventually(lambda: sum(sim.call_simulator("asked").values()) > before + 60)
    assert {one.handle.network for one in replacements()} == {"sim-east-1"}
    sim.call_simulator("trouble", {"kind": "capacity", "times": 0})
    (tmp_path / "enough").touch()
    assert handle.result(120.0).return_value == 2
    eventually(lambda: all(m["state"] == "over" for m in sim.call_simulator("machines")))
    sim.call_simulator("leave", {"machines": True})


def train_until_marked(config: dict[str, Any]) -> int:
    while not spotfit.collective.broadcast_from_rank_zero(Path(config["mark"]).exists()):
        time.sleep(0.05)
    return spotfit.get_context().get_world_size()
