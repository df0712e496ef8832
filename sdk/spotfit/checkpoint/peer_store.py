"""Peer store: keeps replicas of a peer's snapshots, serves shards, and sends replicas of its own.

It has one thread per connection and one for sending, so that the agent's event loop never blocks
on gigabytes of data. Connections without the run key are few and short: they wait for no slot, and
each new one beyond the limit ends the oldest.

Client of a peer store: reads shards from the memory of another machine, over TLS.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from spotfit.checkpoint.format import Chunk, SnapshotIndex, decode_index, encode_index
from spotfit.checkpoint.reader import EMPTY_BUFFER
from spotfit.checkpoint.replication import PendingReplica, ReplicaId, ReplicaStore, ReplicationQueue
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.clock import Clock
from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.host import log, process
from spotfit.model.topology import SnapshotShard
from spotfit.protocol import framing
from spotfit.protocol.agent_peer import (
    ADMITTED,
    ALREADY_STORED,
    REPLICATION_BYTES_PER_S,
    ReadShardBytes,
    ReadShardIndex,
    StoreReplica,
    ToPeerStore,
)
from spotfit.security.run_key import TlsContexts

# --- Client of a peer store -----------------------------------------------------------------------


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
        """Prepare reads of one shard from the peer store at `address`, such as "10.0.0.5:41234".

        With `index=None` the index is requested from the peer at once. Raises `IntegrityError` if
        the peer cannot be reached or no longer holds the shard.
        """
        self._address = address
        self._shard = shard
        self._tls = tls
        self.index = index or decode_index(
            self._request(ReadShardIndex(shard=shard)), source=f"in the memory of {address}"
        )

    def fetch(self, chunk: Chunk, scratch: memoryview = EMPTY_BUFFER) -> memoryview:
        """Request a chunk from the peer, on a new connection; `scratch` is not used.

        Waits up to 120 s for a free slot of the peer store. Raises `IntegrityError` if the peer
        cannot be reached, then sends nothing for 30 s, or no longer holds the shard. See
        `ShardReader.fetch`.
        """
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
        except (OSError, ValueError) as error:  # ValueError: the address has no port
            raise _peer_unavailable(self._address, str(error)) from error
        if not body:
            raise _peer_unavailable(self._address, "it does not hold that snapshot any more")
        return body


@contextmanager
def connect_to_peer(
    address: str, tls: ssl.SSLContext, *, admission_timeout_s: float = RESPONSE_TIMEOUT_S
) -> Iterator[ssl.SSLSocket]:
    """Connect to the peer store at `address` and yield the socket, which is closed afterwards.

    `address` is for example "10.0.0.5:41234" or "[::1]:41234", `tls` the client context of the run.
    Waits up to 5 s for TCP, then up to `admission_timeout_s` seconds for a free slot of the peer
    store; each later read or write of the block up to 30 s. Raises `OSError`, of which
    `TimeoutError` and `ssl.SSLError` are subclasses, and `IntegrityError` for a malformed frame.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S) as plain:
        # Requests are small: Nagle's algorithm would delay them until the peer acknowledges.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(admission_timeout_s)
        with tls.wrap_socket(plain) as connection:
            if framing.read_frame(connection) != ADMITTED:
                raise ConnectionAbortedError("the peer store did not admit the connection")
            connection.settimeout(RESPONSE_TIMEOUT_S)
            yield connection


def _peer_unavailable(address: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"The snapshot in the memory of the machine {address} cannot be read: {reason}.",
        do="No action is needed: the restore tries the next copy or checkpoint.",
    )


# Small enough to notice an overwritten segment soon, large enough to make frames cheap.
_CHUNK_BYTES = 4 * 2**20
# Each connection may hold one chunk of up to 32 MiB in memory.
_MAX_CONNECTIONS = 32
_BACKLOG = 1024
# Connections whose client has not proved that it has the run key. They hold no slot.
_MAX_PENDING_CONNECTIONS = 64
_HANDSHAKE_TIMEOUT_S = 10.0
# A connection without a request must not hold one of the slots.
_REQUEST_TIMEOUT_S = 10.0
# After a failure to accept for lack of descriptors or threads.
_ACCEPT_RETRY_S = 0.1
_request_decoder: msgspec.json.Decoder[ToPeerStore] = decoder(ToPeerStore)  # type: ignore[arg-type]

FindShardFn = Callable[[SnapshotShard], Path | None]
"""Returns the segment of a shard on this machine; None if there is none."""

OnReplicaStoredFn = Callable[[int, int, int, str], None]
"""Called on the sending thread with the round, rank and step of a stored replica, and the peer."""


class PeerStore:
    """Keeps replicas for peers, serves shards of this machine, and sends its replicas to a peer.

    Each agent has one. It listens and sends, on threads of its own, from construction until
    `close`.
    """

    def __init__(
        self,
        replicas: ReplicaStore,
        find_shard: FindShardFn,
        *,
        tls: TlsContexts,
        host: str,
        clock: Clock,
    ) -> None:
        """Listen on a free port of `host`, an IP address of this machine, and start the threads.

        `find_shard` is called on connection threads. The address for peers is then `address`.
        Raises `OSError` if `host` is not an address of this machine.
        """
        self._replicas = replicas
        self._find_shard = find_shard
        self.on_replica_stored: OnReplicaStoredFn | None = None
        """Callback for replicas of this machine's snapshots that a peer has stored."""
        self._tls = tls
        self._clock = clock
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        ip, port = self._listener.getsockname()[:2]
        self.address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        self._connection_slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._pending_connections: dict[ssl.SSLSocket, None] = {}
        """Connections in their TLS handshake, the oldest first."""
        self._pending_lock = threading.Lock()
        self._queue: ReplicationQueue | None = ReplicationQueue()
        """None after `close`."""
        self._queue_changed = threading.Condition()
        # Daemons: a transfer that hangs must not keep the agent's process from exiting.
        for loop in (self._accept_loop, self._send_loop):
            threading.Thread(target=loop, name="spotfit-peer-store", daemon=True).start()

    def close(self) -> None:
        """Stop listening and sending, without waiting for the threads. Idempotent.

        The transfer that is being sent is aborted, and queued replicas are dropped; stored ones
        stay in their folder. Requests that are being served are still answered.
        """
        with self._queue_changed:
            self._queue = None
            self._queue_changed.notify()
        # Closing alone does not wake a thread that is blocked in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def replicate(self, pending: PendingReplica) -> None:
        """Queue a replica of this machine's snapshots to be sent to its `target`. Does not block.

        If the segment is overwritten meanwhile, the replica is dropped: a newer one follows. A
        failure is only logged; after a success `on_replica_stored` is called on the sending thread.
        Ignored after `close`.
        """
        with self._queue_changed:
            if self._queue is not None:
                self._queue.add(pending)
                self._queue_changed.notify()

    # --- sending -----------------------------------------------------------------------------

    def _send_loop(self) -> None:
        while (pending := self._next_pending()) is not None:
            try:
                step = self._send_replica(pending)
            except (OSError, ValueError, IntegrityError) as error:  # ValueError: no port
                log.warning(
                    "replication.failed",
                    copy=pending.replica.file_name,
                    to=pending.target,
                    reason=str(error),
                )
                with self._queue_changed:
                    if self._queue is not None:
                        self._queue.mark_failed(pending)
            else:
                # Without the lock: replicate() must not wait for the callback.
                if self.on_replica_stored is not None:
                    replica = pending.replica
                    self.on_replica_stored(replica.round, replica.rank, step, pending.target)

    def _next_pending(self) -> PendingReplica | None:
        """Wait for the next replica; None after `close`."""
        with self._queue_changed:
            while self._queue is not None:
                pending = self._queue.pop()
                if pending is not None:
                    return pending
                self._queue_changed.wait()
            return None

    def _send_replica(self, pending: PendingReplica) -> int:
        """Send one replica and return its step. Raises `OSError` or `IntegrityError`."""
        with (
            ShmSegment.open(pending.segment) as segment,
            connect_to_peer(pending.target, self._tls.client) as connection,
        ):
            step = segment.index().step
            # Only now: the step must be that of the save that was queued.
            _check_unchanged(segment, pending)
            request = StoreReplica(
                round=pending.replica.round,
                report_index=pending.replica.report,
                rank=pending.replica.rank,
                local_ranks=pending.local_ranks,
                size_bytes=len(segment.buffer),
            )
            framing.write_frame(connection, encode(request))
            answer = framing.read_frame(connection)
            # An empty frame requests the bytes, ALREADY_STORED ends the transfer.
            if answer == b"":
                self._send_bytes(connection, segment, pending)
                answer = framing.read_frame(connection)
            if answer is None:
                raise IntegrityError(
                    f"The peer {pending.target} closed the connection before it confirmed the "
                    "replica: the replica is outdated, or the peer has failed.",
                    do="No action is needed: the next save is replicated again. If this repeats, "
                    "look for errors in the log of that machine.",
                )
            return step

    def _send_bytes(
        self, connection: ssl.SSLSocket, segment: ShmSegment, pending: PendingReplica
    ) -> None:
        started_at = self._clock.now()
        for offset in range(0, len(segment.buffer), _CHUNK_BYTES):
            framing.write_frame(connection, bytes(segment.buffer[offset : offset + _CHUNK_BYTES]))
            # After the frame: bytes read during an overwrite must not complete the replica.
            _check_unchanged(segment, pending)
            with self._queue_changed:
                is_abandoned = self._queue is None or self._queue.is_abandoned(pending)
            if is_abandoned:
                raise IntegrityError(f"The replica to {pending.target} gave way to a later save.")
            # The rate is limited, because the network is shared with the training's collectives.
            self._clock.wait(started_at + offset / REPLICATION_BYTES_PER_S - self._clock.now())
        framing.write_frame(connection, b"")

    # --- receiving ---------------------------------------------------------------------------

    def _accept_loop(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._can_accept_later(error):
                    return  # closed
                continue
            try:
                # The handshake follows on the thread of the connection.
                connection = self._tls.server.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # the client is gone
                sock.close()
                continue
            self._add_pending(connection)
            thread = threading.Thread(
                target=self._serve_connection, args=(connection,), daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                log.warning("peer_store.accept_failed", reason=str(error))
                self._remove_pending(connection)
                connection.close()
                self._clock.wait(_ACCEPT_RETRY_S)

    def _can_accept_later(self, error: OSError) -> bool:
        """Whether a failure to accept is temporary; waits, and frees a descriptor, if so."""
        if error.errno not in (*process.OUT_OF_DESCRIPTORS, errno.ECONNABORTED):
            return False
        log.warning("peer_store.accept_failed", reason=str(error))
        with self._pending_lock:
            self._abort_oldest()
        self._clock.wait(_ACCEPT_RETRY_S)
        return True

    def _add_pending(self, connection: ssl.SSLSocket) -> None:
        with self._pending_lock:
            # At most an eighth of the descriptors: requests must open files.
            limit = min(_MAX_PENDING_CONNECTIONS, max(1, process.descriptor_limit() // 8))
            if len(self._pending_connections) >= limit:
                self._abort_oldest()
            self._pending_connections[connection] = None

    def _remove_pending(self, connection: ssl.SSLSocket) -> None:
        with self._pending_lock:
            self._pending_connections.pop(connection, None)

    def _abort_oldest(self) -> None:
        """Abort the oldest handshake, if there is one; its thread then closes the connection."""
        for connection in list(self._pending_connections)[:1]:
            del self._pending_connections[connection]
            with suppress(OSError):
                # Of the plain socket: `SSLSocket.shutdown` changes what the thread is using.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _serve_connection(self, connection: ssl.SSLSocket) -> None:
        try:
            with connection:
                # The timeout of the whole handshake, however slowly its bytes arrive.
                connection.settimeout(_HANDSHAKE_TIMEOUT_S)
                connection.do_handshake()
                self._remove_pending(connection)
                # Only clients with the run key wait for one of the slots.
                if self._connection_slots.acquire(timeout=_ADMISSION_TIMEOUT_S):
                    try:
                        self._serve_admitted(connection)
                    finally:
                        self._connection_slots.release()
        except (OSError, ValueError, IntegrityError, *DECODE_ERRORS) as error:
            log.debug("peer_store.connection_failed", reason=str(error))
        finally:
            self._remove_pending(connection)

    def _serve_admitted(self, connection: ssl.SSLSocket) -> None:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        framing.write_frame(connection, ADMITTED)
        body = framing.read_frame(connection)
        connection.settimeout(RESPONSE_TIMEOUT_S)
        if body is not None:
            self._handle_request(connection, _request_decoder.decode(body))

    def _handle_request(self, connection: ssl.SSLSocket, request: ToPeerStore) -> None:
        match request:
            case StoreReplica():
                self._store_replica(connection, request)
            case ReadShardIndex(shard=shard):
                framing.write_frame(connection, self._read_index(shard))
            case ReadShardBytes(shard=shard, offset=offset, size_bytes=size_bytes):
                framing.write_frame(connection, self._read_bytes(shard, offset, size_bytes))

    def _store_replica(self, connection: ssl.SSLSocket, request: StoreReplica) -> None:
        """Receive a replica into a temporary file, and move it to its place once complete."""
        numbers = (request.round, request.report_index, request.rank, request.size_bytes)
        if min(numbers) < 0 or request.rank not in request.local_ranks:
            raise _invalid_request(request)
        replica = ReplicaId(request.round, request.report_index, request.rank)
        # The sender repeats a replica after a lost answer, or when its peer store was replaced.
        if replica in self._replicas.replicas:
            framing.write_frame(connection, ALREADY_STORED)
            return
        if not self._replicas.reserve(replica, request.local_ranks):
            return  # the closed connection is the rejection
        framing.write_frame(connection, b"")
        # In the same folder: only then is the later rename atomic.
        descriptor, name = tempfile.mkstemp(".coming", dir=self._replicas.folder)
        temp_path = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                while body := framing.read_frame(connection):
                    if file.tell() + len(body) > request.size_bytes:
                        raise _invalid_request(request)
                    file.write(body)
                # None is the end of the connection, an empty frame the end of the replica.
                is_complete = body is not None and file.tell() == request.size_bytes
            # The answer after the last frame: only then the sender counts it as stored.
            if is_complete and self._replicas.put(temp_path, replica):
                framing.write_frame(connection, b"")
        finally:
            temp_path.unlink(missing_ok=True)

    def _read_index(self, shard: SnapshotShard) -> bytes:
        path = self._find_shard(shard)
        if path is None:
            return b""
        with open_shard(path, shard) as segment:
            return encode_index(segment.index())

    def _read_bytes(self, shard: SnapshotShard, offset: int, size_bytes: int) -> bytes:
        path = self._find_shard(shard)
        if path is None:
            return b""
        with open_shard(path, shard) as segment:
            is_inside = 0 <= offset <= offset + size_bytes <= segment.capacity_bytes
            if not is_inside or size_bytes > framing.MAX_FRAME_BYTES:
                raise _invalid_request(shard)
            return bytes(segment.payload[offset : offset + size_bytes])


def _invalid_request(request: object) -> IntegrityError:
    return IntegrityError(f"A peer has sent an impossible request: {request}")


def open_shard(path: Path, shard: SnapshotShard) -> ShmSegment:
    """Map the segment of that shard; the caller closes it.

    `path` is from the peer store's `find_shard`. Raises `IntegrityError` if it is missing, or holds
    another shard: a later replica may have replaced it after it was found.
    """
    segment = ShmSegment.open(path)
    index = segment.index()
    if (index.step, index.rank, index.world_size) != (
        shard.snapshot_id.step,
        shard.rank,
        shard.world_size,
    ):
        segment.close()
        raise IntegrityError(
            f"The memory file {path} holds step {index.step} of rank {index.rank}, not step "
            f"{shard.snapshot_id.step} of rank {shard.rank}.",
            do="No action is needed: the restore tries the next copy or checkpoint.",
        )
    return segment


def _check_unchanged(segment: ShmSegment, pending: PendingReplica) -> None:
    if segment.version_stamp != pending.seal:
        raise IntegrityError(f"{segment.path} was overwritten by a later save.")
