"""Peer stores keep complete replicas, serve shards, and reject unknown clients."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.snapshot_registry import SnapshotRegistry
from spotfit.checkpoint import peer_store
from spotfit.checkpoint.peer_store import (
    RESPONSE_TIMEOUT_S,
    PeerShardReader,
    PeerStore,
    connect_to_peer,
)
from spotfit.checkpoint.replication import ReplicaStore
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.model.topology import SnapshotId, SnapshotShard
from spotfit.protocol import framing
from spotfit.protocol.agent_peer import ADMITTED, ReadShardBytes, ReadShardIndex, StoreReplica
from spotfit.security.run_key import RunKey, make_tls_contexts
from spotfit.testing.builders import RUN_ID, ManualClock
from tests.unit.agent.pending_replicas import make_pending_replica
from tests.unit.checkpoint.snapshots import LARGE_PIECE_BYTES, random_bytes, write_segment
from tests.unit.worker.agent_end import make_start

SECRET = RunKey(bytes(range(32)), RUN_ID).to_text()
TLS = make_tls_contexts(SECRET, RUN_ID)
STATE = SnapshotId(round=3, step=9)
SHARD = SnapshotShard(snapshot_id=STATE, rank=1, world_size=2)


class Machine:
    """The segments and the peer store of one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.snapshots = SnapshotRegistry(str(folder))
        self.store = PeerStore(
            self.snapshots.replicas,
            self.snapshots.find_shard,
            tls=TLS,
            host="127.0.0.1",
            clock=ManualClock(0.0),
        )

    def saves(self, rank: int, bodies: list[bytes], number: int = 3, step: int = 9) -> Path:
        path = self.folder / f"{number}-{rank}-1.segment"
        return write_segment(path, bodies, rank=rank, world_size=2, step=step)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "ours")
    with contextlib.closing(machine.store):
        yield machine


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "theirs")
    with contextlib.closing(machine.store):
        yield machine


def replicate(sender: Machine, path: Path, other: Machine, report: int = 0) -> None:
    """Send a replica as the sending thread does, and raise its errors."""
    sender.store._send_replica(make_pending_replica(path, other.store.address, report=report))


def test_a_replica_is_stored_and_readable(local: Machine, peer: Machine) -> None:
    bodies = [random_bytes(1, 5 * LARGE_PIECE_BYTES), b"small"]
    replicate(local, local.saves(1, bodies), peer)
    part = SnapshotShard(snapshot_id=STATE, rank=1, world_size=2)
    assert peer.snapshots.scan_shards() == (part,)
    remote = PeerShardReader(peer.store.address, part, TLS.client)
    assert (remote.index.rank, remote.index.step) == (1, 9)
    read = b"".join(remote.fetch(chunk) for chunk in remote.index.chunks)
    for piece, body in zip(remote.index.pieces, bodies, strict=True):
        assert read[piece.start : piece.end] == body


def test_queued_replicas_are_sent_in_order(local: Machine, peer: Machine) -> None:
    kept: queue.SimpleQueue[tuple[int, int, int, str]] = queue.SimpleQueue()
    local.store.on_replica_stored = lambda *stored: kept.put(stored)
    to = peer.store.address
    for number, rank in ((3, 0), (3, 1), (4, 0)):
        local.store.replicate(
            make_pending_replica(local.saves(rank, [b"x"], number=number), to, ranks=(0, 1))
        )
        assert kept.get(timeout=60) == (number, rank, 9, to)


def test_a_stored_replica_is_not_sent_again(local: Machine, peer: Machine) -> None:
    path = local.saves(1, [random_bytes(1, 5 * LARGE_PIECE_BYTES)])
    replicate(local, path, peer)
    (stored_file,) = peer.snapshots.replicas.folder.iterdir()
    before = stored_file.stat().st_ino
    replicate(local, path, peer)
    assert stored_file.stat().st_ino == before
    replicate(local, path, peer, report=1)
    assert [part.snapshot_id.step for part in peer.snapshots.scan_shards()] == [9]


def test_after_a_failure_the_next_replica_is_sent(local: Machine, peer: Machine) -> None:
    kept: queue.SimpleQueue[tuple[int, int, int, str]] = queue.SimpleQueue()
    local.store.on_replica_stored = lambda *stored: kept.put(stored)
    gone = make_pending_replica(local.saves(0, [b"x"]), peer.store.address)
    gone.segment.unlink()
    with pytest.raises(IntegrityError):
        local.store._send_replica(gone)
    local.store.replicate(gone)
    path = local.saves(0, [b"y"], number=4)
    local.store.replicate(make_pending_replica(path, peer.store.address))
    assert kept.get(timeout=60)[0] == 4


def test_replicas_of_earlier_rounds_are_deleted(local: Machine, peer: Machine) -> None:
    replicate(local, local.saves(0, [b"x"]), peer)
    replicate(local, local.saves(0, [b"x"], number=12, step=20), peer)
    assert peer.snapshots.scan_shards() == (
        SnapshotShard(snapshot_id=SnapshotId(round=12, step=20), rank=0, world_size=2),
    )


def test_a_replica_of_an_earlier_round_is_rejected(local: Machine, peer: Machine) -> None:
    replicate(local, local.saves(0, [b"x"], number=4), peer)
    with pytest.raises(
        IntegrityError, match="closed the connection before it confirmed the replica"
    ):
        replicate(local, local.saves(1, [b"x"], number=3), peer)
    assert peer.snapshots.scan_shards() == (
        SnapshotShard(snapshot_id=SnapshotId(round=4, step=9), rank=0, world_size=2),
    )


def test_a_replica_that_became_outdated_during_its_transfer_is_rejected(
    local: Machine, peer: Machine
) -> None:
    with connect_to_peer(peer.store.address, TLS.client) as connection:
        framing.write_frame(
            connection,
            encode(StoreReplica(round=3, report_index=0, rank=1, local_ranks=(1,), size_bytes=1)),
        )
        assert framing.read_frame(connection) == b""
        replicate(local, local.saves(0, [b"x"], number=4), peer)
        framing.write_frame(connection, b"x")
        framing.write_frame(connection, b"")
        assert framing.read_frame(connection) is None
    assert peer.snapshots.scan_shards() == (
        SnapshotShard(snapshot_id=SnapshotId(round=4, step=9), rank=0, world_size=2),
    )


def test_the_last_two_replicas_of_each_rank_are_kept(local: Machine, peer: Machine) -> None:
    for n in range(4):
        path = write_segment(
            local.folder / f"3-1-{n}.segment", [b"x"], rank=1, world_size=2, step=n
        )
        replicate(local, path, peer, report=n)
        for copy in peer.snapshots.replicas.folder.iterdir():
            os.utime(copy, (2**31 - n, 2**31 - n))
    assert [part.snapshot_id.step for part in peer.snapshots.scan_shards()] == [2, 3]


def test_the_last_of_two_saves_of_one_step_is_kept(local: Machine, peer: Machine) -> None:
    for report, body in ((9, b"old"), (10, b"new")):
        name, body_s = f"3-1-{report}.segment", [body]
        path = write_segment(local.folder / name, body_s, world_size=2, rank=1, step=9, save=report)
        replicate(local, path, peer, report=report)
    part = SnapshotShard(snapshot_id=STATE, rank=1, world_size=2)
    assert peer.snapshots.scan_shards() == (part,)
    remote = PeerShardReader(peer.store.address, part, TLS.client)
    assert bytes(remote.fetch(remote.index.chunks[0])) == b"new"


def test_a_broken_connection_does_not_affect_another(peer: Machine, tmp_path: Path) -> None:
    """The second connection replaces a stalled one."""
    body = write_segment(tmp_path / "one", [b"x"], rank=1, world_size=2, step=9).read_bytes()
    keep = encode(
        StoreReplica(round=3, report_index=0, rank=1, local_ranks=(1,), size_bytes=len(body))
    )
    with (
        connect_to_peer(peer.store.address, TLS.client) as stalled,
        connect_to_peer(peer.store.address, TLS.client) as connection,
    ):
        for sender in (stalled, connection):
            framing.write_frame(sender, keep)
            assert framing.read_frame(sender) == b""
        framing.write_frame(stalled, b"")
        assert framing.read_frame(stalled) is None
        framing.write_frame(connection, body)
        framing.write_frame(connection, b"")
        assert framing.read_frame(connection) == b""
    assert peer.snapshots.scan_shards() == (SnapshotShard(snapshot_id=STATE, rank=1, world_size=2),)


def test_a_segment_overwritten_during_its_transfer_is_not_stored(
    local: Machine, peer: Machine
) -> None:
    path = local.saves(0, [random_bytes(1, 5 * LARGE_PIECE_BYTES)])

    class OverwritingClock(ManualClock):
        def wait(self, seconds: float) -> None:
            path.write_bytes(bytes(path.stat().st_size))

    local.store._clock = OverwritingClock(0.0)
    with pytest.raises(IntegrityError, match="overwritten by a later save"):
        replicate(local, path, peer)
    assert peer.snapshots.scan_shards() == ()


def test_rolled_back_replicas_are_deleted_and_rejected(local: Machine, peer: Machine) -> None:
    """Step 9 is committed; the upload of 12 failed, but each machine has the other's replica."""
    machines = local, peer
    for rank, (sender, other) in enumerate((machines, machines[::-1])):
        sender.snapshots.prepare_start(make_start(round=3, rank=rank, world_size=2))
        for report, step in ((4, 9), (5, 12)):
            segment = sender.folder / f"3-{rank}-{report}.segment"
            replicate(
                sender,
                write_segment(segment, [b"x"], rank=rank, world_size=2, step=step),
                other,
                report,
            )
            segment.unlink()
    assert [len(sender.snapshots.scan_shards()) for sender in machines] == [2, 2]
    for sender in machines:
        sender.snapshots.roll_back(6)
    assert [sender.snapshots.scan_shards() for sender in machines] == [(), ()]
    later = write_segment(local.folder / "3-0-6.segment", [b"x"], world_size=2, step=12)
    with pytest.raises(
        IntegrityError, match="closed the connection before it confirmed the replica"
    ):
        replicate(local, later, peer, 5)
    replicate(local, later, peer, 6)
    assert peer.snapshots.scan_shards() == (
        SnapshotShard(snapshot_id=SnapshotId(round=3, step=12), rank=0, world_size=2),
    )


def test_a_partial_replica_is_discarded(peer: Machine) -> None:
    with connect_to_peer(peer.store.address, TLS.client) as connection:
        framing.write_frame(
            connection,
            encode(StoreReplica(round=3, report_index=1, rank=0, local_ranks=(0,), size_bytes=10)),
        )
        assert framing.read_frame(connection) == b""
        framing.write_frame(connection, b"half")
        framing.write_frame(connection, b"")
        assert framing.read_frame(connection) is None, "it is rejected"
    assert list(peer.snapshots.replicas.folder.iterdir()) == []


def test_a_replica_for_a_removed_folder_is_rejected(local: Machine, peer: Machine) -> None:
    """No agent would free its memory."""
    segment = local.saves(1, [b"small"])
    shutil.rmtree(peer.folder)
    with pytest.raises((OSError, IntegrityError)):
        replicate(local, segment, peer)
    assert not peer.folder.exists()


def test_a_missing_shard_raises_integrity_error(peer: Machine) -> None:
    with pytest.raises(IntegrityError, match="does not hold that snapshot any more"):
        PeerShardReader(
            peer.store.address, SnapshotShard(snapshot_id=STATE, rank=0, world_size=2), TLS.client
        )
    peer.saves(0, [b"x"])
    peer.snapshots.scan_shards()
    remote = PeerShardReader(
        peer.store.address, SnapshotShard(snapshot_id=STATE, rank=0, world_size=2), TLS.client
    )
    (peer.folder / "3-0-1.segment").unlink()
    with pytest.raises(IntegrityError, match=r"in the memory of .* cannot be read"):
        remote.fetch(remote.index.chunks[0])


def test_an_unreachable_machine_raises_integrity_error(peer: Machine) -> None:
    peer.store.close()
    with pytest.raises(IntegrityError, match=peer.store.address):
        PeerShardReader(
            peer.store.address, SnapshotShard(snapshot_id=STATE, rank=0, world_size=2), TLS.client
        )


@pytest.mark.parametrize(("host", "prefix"), [("localhost", "127.0.0.1:"), ("::1", "[::1]:")])
def test_the_peer_store_listens_at_the_given_address(
    tmp_path: Path, host: str, prefix: str
) -> None:
    peer_server = PeerStore(
        ReplicaStore(tmp_path), lambda _: None, tls=TLS, host=host, clock=ManualClock(0.0)
    )
    with contextlib.closing(peer_server), connect_to_peer(peer_server.address, TLS.client):
        assert peer_server.address.startswith((prefix, "[::1]:"))


def test_a_client_without_the_run_key_is_rejected(peer: Machine) -> None:
    peer.saves(0, [b"x"])
    peer.snapshots.scan_shards()
    other_run_tls = make_tls_contexts(RunKey(bytes(32), RUN_ID).to_text(), RUN_ID)
    with pytest.raises(IntegrityError):
        PeerShardReader(
            peer.store.address,
            SnapshotShard(snapshot_id=STATE, rank=0, world_size=2),
            other_run_tls.client,
        )
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.verify_mode = ssl.CERT_NONE
    with pytest.raises(IntegrityError):
        PeerShardReader(
            peer.store.address, SnapshotShard(snapshot_id=STATE, rank=0, world_size=2), anonymous
        )


def test_the_version_stamp_changes_when_a_segment_is_overwritten(tmp_path: Path) -> None:
    with ShmSegment.open(write_segment(tmp_path / "one", [b"x"], step=1)) as sender:
        assert sender.version_stamp == sender.version_stamp
        with ShmSegment.open(write_segment(tmp_path / "two", [b"x"], step=2)) as two:
            assert sender.version_stamp != two.version_stamp


def test_a_replaced_shard_is_not_served(local: Machine, peer: Machine) -> None:
    """The client knows an earlier index, and would combine two steps."""
    replicate(local, local.saves(1, [b"first"]), peer)
    part = SnapshotShard(snapshot_id=STATE, rank=1, world_size=2)
    assert peer.snapshots.scan_shards() == (part,)
    remote = PeerShardReader(peer.store.address, part, TLS.client)
    for report in (1, 2):
        (local.folder / "3-1-1.segment").unlink()
        replicate(local, local.saves(1, [b"later"], step=12), peer, report)
    with pytest.raises(IntegrityError, match=r"in the memory of .* cannot be read"):
        remote.fetch(remote.index.chunks[0])
    with pytest.raises(IntegrityError, match=r"in the memory of .* cannot be read"):
        PeerShardReader(peer.store.address, part, TLS.client)


def test_requests_are_sent_without_delay(peer: Machine) -> None:
    with connect_to_peer(peer.store.address, TLS.client) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_waits_for_a_free_connection_slot(local: Machine, peer: Machine) -> None:
    """An error would make all ranks abandon the state in memory."""
    replicate(local, local.saves(1, [b"small"]), peer)
    part = SnapshotShard(snapshot_id=STATE, rank=1, world_size=2)
    assert peer.snapshots.scan_shards() == (part,)
    with contextlib.ExitStack() as places:
        connections = [
            places.enter_context(connect_to_peer(peer.store.address, TLS.client))
            for _ in range(peer_store._MAX_CONNECTIONS)
        ]
        host, _, port = peer.store.address.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as plain:
            framing.write_frame(connections[0], encode(ReadShardIndex(shard=part)))
            assert framing.read_frame(connections[0]), "the connection is closed after the response"
            with TLS.client.wrap_socket(plain) as late:
                assert framing.read_frame(late) == ADMITTED
                framing.write_frame(late, encode(ReadShardIndex(shard=part)))
                assert framing.read_frame(late)


@pytest.mark.real_time("the server closes an idle socket after a timeout")
def test_an_idle_connection_is_closed(peer: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "_REQUEST_TIMEOUT_S", 0.01)
    host, _, port = peer.store.address.rpartition(":")
    with socket.create_connection((host, int(port)), RESPONSE_TIMEOUT_S / 2) as silent:
        assert silent.recv(1) == b""


def test_idle_connections_without_the_key_hold_no_slot(local: Machine, peer: Machine) -> None:
    replicate(local, local.saves(1, [b"small"]), peer)
    [part] = peer.snapshots.scan_shards()
    host, _, port = peer.store.address.rpartition(":")
    with contextlib.ExitStack() as idle:
        for _ in range(3 * peer_store._MAX_PENDING_CONNECTIONS):
            idle.enter_context(socket.create_connection((host, int(port))))
        with connect_to_peer(
            peer.store.address, TLS.client, admission_timeout_s=30.0
        ) as connection:
            framing.write_frame(connection, encode(ReadShardIndex(shard=part)))
            assert framing.read_frame(connection)


def test_the_oldest_connection_in_its_handshake_gives_way(peer: Machine) -> None:
    host, _, port = peer.store.address.rpartition(":")
    with contextlib.ExitStack() as idle:
        connections = [
            idle.enter_context(socket.create_connection((host, int(port)), 60.0))
            for _ in range(peer_store._MAX_PENDING_CONNECTIONS + 1)
        ]
        assert connections[0].recv(1) == b""
        connections[-1].settimeout(0)
        with pytest.raises(BlockingIOError):
            connections[-1].recv(1)


# A peer store in a process that has descriptors for ten more connections.
PEER_STORE_WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from tests.unit.checkpoint.test_peer_store_peer_server import Machine
from spotfit.host import log
from spotfit.host.system import SystemClock
machine = Machine(Path(sys.argv[1]))
machine.store._clock = SystemClock()  # it waits until an aborted connection is closed
machine.saves(1, [b"x"])
machine.snapshots.scan_shards()
limit = max(map(int, os.listdir("/proc/self/fd"))) + 12
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
log.use_default_handler()
print(machine.store.address, flush=True)
sys.stdin.read()
"""


def test_without_descriptors_a_peer_store_continues_to_accept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PEER_STORE_WITH_FEW_DESCRIPTORS, str(tmp_path / "peer")]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as server,
        contextlib.ExitStack() as idle,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        host, _, port = address.rpartition(":")
        for _ in range(40):
            idle.enter_context(socket.create_connection((host, int(port))))
        part = SnapshotShard(snapshot_id=STATE, rank=1, world_size=2)
        with connect_to_peer(address, TLS.client, admission_timeout_s=60.0) as connection:
            framing.write_frame(connection, encode(ReadShardIndex(shard=part)))
            assert framing.read_frame(connection)
        server.communicate("")


@pytest.mark.parametrize(
    "request_",
    [
        StoreReplica(round=3, report_index=0, rank=-1, local_ranks=(-1,), size_bytes=1),
        StoreReplica(round=3, report_index=0, rank=1, local_ranks=(0,), size_bytes=1),
        StoreReplica(round=3, report_index=0, rank=1, local_ranks=(1,), size_bytes=-1),
        ReadShardBytes(shard=SHARD, offset=-1, size_bytes=1),
        ReadShardBytes(shard=SHARD, offset=0, size_bytes=2**40),
        ReadShardBytes(shard=SHARD, offset=2**40, size_bytes=1),
        b"\xff",
        b"[" * 5_000,
        b'{"type":"dance"}',
    ],
)
def test_an_impossible_request_closes_only_its_connection(
    local: Machine, peer: Machine, request_: bytes | StoreReplica | ReadShardBytes
) -> None:
    replicate(local, local.saves(1, [b"small"]), peer)
    [part] = peer.snapshots.scan_shards()
    assert part == SHARD
    body = request_ if isinstance(request_, bytes) else encode(request_)
    with connect_to_peer(peer.store.address, TLS.client) as connection:
        framing.write_frame(connection, body)
        assert framing.read_frame(connection) is None
    assert PeerShardReader(peer.store.address, part, TLS.client).index.step == STATE.step


def test_a_replica_that_is_larger_than_announced_is_not_stored(peer: Machine) -> None:
    request = StoreReplica(round=3, report_index=0, rank=1, local_ranks=(1,), size_bytes=10)
    with connect_to_peer(peer.store.address, TLS.client) as connection:
        framing.write_frame(connection, encode(request))
        assert framing.read_frame(connection) == b""
        framing.write_frame(connection, b"x" * 11)
        assert framing.read_frame(connection) is None
    assert list(peer.snapshots.replicas.folder.glob("*.coming")) == []
