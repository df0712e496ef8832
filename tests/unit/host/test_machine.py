"""Properties of this machine."""

import pytest

from spotfit.host import machine


def test_a_configured_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.7")
    assert machine.own_address() == "127.0.0.7"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1"])
def test_every_loopback_address_belongs_to_the_loopback_interface(address: str) -> None:
    assert machine.interface_with_address(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.77", "a-name.example"])
def test_a_foreign_address_has_no_interface(address: str) -> None:
    assert machine.interface_with_address(address) is None


def test_configured_devices_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:0, cuda:1,")
    assert machine.devices() == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("variable", "visible"),
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
def test_cuda_visible_devices_is_read_as_cuda_does(
    variable: str | None, visible: tuple[str, ...]
) -> None:
    assert machine.visible_gpus(4, variable) == visible


def test_without_gpus_none_is_visible() -> None:
    assert machine.visible_gpus(0, "0,1") == machine.visible_gpus(0, None) == ()


def test_cpu_count_is_positive() -> None:
    assert machine.cpu_count() >= 1


def test_unknown_user_has_no_login_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user id without an entry in /etc/passwd."""

    def fail() -> str:
        raise OSError("No username set in the environment")

    monkeypatch.setattr("getpass.getuser", fail)
    assert machine.login_name() == ""
    monkeypatch.setattr("getpass.getuser", lambda: "jane")
    assert machine.login_name() == "jane"
