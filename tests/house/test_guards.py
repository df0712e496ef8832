"""The guards of tests/conftest.py detect violations."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.conftest import _forbid_own_sleep, _missing_installation


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.com", 443), ("8.8.8.8", 53)])
def test_connections_beyond_loopback_are_rejected(address: tuple[str, int]) -> None:
    with pytest.raises(AssertionError, match="loopback only"):
        socket.create_connection(address, timeout=1)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket,
        pytest.raises(AssertionError, match="loopback only"),
    ):
        udp_socket.sendto(b"hello", address)


def test_loopback_connections_are_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


@pytest.mark.parametrize(
    "module", ["spotfit.agent.driver", "tests.sim.test_storms", "tenacity.nap"]
)
def test_a_sleep_in_our_code_is_rejected(module: str) -> None:
    with pytest.raises(AssertionError, match="virtual clock"):
        sleeping_function(module, _forbid_own_sleep(print))()


def test_a_sleep_in_foreign_code_is_allowed() -> None:
    durations_s: list[float] = []
    sleeping_function("subprocess", _forbid_own_sleep(durations_s.append))()
    assert durations_s == [1]


def test_home_is_a_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert Path.home().is_relative_to(tmp_path_factory.getbasetemp())


def sleeping_function(module: str, sleep: Any) -> Callable[[], None]:
    """A function that sleeps, as if it were written in `module`."""

    def call_sleep() -> None:
        time_sleep(1)  # type: ignore[name-defined]  # noqa: F821  # passed as a global below

    return FunctionType(call_sleep.__code__, {"__name__": module, "time_sleep": sleep})


@pytest.mark.parametrize(
    ("reason", "listed"),
    [
        ("Skipped: s3fs is not installed; `make filesystems`", "s3fs is not installed; `make"),
        ("Skipped: could not import 'azure.batch': No module named 'azure'", "pip install -c"),
        ("Skipped: could not import 'lance': No module named 'lance'", "`make frameworks`"),
        ("Skipped: this cloud gives no reason", None),
    ],
)
def test_the_end_of_a_run_names_what_is_not_installed(reason: str, listed: str | None) -> None:
    report = pytest.TestReport(
        "test", ("test.py", 1, "test"), {}, "skipped", ("test.py", 1, reason), "setup"
    )
    line = _missing_installation(report)
    assert listed in line if line and listed else line is listed
