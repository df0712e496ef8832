"""States in the memory of other machines: how one asks for them, over TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from spotfit.checkpoint.saved import NONE
from spotfit.checkpoint.snapshot import Chunk, Index, read_index
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.host import frames
from spotfit.model.holding import Part
from spotfit.model.vault import Fetch, Look, ToVault

PATIENCE_S = 30.0
"""A machine that says nothing for so long is taken to be gone."""
_CALL_S = 5.0
"""And one whose kernel does not answer a call in this time; its agent may be slow to speak."""
_PLACE_S = 120.0
"""So long it may have no place for one more who asks: whole machines ask for gigabytes."""


class InPeer:
    """One rank's part in another machine's memory. Raises `IntegrityError` where it is gone."""

    def __init__(
        self, address: str, part: Part, tls: ssl.SSLContext, index: Index | None = None
    ) -> None:
        """Asks for the index, where nobody has told it."""
        self._address = address
        self._part = part
        self._tls = tls
        self.index = index or read_index(self._asked(Look(part)))

    @property
    def at_hand(self) -> bool:
        return False

    def fetch(self, chunk: Chunk, spare: memoryview = NONE) -> memoryview:
        body = self._asked(Fetch(self._part, chunk.start, chunk.size_bytes))
        if len(body) != chunk.size_bytes:
            raise _gone(self._address, f"it gave {len(body)} of {chunk.size_bytes} bytes")
        return memoryview(body)

    def _asked(self, question: ToVault) -> bytes:
        try:
            with connected(self._address, self._tls, place_s=_PLACE_S) as wire:
                frames.write(wire, encode(question))
                body = frames.read(wire)
        except OSError as broken:
            raise _gone(self._address, str(broken)) from broken
        if not body:
            raise _gone(self._address, "it is not there any more")
        return body


@contextmanager
def connected(
    address: str, tls: ssl.SSLContext, *, place_s: float = PATIENCE_S
) -> Iterator[ssl.SSLSocket]:
    """A connection to a vault, which may have no place for it for so long. Raises `OSError`."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CALL_S) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a question is small
        plain.settimeout(place_s)
        with tls.wrap_socket(plain) as wire:
            wire.settimeout(PATIENCE_S)
            yield wire


def _gone(address: str, why: str) -> IntegrityError:
    return IntegrityError(f"A part of the state in the memory of {address} cannot be had: {why}.")
