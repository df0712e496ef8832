"""What this machine says of itself."""

import pytest

from spotfit.host import machine


def test_a_told_address_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.7")
    assert machine.own_address() == "127.0.0.7"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1"])
def test_every_loopback_address_belongs_to_the_loopback_interface(address: str) -> None:
    assert machine.interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.77", "a-name.example"])
def test_an_address_of_nobody_here_has_no_interface(address: str) -> None:
    assert machine.interface_of(address) is None


def test_told_devices_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:0, cuda:1,")
    assert machine.devices() == ("cuda:0", "cuda:1")


def test_there_is_a_processor() -> None:
    assert machine.cpu_count() >= 1
