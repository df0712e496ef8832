"""The packet filter of a simulated machine, loaded by each of its Python processes at its start.

Connections to blocked addresses are directed to an address that never answers, as if a security
group had dropped their packets. The code above the socket runs unchanged. See
`spotfit_localsim.clouds.firewall`.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any


def _install(rules: dict[str, Any]) -> None:
    black_hole = (rules["black_hole"][0], rules["black_hole"][1])

    def filtered(address: Any) -> Any:
        is_internet = isinstance(address, tuple) and isinstance(address[0], str)
        if is_internet and address[0] != rules["own"] and address[0].startswith(rules["blocked"]):
            return black_hole
        return address

    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    # Assigned to the class, so that sockets of all libraries in Python are filtered.
    socket.socket.connect = lambda self, address: connect(self, filtered(address))  # type: ignore[method-assign]
    socket.socket.connect_ex = lambda self, address: connect_ex(self, filtered(address))  # type: ignore[method-assign]


# Without `host`, which is not imported here: this runs before everything else.
if _text := os.environ.get("SPOTFIT_SIM_FIREWALL"):  # noqa: TID251
    _install(json.loads(_text))
