"""ProcessWorkerPool: environment, routing of frames, liveness and failed starts."""

import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from spotfit.agent.log_shipper import LogShipper
from spotfit.agent.ports import (
    EnvironmentBroken,
    ReplicaConfirmed,
    WorkerExited,
    WorkerFramesReceived,
    WorkerLivenessChanged,
    WorkerPoolEvent,
)
from spotfit.agent.worker_pool import ProcessWorkerPool
from spotfit.code.code_bundle import CodeBundleRef, upload_code_bundle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import InfrastructureError, IntegrityError, TransientStoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import ForkServerPool, RuntimeKey, build_worker_environment
from spotfit.host.event_loop import EventLoop
from spotfit.ledger import keys
from spotfit.model.events import FailureCause
from spotfit.model.spec import HangDetectionConfig, RunSpec
from spotfit.protocol.agent_sidecar import UploadDone, UploadError
from spotfit.protocol.framing import write_frame
from spotfit.protocol.worker_agent import (
    CommitConfirmed,
    FunctionStarted,
    RequestUpload,
    RolledBack,
    SnapshotReport,
    StartWorker,
    WorkerHeartbeat,
    WorkerRaised,
    decode_worker_message,
    message_tag,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar.uploader import QueuedUpload
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN_ID
from tests.unit.agent.transports import SkippableClock, run_loop_until
from tests.unit.host.descriptors import no_free_descriptors
from tests.unit.protocol.invalid_frames import INVALID_FRAMES

KEY = RunKey(b"s" * 32, RUN_ID)
MISSING_BUNDLE = {"sha256": "0" * 64, "size_bytes": 1, "function_name": "train"}


def test_several_workers_get_one_openmp_thread_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert build_worker_environment(1, {}) == {}
    assert build_worker_environment(4, {"A": "b"}) == {"OMP_NUM_THREADS": "1", "A": "b"}
    assert build_worker_environment(4, {"OMP_NUM_THREADS": "3"}) == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert build_worker_environment(4, {}) == {}


class UnreliableStore(MemoryStore):
    """Counts reads, and fails them while `is_down`."""

    def __init__(self) -> None:
        super().__init__(RootUrl.parse("memory://pool"))
        self.is_down = False
        self.reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        if self.is_down:
            raise TransientStoreError("the bucket is down")
        return super().get(key)


@pytest.fixture
def store() -> UnreliableStore:
    return UnreliableStore()


def test_workers_get_the_credentials_of_their_own_run_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", "of this run")
    key = RuntimeKey.of("none", sys.executable, build_worker_environment(1, {}))
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", "of the next")
    assert key.environment()["SPOTFIT_STORAGE_KEYS"] == "of this run"
    other = RuntimeKey.of("none", sys.executable, {})
    assert "SPOTFIT_STORAGE_KEYS" not in other.environment()
    assert key != RuntimeKey.of("none", sys.executable, build_worker_environment(1, {})), (
        "one fork server cannot serve both"
    )


@pytest.fixture
def pool(
    tmp_path: Path, store: UnreliableStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProcessWorkerPool]:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    with make_pool(store, tmp_path) as pool:
        yield pool


@contextmanager
def make_pool(store: UnreliableStore, scratch: Path) -> Iterator[ProcessWorkerPool]:
    loop, fork_servers = EventLoop(SkippableClock()), ForkServerPool()
    logs = LogShipper(store, AgentId("a"), wall_ms=lambda: 0, clock=loop.clock, flush_interval_s=0)
    pool = ProcessWorkerPool(
        loop, fork_servers, store=store, key=KEY, logs=logs, scratch=str(scratch), slots=1
    )
    yield pool
    pool.close()
    run_loop_until(loop, lambda: pool.live_process_count == 0)
    logs.close()
    loop.close()


def make_start(rank: int) -> StartWorker:
    plain = {
        "run_id": "r",
        "run_name": "n",
        "round": 3,
        "rank": rank,
        "local_rank": rank,
        "world_size": 2,
        "local_world_size": 2,
        "node_rank": 0,
        "host": "127.0.0.1",
        "storage_url": "memory://pool",
        "framework": "none",
        "framework_options": {},
        "code_bundle": MISSING_BUNDLE,
    }
    return msgspec.convert(plain, StartWorker)


def spec(bundle: CodeBundleRef | None = None) -> RunSpec:
    plain = MISSING_BUNDLE if bundle is None else msgspec.to_builtins(bundle)
    return RunSpec(
        run_id=RunId("r"),
        name="n",
        fit_id="f",
        min_workers=2,
        max_workers=2,
        code_bundle=plain,
        storage_url="memory://pool",
    )


def events_of(pool: ProcessWorkerPool, count: int) -> list[WorkerPoolEvent]:
    events: list[WorkerPoolEvent] = []
    run_loop_until(pool._loop, lambda: len(events.__iadd__(pool.drain_events())) >= count)
    return events


def test_a_missing_bundle_fails_every_rank(pool: ProcessWorkerPool) -> None:
    pool.prepare(spec())
    pool.start([make_start(0), make_start(1)])
    assert pool.has_workers
    events = events_of(pool, 5)
    received = [event for event in events if isinstance(event, WorkerFramesReceived)]
    assert [event.rank for event in received] == [0, 1]
    assert all(json.loads(bytes(event.frames[0]))["type"] == "worker_raised" for event in received)
    assert [event.rank for event in events if isinstance(event, WorkerExited)] == [0, 1]
    assert not pool.has_workers


def test_a_queued_worker_that_is_killed_is_reported_as_exited(pool: ProcessWorkerPool) -> None:
    pool.start([make_start(0)])
    pool.send(0, CommitConfirmed(checkpoint_name="c", metrics={}))
    pool.send(7, CommitConfirmed(checkpoint_name="c", metrics={}))
    pool.kill_workers()
    assert pool.drain_events() == [
        WorkerExited(3, 0, "was killed by SIGKILL", is_clean=False, killed_by_agent=True)
    ]
    assert not pool.has_workers


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_sigkill_that_spotfit_did_not_send_is_explained_by_memory(
    pool: ProcessWorkerPool, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    sampled: list[float] = []
    clock = pool._loop.clock
    assert isinstance(clock, SkippableClock)
    monkeypatch.setattr(pool._memory, "sample", lambda: sampled.append(clock.now()))
    monkeypatch.setattr(pool._memory, "explain_kill", lambda: ", for lack of memory")
    monkeypatch.setattr(pool._launcher, "launch", lambda _: None)
    pool.start([make_start(0)])
    clock.skipped_s += 1.01
    pool._loop.run_once(0)
    assert len(sampled) == 2
    child = pool._workers[0]
    child.was_killed = is_ordered
    child.on_reaped(signal.SIGKILL)
    run_loop_until(pool._loop, lambda: not pool.has_workers)
    [exited] = pool.drain_events()
    assert isinstance(exited, WorkerExited)
    explained = "was killed by SIGKILL, for lack of memory"
    assert exited.description == ("was killed by SIGKILL" if is_ordered else explained)


def test_a_worker_that_cannot_get_descriptors_is_a_failure_of_the_platform(
    pool: ProcessWorkerPool, store: UnreliableStore
) -> None:
    pool._launcher._runtime_key = RuntimeKey.of("none", sys.executable, {})
    with no_free_descriptors():
        pool.start([make_start(0)])
    received, exited = pool.drain_events()
    assert isinstance(received, WorkerFramesReceived)
    [frame] = received.frames
    raised = decode_worker_message(frame)
    assert isinstance(raised, WorkerRaised)
    assert (raised.cause, raised.is_permanent) == (FailureCause.PLATFORM, False)
    assert "Too many open files" in raised.traceback_text
    assert isinstance(exited, WorkerExited)
    assert not pool.has_workers


def message_kind(frame: bytes) -> str:
    """Return the kind that the message about an invalid frame names."""
    try:
        return message_tag(frame)[:40]
    except IntegrityError:
        return "is not a message of spotfit"


# --- invalid frames -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", INVALID_FRAMES)
def test_an_invalid_frame_fails_its_worker_with_the_kind_of_the_message(
    pool: ProcessWorkerPool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pool._launcher, "launch", lambda _: None)
    pool.start([make_start(0)])
    child = pool._workers[0]
    valid = encode(FunctionStarted())
    with socket.socket(fileno=os.dup(child.descriptors[0])) as worker_end:
        send = partial(write_frame, worker_end)
        # In a thread: a large frame needs a reader.
        sender = threading.Thread(target=lambda: [send(valid), send(INVALID_FRAMES[name])])
        sender.start()
        run_loop_until(pool._loop, lambda: child.is_kill_requested)
        sender.join()
    child.on_reaped(signal.SIGKILL)
    received, exited = pool.drain_events()
    assert received == WorkerFramesReceived(3, 0, [msgspec.Raw(valid)]), "the frame before counts"
    assert isinstance(exited, WorkerExited)
    assert not exited.killed_by_agent
    assert exited.description.startswith("sent an invalid message: ")
    assert message_kind(INVALID_FRAMES[name]) in exited.description


def test_a_snapshot_at_another_place_fails_its_worker(pool: ProcessWorkerPool) -> None:
    report = SnapshotReport(report_index=0, metrics=msgspec.Raw(b"{}"), segment="/shm/x")
    with pytest.raises(IntegrityError, match="'snapshot_report' is invalid"):
        pool._on_worker_messages(3, 0, [encode(report)])


# --- liveness -----------------------------------------------------------------------------------


def test_heartbeats_are_not_forwarded(pool: ProcessWorkerPool) -> None:
    pool._on_worker_messages(3, 0, [encode(WorkerHeartbeat()), encode(FunctionStarted())])
    pool._on_worker_messages(3, 0, [encode(WorkerHeartbeat())])
    assert pool.drain_events() == [
        WorkerFramesReceived(3, 0, [msgspec.Raw(encode(FunctionStarted()))])
    ]


def test_rollbacks_are_not_forwarded(
    pool: ProcessWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled_back: list[int] = []
    monkeypatch.setattr(pool._snapshots, "roll_back", rolled_back.append)
    pool._on_worker_messages(3, 0, [encode(RolledBack(before_report_index=6))])
    assert rolled_back == [6]
    assert pool.drain_events() == []


def test_a_silent_worker_is_reported_until_it_sends_again(
    pool: ProcessWorkerPool,
) -> None:
    pool.prepare(
        msgspec.structs.replace(spec(), hang_detection=HangDetectionConfig(worker_timeout_s=40.0))
    )
    pool._round = 3
    pool._on_worker_messages(3, 1, [encode(WorkerHeartbeat())])
    clock = pool._loop.clock
    assert isinstance(clock, SkippableClock)
    changes: list[WorkerLivenessChanged] = []

    def poll() -> bool:
        clock.skipped_s += 5.0
        changes.extend(
            event for event in pool.drain_events() if isinstance(event, WorkerLivenessChanged)
        )
        return bool(changes)

    run_loop_until(pool._loop, poll)
    assert (changes[0].round, changes[0].rank) == (3, 1)
    assert changes[0].silent_s > 40.0
    pool._on_worker_messages(3, 1, [encode(WorkerHeartbeat())])
    assert [one for one in pool.drain_events() if isinstance(one, WorkerLivenessChanged)] == [
        WorkerLivenessChanged(3, 1, 0.0)
    ]


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_a_failed_upload_of_an_exited_worker_is_written_to_its_output(
    pool: ProcessWorkerPool, monkeypatch: pytest.MonkeyPatch, *, is_snapshot: bool
) -> None:
    lines: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pool._logs, "add_line", lambda *line: lines.append(line))
    order = QueuedUpload(
        3, 1, RequestUpload(report_index=0, checkpoint_name="c7", upload_job=b""), is_snapshot
    )
    pool._on_upload_finished(
        order, UploadError(job_id=1, traceback_text="Traceback\n  …\nthe bucket is unavailable\n")
    )
    ((*source, text),) = lines
    assert source == [3, 1, "err"]
    assert text.startswith("[spotfit] checkpoint c7 is lost")
    assert text.endswith("the bucket is unavailable")


def test_the_upload_of_an_exited_worker_does_not_count_as_its_heartbeat(
    pool: ProcessWorkerPool,
) -> None:
    pool.prepare(
        msgspec.structs.replace(spec(), hang_detection=HangDetectionConfig(worker_timeout_s=40.0))
    )
    pool._round = 3
    request = RequestUpload(report_index=0, checkpoint_name="c7", upload_job=b"")
    done = UploadDone(job_id=1, size_bytes=8, step=2)
    pool._on_upload_finished(QueuedUpload(3, 1, request, is_snapshot=True), done)
    assert pool._liveness is not None
    now = pool._loop.clock.now()
    assert not any(pool._liveness.find_unresponsive(now + 10 * check) for check in range(50))


class RecordingWorker:
    """A running worker that records what the pool does with it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.is_killed = False

    def send(self, body: bytes) -> None:
        self.received.append(body)

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("outcome", "is_snapshot", "reported", "sent", "is_killed"),
    [
        (UploadDone(job_id=1, size_bytes=8, step=2), False, "save_completed", "uploaded", False),
        (UploadError(job_id=1, traceback_text="no"), True, "save_failed", "upload_failed", False),
        (UploadError(job_id=1, traceback_text="no"), False, "worker_raised", None, True),
    ],
)
def test_the_end_of_an_upload_is_reported_to_leader_and_worker(
    pool: ProcessWorkerPool,
    outcome: UploadDone | UploadError,
    is_snapshot: bool,
    reported: str,
    sent: str | None,
    is_killed: bool,
) -> None:
    worker = RecordingWorker()
    pool._workers[1] = cast("ChildProcess", worker)
    request = RequestUpload(report_index=0, checkpoint_name="c7", upload_job=b"")
    pool._on_upload_finished(QueuedUpload(3, 1, request, is_snapshot), outcome)
    (event,) = pool.drain_events()
    assert isinstance(event, WorkerFramesReceived)
    assert [message_tag(bytes(frame)) for frame in event.frames] == [reported]
    assert [message_tag(frame) for frame in worker.received] == ([sent] if sent else [])
    assert worker.is_killed == is_killed


def test_a_replica_that_is_confirmed_before_events_are_drained_is_not_lost(
    pool: ProcessWorkerPool,
) -> None:
    pool.record_replica(3, 1, 9, "10.0.0.1:5")
    assert pool.drain_events() == [], "the event loop records it"
    assert events_of(pool, 1) == [ReplicaConfirmed(3, 1, step=9, peer_store="10.0.0.1:5")]


@pytest.mark.parametrize(("rank", "reports"), [(0, 1), (1, 0)])
def test_slow_starts_are_reported_by_the_node_with_rank_0(
    pool: ProcessWorkerPool, monkeypatch: pytest.MonkeyPatch, rank: int, reports: int
) -> None:
    lines: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pool._logs, "add_line", lambda *line: lines.append(line))
    pool._launcher._on_slow_starts("jax is not preloaded")
    pool.start([make_start(rank)])
    assert lines == [(-1, keys.RUN_RANK, "err", "jax is not preloaded")] * reports


def test_dump_stacks_without_workers_does_nothing(pool: ProcessWorkerPool) -> None:
    pool.dump_stacks(7)
    assert pool.drain_events() == []


# --- causes of failures ------------------------------------------------------------------------


def failure_in(pool: ProcessWorkerPool, rank: int = 0) -> WorkerRaised:
    """Return the failure of a worker that cannot be started."""
    pool.start([make_start(rank)])
    events: list[WorkerPoolEvent] = []
    run_loop_until(
        pool._loop, lambda: not pool.has_workers and bool(events.__iadd__(pool.drain_events()))
    )
    (received,) = [event for event in events if isinstance(event, WorkerFramesReceived)]
    return decoder(WorkerRaised).decode(received.frames[0])


def test_a_permanent_unpack_error_is_reported_before_any_start(
    pool: ProcessWorkerPool, store: UnreliableStore
) -> None:
    store.is_down = True
    pool.prepare(spec())
    run_loop_until(pool._loop, lambda: not pool._launcher._is_unpacking)
    assert pool.drain_events() == [], "a temporary error"
    store.is_down = False
    pool.prepare(spec())
    (broken,) = events_of(pool, 1)
    assert isinstance(broken, EnvironmentBroken)
    assert (broken.raised.cause, broken.raised.is_permanent) == (FailureCause.WORKER, True)
    assert broken.raised == failure_in(pool), "the failure of each worker"


def test_an_unavailable_bucket_is_read_again_in_the_next_round(
    pool: ProcessWorkerPool, store: UnreliableStore
) -> None:
    store.is_down = True
    pool.prepare(spec())
    first = failure_in(pool)
    assert (first.cause, first.is_permanent) == (FailureCause.PLATFORM, False)
    assert "the bucket is down" in first.traceback_text
    assert failure_in(pool).cause is FailureCause.PLATFORM
    store.is_down = False
    assert (failure_in(pool).cause, store.reads >= 3) == (FailureCause.WORKER, True), (
        "the bundle is missing"
    )


def test_a_missing_bundle_is_not_read_again(
    pool: ProcessWorkerPool, store: UnreliableStore
) -> None:
    pool.prepare(spec())
    first = failure_in(pool)
    assert (first.cause, first.is_permanent) == (FailureCause.WORKER, True)
    reads = store.reads
    assert failure_in(pool) == first
    assert store.reads == reads


def upload_bundle(store: UnreliableStore) -> CodeBundleRef:
    return upload_code_bundle(lambda: 7, None, runtime_env=RuntimeEnv(), key=KEY, store=store)


def test_a_disk_error_is_a_platform_failure(
    tmp_path: Path, store: UnreliableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    scratch = tmp_path / "scratch"
    scratch.write_text("")  # a file, so that nothing can be written below it
    with make_pool(store, scratch) as pool:
        pool.prepare(spec(upload_bundle(store)))
        raised = failure_in(pool)
        assert (raised.cause, raised.is_permanent) == (FailureCause.PLATFORM, False)
        assert "could not unpack the run's code" in raised.traceback_text
        assert "free space of its disk" in raised.traceback_text
        scratch.unlink()
        pool.start([make_start(0)])
        run_loop_until(pool._loop, lambda: pool._launcher._runtime_key is not None)


def test_a_process_that_cannot_be_started_is_a_platform_failure(pool: ProcessWorkerPool) -> None:
    pool._launcher._runtime_key = RuntimeKey("none", "/no/such/python")
    raised = failure_in(pool)
    assert (raised.cause, raised.is_permanent) == (FailureCause.PLATFORM, False)
    assert "could not start a process" in raised.traceback_text
    assert isinstance(pickle.loads(raised.pickled_exception), InfrastructureError)


def test_a_sidecar_that_cannot_be_started_gets_the_reason(pool: ProcessWorkerPool) -> None:
    pool._launcher._runtime_key = RuntimeKey("none", "/no/such/python")
    ends: list[str] = []
    pool.start_sidecar("callbacks", lambda _frames: None, lambda how, _clean: ends.append(how))
    run_loop_until(pool._loop, lambda: bool(ends))
    assert ends[0].startswith("could not be started: The machine ")
