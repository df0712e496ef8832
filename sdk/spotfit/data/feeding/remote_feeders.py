"""Connections of a worker to the feeders of other machines."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.pool import FeederPool
from spotfit.host import log
from spotfit.model.topology import FeederAddress

_CONNECT_TIMEOUT_S = 10.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
"""Pauses between connections to a feeder that returns nothing; doubled after each."""
_MAX_CONNECTIONS = 32
"""Connections of a worker to all machines together, each of which takes a thread; at least one to
each machine."""


@dataclass(eq=False)
class _Machine:
    """A machine for feeders that the worker uses, or has used until now."""

    address: str
    is_unwanted: threading.Event = field(default_factory=threading.Event)
    links: set[FeederLink] = field(default_factory=set)


class RemoteFeeders:
    """Connects a pool to the feeders of other machines. `tls` proves the run key to them."""

    def __init__(self, pool: FeederPool, tls: ssl.SSLContext) -> None:
        self._pool = pool
        self._tls = tls
        self._lock = threading.Lock()
        self._machines: dict[str, _Machine] = {}

    def set_addresses(self, addresses: Sequence[FeederAddress]) -> None:
        """Connect to these feeders only; others return what they have and get nothing more.

        Returns at once. Connections that break are opened again.
        """
        wanted = {one.address: one for one in addresses}
        with self._lock:
            for address in self._machines.keys() - wanted.keys():
                self._retire(self._machines.pop(address))
            new = [one for one in addresses if one.address not in self._machines]
            self._machines |= {one.address: _Machine(one.address) for one in new}
        limit = max(_MAX_CONNECTIONS // max(len(wanted), 1), 1)
        for one in new:
            for number in range(min(max(one.connections, 1), limit)):
                threading.Thread(
                    target=self._keep_connected,
                    args=[self._machines[one.address]],
                    name=f"spotfit-feeder-{one.address}-{number}",
                    daemon=True,
                ).start()

    def close(self) -> None:
        """Close all connections."""
        self.set_addresses([])

    def _retire(self, machine: _Machine) -> None:
        machine.is_unwanted.set()
        for link in machine.links:
            self._pool.retire(link)

    def _keep_connected(self, machine: _Machine) -> None:
        pause_s = _MIN_PAUSE_S
        while not machine.is_unwanted.is_set():
            try:
                replies = self._serve(machine)
            except OSError as error:
                log.debug("feeder.unreachable", feeder=machine.address, reason=str(error))
                replies = 0
            pause_s = _MIN_PAUSE_S if replies else min(2 * pause_s, _MAX_PAUSE_S)
            machine.is_unwanted.wait(pause_s)

    def _serve(self, machine: _Machine) -> int:
        """Open a connection and return the number of slices that it gave. Raises `OSError`."""
        link = FeederLink(_connect(machine.address, self._tls), machine.address)
        with self._lock:
            machine.links.add(link)
        # Not before: `_retire` has no effect on a link that the pool does not serve yet.
        if machine.is_unwanted.is_set():
            link.close()
        try:
            return self._pool.serve(link)
        finally:
            with self._lock:
                machine.links.discard(link)


def _connect(address: str, tls: ssl.SSLContext) -> ssl.SSLSocket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that is lost without a sign: the kernel finds out, also while nothing is sent.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        established = tls.wrap_socket(sock)
        established.settimeout(None)
    except OSError:
        sock.close()
        raise
    return established
