"""Client of a peer store: reads shards from the memory of another machine, over TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from spotfit.checkpoint.format import Chunk, SnapshotIndex, decode_index
from spotfit.checkpoint.reader import EMPTY_BUFFER
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.model.snapshot_id import SnapshotShard
from spotfit.protocol import framing
from spotfit.protocol.agent_peer import ReadShardBytes, ReadShardIndex, ToPeerStore

# A peer that sends nothing for this long is presumed lost: a TCP connection to a machine without
# power stays open for many minutes.
RESPONSE_TIMEOUT_S = 30.0
# The kernel of the peer answers connection attempts, whatever its agent is busy with.
_CONNECT_TIMEOUT_S = 5.0
# A peer store serves a limited number of connections, and restoring machines read gigabytes:
# others may have to wait for a free slot.
_ADMISSION_TIMEOUT_S = 120.0


class PeerShardReader:
    """One rank's shard in the memory of another machine."""

    is_in_memory = False

    def __init__(
        self,
        address: str,
        shard: SnapshotShard,
        tls: ssl.SSLContext,
        index: SnapshotIndex | None = None,
    ) -> None:
        """Requests the index if it is not passed. Raises `IntegrityError`."""
        self._address = address
        self._shard = shard
        self._tls = tls
        self.index = index or decode_index(self._request(ReadShardIndex(shard=shard)))

    def fetch(self, chunk: Chunk, scratch: memoryview = EMPTY_BUFFER) -> memoryview:
        body = self._request(
            ReadShardBytes(shard=self._shard, offset=chunk.start, size_bytes=chunk.size_bytes)
        )
        # Not hashed: TLS protects the transfer, and a published segment is not verified either.
        if len(body) != chunk.size_bytes:
            raise _peer_unavailable(
                self._address, f"it sent {len(body)} of {chunk.size_bytes} bytes"
            )
        return memoryview(body)

    def _request(self, message: ToPeerStore) -> bytes:
        try:
            with connect_to_peer(
                self._address, self._tls, admission_timeout_s=_ADMISSION_TIMEOUT_S
            ) as connection:
                framing.write_frame(connection, encode(message))
                body = framing.read_frame(connection)
        except OSError as error:
            raise _peer_unavailable(self._address, str(error)) from error
        if not body:
            raise _peer_unavailable(self._address, "it does not hold that snapshot any more")
        return body


@contextmanager
def connect_to_peer(
    address: str, tls: ssl.SSLContext, *, admission_timeout_s: float = RESPONSE_TIMEOUT_S
) -> Iterator[ssl.SSLSocket]:
    """Connect to a peer store; it may have no free slot for `admission_timeout_s`.

    Raises `OSError`.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S) as plain:
        # Requests are small: Nagle's algorithm would delay them until the peer acknowledges.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The handshake completes once the peer store has accepted the connection.
        plain.settimeout(admission_timeout_s)
        with tls.wrap_socket(plain) as connection:
            connection.settimeout(RESPONSE_TIMEOUT_S)
            yield connection


def _peer_unavailable(address: str, reason: str) -> IntegrityError:
    return IntegrityError(f"Reading a snapshot from the memory of {address} failed: {reason}.")
