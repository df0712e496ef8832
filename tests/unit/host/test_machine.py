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


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,3", ("2", "3")),
        (" 3 , 0", ("3", "0")),
        ("GPU-8932f937,1", ("GPU-8932f937", "1")),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", ("MIG-1", "MIG-2", "MIG-3", "MIG-4", "MIG-5")),
        ("1,-1,2", ("1",)),
        ("0,4,1", ("0",)),
        ("NoDevFiles", ()),
        ("", ()),
    ],
)
def test_a_process_sees_the_cards_it_is_told_as_cuda_reads_it(
    told: str | None, seen: tuple[str, ...]
) -> None:
    assert machine.visible_cards(4, told) == seen


def test_where_there_are_no_cards_a_variable_makes_none() -> None:
    assert machine.visible_cards(0, "0,1") == machine.visible_cards(0, None) == ()


def test_there_is_a_processor() -> None:
    assert machine.cpu_count() >= 1
