"""Simulated snapshots: real segments, the production registry and uploads, and a replica on a peer.

Only time, connections and workers are simulated.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from spotfit.agent.snapshot_registry import SnapshotRegistry
from spotfit.checkpoint.format import SnapshotIndex, TensorPiece, split_into_chunks
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.peer_store import OnReplicaStoredFn, open_shard
from spotfit.checkpoint.reader import MemoryShardReader, SavedState, open_committed_snapshot
from spotfit.checkpoint.replication import PendingReplica, ReplicationQueue
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.writer import decode_upload_job, upload_snapshot
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.host.memory import SHARED_MEMORY_DIR
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.topology import SnapshotShard
from spotfit.protocol.worker_agent import StartWorker
from spotfit.security.run_key import RunKey
from spotfit.sidecar.uploader import QueuedUpload
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.faults import NO_FAULTS, ActiveFaults, FaultyConnection
from spotfit_localsim.virtual.sim_store import SimBucket, SimStore

_INDEX_BYTES = 4096
_BODY_BYTES = 64

SimRoutine = Generator[float | None, None, None]
"""A generator that yields for how many seconds it is busy, or None until it is resumed."""


class SimSavedState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a rank, which is also its metrics."""

    step: int
    link: str
    positions: str = ""
    """Of a snapshot: JSON of the positions in the datasets."""


_state_decoder = decoder(SimSavedState)


class ReplicationEnvironment(Protocol):
    """The clock and the network between the machines."""

    def now(self) -> float: ...

    def schedule_after(self, seconds: float, callback: Callable[[], None]) -> object: ...

    def draw_replication_s(self) -> float:
        """Draw the duration of a transfer."""
        ...

    def is_reachable(self, sender: str, receiver: str) -> bool: ...


class SimNodeMemory:
    """The snapshots and replicas on one machine; its name is the address of its peer store."""

    def __init__(
        self,
        name: str,
        environment: ReplicationEnvironment,
        peers: dict[str, SimNodeMemory],
        on_replica_kept: OnReplicaStoredFn = lambda *_: None,
    ) -> None:
        """`on_replica_kept` is called when a peer has stored a replica of this machine."""
        self.name = name
        self._environment = environment
        self._peers = peers
        self._on_replica_kept = on_replica_kept
        # Real files in shared memory: the registry under test opens them as in production.
        parent = SHARED_MEMORY_DIR if SHARED_MEMORY_DIR.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="spotfit-sim-", dir=parent))
        self.snapshots = SnapshotRegistry(str(self._folder))

        def enqueue(pending: PendingReplica) -> None:
            self._queue.add(pending)
            self._send_next()

        self.snapshots.replicate = enqueue
        # One transfer at a time, as in production; a replica is dropped if its segment changes
        # before it is sent.
        self._queue = ReplicationQueue()
        self._is_sending = False
        peers[name] = self

    def create_segment(self, name: str) -> ShmSegment:
        """Create a segment for a worker."""
        return ShmSegment.create(self._folder / f"{name}.segment", _BODY_BYTES, _INDEX_BYTES)

    def close(self) -> None:
        """Remove everything: the machine is terminated."""
        # Before the files: a peer that still reads them keeps its open file descriptors.
        self._peers.pop(self.name, None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send_next(self) -> None:
        pending = None if self._is_sending else self._queue.pop()
        if pending is None:
            return

        def finish() -> None:
            self._is_sending = False
            # The machine was terminated during the transfer.
            if self._peers.get(self.name) is not self:
                return
            if not self._deliver(pending):
                self._queue.mark_failed(pending)
            self._send_next()

        self._is_sending = True
        self._environment.schedule_after(self._environment.draw_replication_s(), finish)

    def _deliver(self, pending: PendingReplica) -> bool:
        peer = self._peers.get(pending.target)
        # Rerouted meanwhile: the target got a preemption notice or was lost.
        if self._queue.is_abandoned(pending):
            return False
        if peer is None or not self._environment.is_reachable(self.name, pending.target):
            return False
        try:
            source = ShmSegment.open(pending.segment)
        except IntegrityError:
            return False
        with source:
            # The worker writes its next snapshot into the segment: half of it would be sent.
            if source.version_stamp != pending.seal:
                return False
            is_kept = peer.store_replica(pending, bytes(source.buffer))
            if is_kept:
                self._on_replica_kept(
                    pending.replica.round, pending.replica.rank, source.index().step, pending.target
                )
            return is_kept

    def store_replica(self, pending: PendingReplica, body: bytes) -> bool:
        """Store a replica of a peer; return whether it is kept."""
        store = self.snapshots.replicas
        # A repeated transfer succeeds without a second copy.
        if pending.replica in store.replicas:
            return True
        if not store.reserve(pending.replica, pending.local_ranks):
            return False
        # Under another name until it is complete: readers never see a partial replica.
        draft = store.folder / f"{pending.replica.file_name}.coming"
        draft.write_bytes(body)
        return store.put(draft, pending.replica)


def fill_segment(segment: ShmSegment, start: StartWorker, state: SimSavedState) -> None:
    """Write the state into an invalidated segment and publish it."""
    size_bytes = _BODY_BYTES
    pieces = (
        TensorPiece(
            key=(f"{start.rank}",),
            dtype="uint8",
            shape=(size_bytes,),
            offsets=(0,),
            sizes=(size_bytes,),
            start=0,
            size_bytes=size_bytes,
        ),
    )
    segment.payload[:size_bytes] = state_bytes(start.rank, state)
    segment.publish(
        SnapshotIndex(
            rank=start.rank,
            world_size=start.world_size,
            step=state.step,
            pieces=pieces,
            encoded_rank_state=encode(state),
            chunks=split_into_chunks(pieces),
        )
    )


def state_bytes(rank: int, state: SimSavedState) -> bytes:
    """Return the payload of a rank's state; it differs for every step."""
    return f"{rank} {state.step} {state.link}".ljust(_BODY_BYTES).encode()


def read_memory_state(
    start: StartWorker,
    own_memory: SimNodeMemory,
    peers: Mapping[str, SimNodeMemory],
    is_reachable: Callable[[str], bool],
) -> SavedState:
    """Open the in-memory snapshot that a round starts from, reading missing shards from peers.

    Raises `IntegrityError` if a shard is missing, as for a worker that asks a peer store.
    """
    assert start.memory_snapshot is not None
    readers = []
    for rank, path in enumerate(start.local_segments):
        shard = SnapshotShard(
            snapshot_id=start.memory_snapshot, rank=rank, world_size=len(start.local_segments)
        )
        if path:
            readers.append(MemoryShardReader(ShmSegment.open(Path(path))))
            continue
        address = start.peer_store_addresses[rank]
        peer = peers.get(address)
        shard_path = peer.snapshots.find_shard(shard) if peer and is_reachable(address) else None
        if shard_path is None:
            raise IntegrityError(
                f"{own_memory.name} cannot read the shard of rank {rank} from {address}."
            )
        with open_shard(shard_path, shard) as segment:
            readers.append(MemoryShardReader(ShmSegment.open(segment.path)))
    return SavedState(readers, "in memory")


def decode_saved_state(saved: SavedState) -> SimSavedState | str:
    """Return the state, or what is wrong with it. Raises `IntegrityError` if corrupt."""
    states = {_state_decoder.decode(index.encoded_rank_state) for index in saved.indices}
    # Shards of two steps were combined.
    if len(states) > 1:
        return f"the ranks saved different states: {states}"
    (state,) = states
    for rank, reader in saved.readers.items():
        for chunk in reader.index.chunks:
            # The payload differs for each rank and step, so that swapped chunks are detected.
            if bytes(reader.fetch(chunk)) != state_bytes(rank, state):
                return f"the bytes of rank {rank} are not those of step {state.step}"
    return state


def read_bucket_state(objects: Mapping[str, bytes], name: str) -> SimSavedState | str:
    """Return the state in a checkpoint, or why it cannot be read."""
    # A copy of the bucket: the checker's reads are neither counted nor observed.
    bucket = SimBucket()
    bucket.objects = dict(objects)
    try:
        saved = open_committed_snapshot(FaultFreeStore(bucket, "checker"), name)
        return decode_saved_state(saved) if saved is not None else "no snapshot"
    except IntegrityError as error:
        return error.message


def simulate_upload(
    bucket: SimBucket,
    run_key: RunKey,
    *,
    writer: str,
    queued_upload: QueuedUpload,
    duration_s: float,
    outcomes: list[Manifest | str],
) -> SimRoutine:
    """Upload as the uploader process does; a killed upload leaves a part of the objects."""
    job = decode_upload_job(queued_upload.request.upload_job)
    assert job is not None
    store = AuthenticatedStore(FaultFreeStore(bucket, writer), run_key)
    try:
        yield duration_s / 2
        with suppress(_UploadInterrupted):
            # A first attempt that stops after one object: its leftovers must not disturb the
            # second.
            upload_snapshot(AuthenticatedStore(InterruptedStore(bucket, writer), run_key), job)
        yield duration_s / 2
        outcomes.append(upload_snapshot(store, job))
    except IntegrityError as torn:
        outcomes.append(torn.message)


class FaultFreeStore(SimStore):
    """A store without latency and faults."""

    def __init__(self, bucket: SimBucket, writer: str) -> None:
        self._bucket = bucket
        self._prefix = ""
        self._writer = writer
        # Without faults nothing is drawn from the stream.
        stream = SeededStreams(0).stream("fault-free store")
        self._connection = FaultyConnection(ActiveFaults(NO_FAULTS), stream)

    def _send_request(self, kind: str, operation: Callable[[], bool] | None = None) -> None:
        pass

    def _receive_response(self) -> None:
        pass


class _UploadInterrupted(Exception):  # noqa: N818  # control flow, not an error
    """Stops an upload after its first object."""


class InterruptedStore(FaultFreeStore):
    """A store that accepts one write and then raises `_UploadInterrupted`."""

    _has_written = False

    def _write(self, key: str, body: bytes) -> bool:
        if self._has_written:
            raise _UploadInterrupted
        self._has_written = True
        return super()._write(key, body)
