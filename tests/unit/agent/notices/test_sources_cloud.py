"""Tests of the detection of a machine's cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.notices import sources
from spotfit.agent.notices.sources import (
    DetectedCloudNoticeSource,
    detect_cloud_by_firmware,
    detect_cloud_by_metadata,
    open_notice_source,
)
from spotfit.host.system import SystemClock
from spotfit.model.topology import Notice
from spotfit_localsim.clouds.cloud_host import SimulatedMachine
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

real = pytest.mark.real_time("metadata services answer in real time")

FIRMWARE = {
    "aws": {"sys_vendor": "Amazon EC2", "product_name": "g5.xlarge"},
    "gcp": {"sys_vendor": "Google", "product_name": "Google Compute Engine"},
    "azure": {
        "sys_vendor": "Microsoft Corporation",
        "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
    },
}
XEN = {"sys_vendor": "Xen", "bios_version": "4.11.amazon"}
HYPER_V = {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "0000-1111"}


def write_firmware(folder: Path, fields: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in fields.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("fields", "cloud"),
    [
        *((fields, cloud) for cloud, fields in FIRMWARE.items()),
        (XEN, "aws"),
        (HYPER_V, ""),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge R750"}, ""),
        ({}, None),
    ],
)
def test_the_cloud_is_detected_from_dmi(
    tmp_path: Path, fields: dict[str, str], cloud: str | None
) -> None:
    assert detect_cloud_by_firmware(write_firmware(tmp_path, fields)) == cloud


def test_without_dmi_the_cloud_is_unknown(tmp_path: Path) -> None:
    assert detect_cloud_by_firmware(tmp_path / "none") is None


class Vm:
    """A machine of a simulated cloud, and the way to its metadata service."""

    def __init__(self, sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sim = sim
        with sim._lock:
            rented = sim.datacenter.rent("task", ["/bin/sleep", "100"], {})
        assert rented is not None
        self.machine: SimulatedMachine = rented
        until(lambda: self.machine.state == "up")
        for name, text in sim.cloud.task_environment(self.machine).items():
            monkeypatch.setenv(name, text)

    def reclaim(self) -> None:
        with self._sim._lock:
            self._sim.datacenter.reclaim(self.machine, notice=True)


def until(happens: object) -> None:
    assert callable(happens)
    clock = SystemClock()
    deadline_s = clock.now() + 60
    while not happens():
        assert clock.now() < deadline_s
        clock.wait(0.02)


@pytest.fixture
def vm(cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vm]:
    for name in ("AWS_EC2_METADATA_DISABLED", "SPOTFIT_CLOUD"):
        monkeypatch.delenv(name, raising=False)
    options = SimOptions(cloud=f"{cloud}_batch", boot_s=0.0, notice_s=90.0)
    with running_simulator(tmp_path / "cloud", options) as sim:
        yield Vm(sim, monkeypatch)


@real
@pytest.mark.parametrize("cloud", sorted(FIRMWARE))
def test_a_vm_receives_the_notice_of_its_cloud(cloud: str, vm: Vm, tmp_path: Path) -> None:
    woken: list[bool] = []
    source = DetectedCloudNoticeSource(
        lambda: woken.append(True), dmi_dir=write_firmware(tmp_path / "dmi", FIRMWARE[cloud])
    )
    assert source.detected.wait(30)
    assert source.poll(0.0) is None
    vm.reclaim()
    until(lambda: source.poll(0.0))
    notice = source.poll(0.0)
    assert isinstance(notice, Notice)
    assert notice.seconds_left is not None
    until(lambda: woken)


@real
@pytest.mark.parametrize("cloud", sorted(FIRMWARE))
def test_without_dmi_the_metadata_service_is_probed(
    cloud: str, vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.agent.notices.sources._METADATA_ENDPOINT", "http://127.0.0.1:9")
    assert vm.machine.metadata_port
    assert detect_cloud_by_metadata() == cloud


@real
def test_a_configured_cloud_is_not_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_CLOUD", "none")
    monkeypatch.setattr(sources, "detect_cloud_by_metadata", lambda: pytest.fail("asked"))
    source = DetectedCloudNoticeSource(
        lambda: None, dmi_dir=write_firmware(tmp_path, FIRMWARE["aws"])
    )
    assert source.detected.wait(30)
    assert source._source is None
    assert source.poll(0.0) is None


@real
def test_a_machine_without_cloud_has_no_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPOTFIT_CLOUD", raising=False)
    monkeypatch.setattr(sources, "detect_cloud_by_metadata", lambda: pytest.fail("asked"))
    source = DetectedCloudNoticeSource(lambda: None, dmi_dir=write_firmware(tmp_path, HYPER_V))
    assert source.detected.wait(30)
    assert source.poll(0.0) is None


@real
def test_the_source_is_opened_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_CLOUD", "none")
    assert isinstance(open_notice_source("machine", lambda: None), DetectedCloudNoticeSource)
