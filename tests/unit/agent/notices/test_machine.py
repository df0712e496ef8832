"""A machine finds out whose VM it is, and listens there, whoever has rented it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.notices import machine
from spotfit.agent.notices.machine import MachineNotice, by_firmware, by_metadata
from spotfit.agent.notices.registry import open_source
from spotfit.host.clocks import SystemClock
from spotfit.model.world import Notice
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import Simulator, serving
from spotfit_localsim.wire.site import Machine

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


def written(folder: Path, told: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in told.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("told", "cloud"),
    [
        *((told, cloud) for cloud, told in FIRMWARE.items()),
        (XEN, "aws"),
        (HYPER_V, ""),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge R750"}, ""),
        ({}, None),
    ],
)
def test_firmware_tells_whose_vm_it_is(
    tmp_path: Path, told: dict[str, str], cloud: str | None
) -> None:
    assert by_firmware(written(tmp_path, told)) == cloud


def test_where_there_is_no_firmware_nothing_is_told(tmp_path: Path) -> None:
    assert by_firmware(tmp_path / "none") is None


class Vm:
    """A machine of a simulated cloud, and the way to its metadata service."""

    def __init__(self, sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sim = sim
        with sim._lock:
            rented = sim.site.rent("task", ["/bin/sleep", "100"], {})
        assert rented is not None
        self.machine: Machine = rented
        until(lambda: self.machine.state == "up")
        for name, text in sim.cloud.environment(self.machine).items():
            monkeypatch.setenv(name, text)

    def reclaim(self) -> None:
        with self._sim._lock:
            self._sim.site.reclaim(self.machine, notice=True)


def until(happens: object) -> None:
    assert callable(happens)
    clock = SystemClock()
    give_up_at = clock.now() + 60
    while not happens():
        assert clock.now() < give_up_at
        clock.wait(0.02)


@pytest.fixture
def vm(cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vm]:
    for name in ("AWS_EC2_METADATA_DISABLED", "SPOTFIT_CLOUD"):
        monkeypatch.delenv(name, raising=False)
    options = SimOptions(cloud=f"{cloud}_batch", boot_s=0.0, notice_s=90.0)
    with serving(tmp_path / "cloud", options) as sim:
        yield Vm(sim, monkeypatch)


@real
@pytest.mark.parametrize("cloud", sorted(FIRMWARE))
def test_a_vm_hears_its_own_cloud(cloud: str, vm: Vm, tmp_path: Path) -> None:
    woken: list[bool] = []
    source = MachineNotice(
        lambda: woken.append(True), dmi=written(tmp_path / "dmi", FIRMWARE[cloud])
    )
    assert source.found.wait(30)
    assert source.poll(0.0) is None
    vm.reclaim()
    until(lambda: source.poll(0.0))
    notice = source.poll(0.0)
    assert isinstance(notice, Notice)
    assert notice.seconds_left is not None
    until(lambda: woken)


@real
@pytest.mark.parametrize("cloud", sorted(FIRMWARE))
def test_where_firmware_cannot_be_read_the_service_that_answers_tells(
    cloud: str, vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_LINK_LOCAL", "http://127.0.0.1:9")
    assert vm.machine.metadata_port
    assert by_metadata() == cloud


@real
def test_who_is_told_not_to_look_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_CLOUD", "none")
    monkeypatch.setattr(machine, "by_metadata", lambda: pytest.fail("asked"))
    source = MachineNotice(lambda: None, dmi=written(tmp_path, FIRMWARE["aws"]))
    assert source.found.wait(30)
    assert source._source is None
    assert source.poll(0.0) is None


@real
def test_a_machine_of_no_cloud_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTFIT_CLOUD", raising=False)
    monkeypatch.setattr(machine, "by_metadata", lambda: pytest.fail("asked"))
    source = MachineNotice(lambda: None, dmi=written(tmp_path, HYPER_V))
    assert source.found.wait(30)
    assert source.poll(0.0) is None


@real
def test_it_is_opened_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_CLOUD", "none")
    assert isinstance(open_source("machine", lambda: None), MachineNotice)
