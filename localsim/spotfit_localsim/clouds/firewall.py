"""Networks of a simulated cloud that drop packets: between machines, or to the storage.

Processes of one computer cannot be separated without privileges. Connections are therefore directed
to a black hole, a port that answers no SYN, at the border of the machine's processes:

    dropped packets      | where
    ---------------------|------------------------------------------------------------------
    between machines     | `connect` of Python's sockets (`machine_site/sitecustomize.py`)
    to the storage       | the proxy variables, which obstore and boto3 read
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from spotfit.host import env

FIREWALLS = ("", "machines", "storage")
"""Values of `SimOptions.firewall`."""

MACHINE_ADDRESSES = "127.1."
"""Prefix of the addresses of machines; see `SimulatedMachine.address`."""
_RULES_VARIABLE = "SPOTFIT_SIM_FIREWALL"
_SITE_FOLDER = Path(__file__).parent / "machine_site"
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_FILL_TIMEOUT_S = 0.2
_MAX_FILLS = 8


class BlackHole:
    """A port at which connecting takes until the timeout of the client."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._fills: list[socket.socket] = []
        # Linux drops the SYN of a connection while the queue of accepted ones is full.
        with contextlib.suppress(TimeoutError):
            for _ in range(_MAX_FILLS):
                self._fills.append(socket.create_connection(self.address, _FILL_TIMEOUT_S))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Close the port: connecting to it is refused then."""
        for one in (*self._fills, self._listener):
            one.close()


def machine_environment(firewall: str, black_hole: BlackHole, own: str) -> Mapping[str, str]:
    """Return the variables that put the machine with the address `own` behind the firewall."""
    if firewall == "machines":
        rules = {"black_hole": black_hole.address, "own": own, "blocked": MACHINE_ADDRESSES}
        paths = [str(_SITE_FOLDER), *filter(None, [env.lookup("PYTHONPATH")])]
        return {
            _RULES_VARIABLE: msgspec.json.encode(rules).decode(),
            "PYTHONPATH": os.pathsep.join(paths),
        }
    host, port = black_hole.address
    proxies = dict.fromkeys(_PROXY_VARIABLES, f"http://{host}:{port}")
    return {**proxies, **{name.lower(): text for name, text in proxies.items()}, "NO_PROXY": ""}
