"""Packets to a black hole are dropped, and machines behind a firewall reach only themselves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from spotfit_localsim.clouds.firewall import BlackHole, machine_environment

pytestmark = [
    pytest.mark.real_time("sockets time out"),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems queue connections"),
]

DIAL = """
import socket, sys
sock = socket.socket()
sock.settimeout(0.3)
try:
    sock.connect((sys.argv[1], int(sys.argv[2])))
except TimeoutError:
    print("dropped")
else:
    print("connected")
"""


@pytest.fixture
def black_hole() -> Iterator[BlackHole]:
    hole = BlackHole()
    yield hole
    hole.close()


def test_black_hole_neither_accepts_nor_refuses(black_hole: BlackHole) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            socket.create_connection(black_hole.address, 0.2)


@pytest.mark.parametrize(
    ("target", "result"), [("127.1.0.2", "dropped"), ("127.1.0.1", "connected")]
)
def test_machine_behind_a_firewall_reaches_itself_only(
    black_hole: BlackHole, target: str, result: str
) -> None:
    with socket.create_server((target, 0)) as listener:
        done = subprocess.run(
            [sys.executable, "-c", DIAL, target, str(listener.getsockname()[1])],
            env={**os.environ, **machine_environment("machines", black_hole, "127.1.0.1")},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    assert done.stdout.strip() == result


def test_machine_without_a_route_to_the_storage_has_a_proxy_that_never_answers(
    black_hole: BlackHole,
) -> None:
    environment = machine_environment("storage", black_hole, "127.1.0.1")
    host, port = black_hole.address
    assert environment["https_proxy"] == environment["HTTP_PROXY"] == f"http://{host}:{port}"
