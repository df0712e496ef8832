"""The guards of tests/conftest.py are awake."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.conftest import _sleep_of_strangers_only


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.com", 443), ("8.8.8.8", 53)])
def test_no_test_leaves_this_machine(address: tuple[str, int]) -> None:
    with pytest.raises(AssertionError, match="loopback only"):
        socket.create_connection(address, timeout=1)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire,
        pytest.raises(AssertionError, match="loopback only"),
    ):
        wire.sendto(b"hello", address)


def test_loopback_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


@pytest.mark.parametrize(
    "module", ["spotfit.agent.driver", "tests.sim.test_storms", "tenacity.nap"]
)
def test_a_sleep_of_ours_is_noticed(module: str) -> None:
    with pytest.raises(AssertionError, match="virtual clock"):
        asleep_in(module, _sleep_of_strangers_only(print))()


def test_a_stranger_may_sleep() -> None:
    slept: list[float] = []
    asleep_in("subprocess", _sleep_of_strangers_only(slept.append))()
    assert slept == [1]


def test_the_home_is_clean(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert Path.home().is_relative_to(tmp_path_factory.getbasetemp())


def asleep_in(module: str, sleep: Any) -> Callable[[], None]:
    """A function that sleeps, as if it were written in `module`."""

    def nap() -> None:
        time_sleep(1)  # type: ignore[name-defined]  # noqa: F821  # given below

    return FunctionType(nap.__code__, {"__name__": module, "time_sleep": sleep})
