"""The processes of this node: workers and sidecars, and what they need before they can start.

The state of the environment in which processes are started:

| state     | event                               | next                                       |
|-----------|-------------------------------------|--------------------------------------------|
| empty     | `prepare(spec)`                     | unpacking; launches are queued             |
| unpacking | code and requirements are unpacked  | ready; queued launches are started         |
| unpacking | permanent error                     | broken: `EnvironmentBroken`, launches fail |
| unpacking | error that may be temporary         | empty; queued launches fail                |
| empty     | the next launch (of the next round) | unpacking again                            |

Frames of workers are routed by their tag: most are passed to the leader as `WorkerFramesReceived`;
heartbeats, uploads and snapshots are handled here.
"""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from spotfit.agent.log_shipper import LogShipper
from spotfit.agent.ports import (
    EnvironmentBroken,
    ReplicaConfirmed,
    WorkerExited,
    WorkerFramesReceived,
    WorkerLivenessChanged,
    WorkerPoolEvent,
    WorkerStackDumped,
)
from spotfit.agent.snapshot_registry import SnapshotRegistry
from spotfit.agent.stack_dump import dump_stacks, stacks_dir
from spotfit.agent.worker_health import WorkerLiveness
from spotfit.code.code_bundle import (
    CodeBundlePayload,
    CodeBundleRef,
    check_environment,
    fetch_code_bundle,
)
from spotfit.code.environment_setup import PreparedRuntimeEnv, prepare_runtime_env
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import InfrastructureError
from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import (
    ForkServerClient,
    ForkServerPool,
    RuntimeKey,
    build_worker_environment,
)
from spotfit.fork_server.spawner import Spawner
from spotfit.host import log
from spotfit.host.event_loop import READ, EventLoop
from spotfit.ledger import keys
from spotfit.model.snapshot_id import SnapshotShard
from spotfit.model.spec import RunSpec
from spotfit.policy.retry_budget import diagnose_setup_failure
from spotfit.protocol.agent_fork_server import (
    EXIT_FORK_SERVER_DIED,
    EXIT_NOT_STARTED,
    ChildExited,
    ChildForked,
    ChildKind,
    ForkServerReady,
    ForkUnsafe,
)
from spotfit.protocol.agent_sidecar import UploadDone, UploadError
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    FilesReport,
    RankZeroBroadcastResult,
    RequestUpload,
    RolledBack,
    SaveCompleted,
    SaveFailed,
    SnapshotReport,
    StartWorker,
    ToWorker,
    Uploaded,
    UploadFailed,
    WorkerRaised,
    message_tag,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar.uploader import QueuedUpload, UploaderProxy
from spotfit.store.api import Store

_upload_request_decoder = decoder(RequestUpload)
_snapshot_decoder = decoder(SnapshotReport)
_rollback_decoder = decoder(RolledBack)

OnMessagesFn = Callable[[list[bytes]], None]
OnExitFn = Callable[[str, bool], None]


class _ChildLaunch(NamedTuple):
    kind: ChildKind
    child: ChildProcess
    start: StartWorker | None = None


class ProcessWorkerPool:
    """The `WorkerPool` of real processes, forked where that is safe and spawned elsewhere."""

    def __init__(
        self,
        loop: EventLoop,
        fork_servers: ForkServerPool,
        *,
        store: Store,
        key: RunKey,
        logs: LogShipper,
        scratch: str,
        slots: int,
        snapshots: SnapshotRegistry | None = None,
    ) -> None:
        self._loop = loop
        self._fork_servers = fork_servers
        self._store = store
        self._key = key
        self._logs = logs
        self._scratch = Path(scratch)
        self._snapshots = snapshots or SnapshotRegistry("")
        self._slots = slots
        self._spawner = Spawner(loop)
        self._runtime_key: RuntimeKey | None = None
        """What processes are started from; None until the environment is unpacked."""
        self._unpack_error: Exception | None = None
        """Why the environment cannot be unpacked on this node, if that is permanent."""
        self._spec: RunSpec | None = None
        self._is_unpacking = False
        self._fork_server: ForkServerClient | None = None
        self._pending_launches: list[_ChildLaunch] = []
        """Launches queued until the environment is unpacked."""
        self._launches_by_serial: dict[int, _ChildLaunch] = {}
        """Launches requested from the fork server, by request id."""
        self._workers: dict[int, ChildProcess] = {}
        self._round = -1
        """The round of `_workers`."""
        self._liveness: WorkerLiveness | None = None
        """None if the worker timeout is disabled."""
        self._uploader: UploaderProxy | None = None
        """Uploads for workers; None until `prepare`."""
        self._children: set[ChildProcess] = set()
        """All processes that have not ended: workers and sidecars."""
        self._events: list[WorkerPoolEvent] = []

    # --- the protocol `WorkerPool` -----------------------------------------------------------

    def prepare(self, spec: RunSpec) -> None:
        """Start to unpack the environment in a thread, and to import the framework meanwhile."""
        log.set_level(spec.log_level)
        # Most runs set no environment variables: then this fork server is the one that is used.
        self._use_fork_server(
            RuntimeKey.of(spec.framework, sys.executable, build_worker_environment(self._slots, {}))
        )
        self._uploader = UploaderProxy(
            spec.storage_url, partial(self.start_sidecar, "uploader"), self._on_upload_finished
        )
        self._spec = spec
        self._start_unpacking(spec)
        if spec.hang_detection.worker_timeout_s:
            self._liveness = WorkerLiveness(spec.hang_detection.worker_timeout_s)
            self._check_liveness()

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        for start in start_messages:
            self._start_worker(start)

    def send(self, rank: int, frame: ToWorker) -> None:
        match frame:  # the snapshots of a worker that has exited are uploaded, too
            case CheckpointNamed():
                self._upload_named_snapshot(rank, frame)
            case RankZeroBroadcastResult(kind="report", seq=n):
                self._snapshots.forget(rank, n)
            case _:
                pass
        if rank in self._workers:
            self._workers[rank].send(encode(frame))

    def dump_stacks(self, dump_id: int) -> None:
        pids = {rank: child.pid for rank, child in self._workers.items() if child.pid is not None}
        if not pids:
            return
        # In a thread: the event loop must not wait for hung processes.
        threading.Thread(
            target=self._dump_stacks, args=(dump_id, pids), name="spotfit-stack-dump", daemon=True
        ).start()

    def kill_workers(self) -> None:
        for child in list(self._workers.values()):
            child.kill()
        self._cancel_pending_launches(_is_worker)

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    @property
    def uploading_round(self) -> int | None:
        return self._uploader.round if self._uploader is not None else None

    @property
    def snapshot_shards(self) -> tuple[SnapshotShard, ...]:
        return self._snapshots.scan_shards()

    def replicate_to(self, peer_store: str) -> None:
        self._snapshots.set_replication_target(peer_store)

    def cancel_uploads(self) -> None:
        if self._uploader is not None:
            self._uploader.cancel_all()

    @property
    def is_warm(self) -> bool:
        # Without a fork server nothing will become warmer: do not make the leader wait.
        return self._fork_server is None or self._fork_server.is_fully_warm

    def drain_events(self) -> list[WorkerPoolEvent]:
        events, self._events = self._events, []
        return events

    # --- for the driver ------------------------------------------------------------------------

    def record_replica(self, round_number: int, rank: int, step: int, peer_store: str) -> None:
        """Record that a peer store has a replica. Thread-safe."""
        event = ReplicaConfirmed(round_number, rank, step=step, peer_store=peer_store)
        self._loop.call_soon_threadsafe(partial(self._events.append, event))

    def start_sidecar(
        self, kind: ChildKind, on_messages: OnMessagesFn, on_exit: OnExitFn
    ) -> ChildProcess:
        """Start a sidecar process in the same environment as the workers."""
        # Sidecars are not ranks of a round; their output is stored under these pseudo ranks.
        log_source = keys.VALIDATION_RANK if kind == "validation" else keys.SIDECAR_RANK
        child: ChildProcess

        def on_child_exit(reason: str, is_clean: bool) -> None:  # noqa: FBT001 - see ChildProcess
            self._children.discard(child)
            on_exit(reason, is_clean)

        child = ChildProcess(
            self._loop,
            on_messages=on_messages,
            on_line=partial(self._logs.add_line, -1, log_source),
            on_exit=on_child_exit,
        )
        self._children.add(child)
        self._launch(_ChildLaunch(kind, child))
        return child

    @property
    def live_process_count(self) -> int:
        """The number of processes of any kind that have not ended and been reaped."""
        return len(self._children) + self._spawner.live_count

    def close(self) -> None:
        """Kill all processes. Their exits are still reported as events."""
        self.cancel_uploads()
        for child in list(self._children):
            child.kill()
        self._cancel_pending_launches(lambda _: True)

    def detach(self) -> None:
        """Stop reading from the fork server, which stays in its pool for the next run."""
        if self._fork_server is not None:
            self._loop.unregister(self._fork_server.control)
            self._fork_server = None

    # --- environment ---------------------------------------------------------------------------

    def _start_unpacking(self, spec: RunSpec) -> None:
        self._is_unpacking = True
        threading.Thread(
            target=self._unpack, args=(spec,), name="spotfit-unpack", daemon=True
        ).start()

    def _unpack(self, spec: RunSpec) -> None:
        """Unpack code and requirements. Runs in a thread: the bucket and pip may take minutes."""
        try:
            prepared = self._prepare_environment(spec)
        except OSError as error:
            failure = InfrastructureError(
                f"This node could not unpack the run's code and environment: {error}",
                do="Check the free space of its disk, or use machines with a larger disk.",
            )
            self._loop.call_soon_threadsafe(partial(self._on_unpack_failed, failure))
        except Exception as error:  # noqa: BLE001 - the user's code and pip may raise anything
            self._loop.call_soon_threadsafe(partial(self._on_unpack_failed, error))
        else:
            self._loop.call_soon_threadsafe(partial(self._on_unpacked, spec, prepared))

    def _prepare_environment(self, spec: RunSpec) -> PreparedRuntimeEnv:
        bundle_ref = msgspec.convert(spec.code_bundle, CodeBundleRef)
        envelope = fetch_code_bundle(bundle_ref, store=self._store)
        payload = CodeBundlePayload.open(envelope, key=self._key)
        check_environment(bundle_ref, payload.runtime_env)
        self._write_bundle_copy(bundle_ref.sha256, envelope)
        return prepare_runtime_env(
            payload.runtime_env, store=self._store, scratch_dir=self._scratch
        )

    def _write_bundle_copy(self, name: str, envelope: bytes) -> None:
        """Store the bundle for the workers of this node, so that each need not download it."""
        directory = self._scratch / "code_bundle"
        directory.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: an agent that dies meanwhile must not leave a truncated bundle.
        draft = directory / f"{name}.draft"
        draft.write_bytes(envelope)
        draft.rename(directory / name)

    def _on_unpacked(self, spec: RunSpec, prepared: PreparedRuntimeEnv) -> None:
        self._is_unpacking = False
        variables = build_worker_environment(self._slots, prepared.env_vars)
        self._runtime_key = RuntimeKey.of(spec.framework, prepared.python, variables)
        self._use_fork_server(self._runtime_key)
        self._start_pending_launches()

    def _on_unpack_failed(self, error: Exception) -> None:
        """Fail the queued launches; unless the error is permanent, the next round tries again."""
        log.error("worker_pool.unpack_failed", reason=str(error))
        self._is_unpacking = False
        self._unpack_error = error
        self._start_pending_launches()
        raised = _to_failure_message(error)
        if raised.is_permanent:
            self._events.append(EnvironmentBroken(raised))
        else:
            self._unpack_error = None  # so that the next round unpacks again

    def _start_pending_launches(self) -> None:
        launches, self._pending_launches = self._pending_launches, []
        for launch in launches:
            self._launch(launch)

    def _cancel_pending_launches(self, predicate: Callable[[_ChildLaunch], bool]) -> None:
        cancelled = [launch for launch in self._pending_launches if predicate(launch)]
        self._pending_launches = [
            launch for launch in self._pending_launches if not predicate(launch)
        ]
        # Reported like any kill: the leader waits for the exit of every worker.
        for launch in cancelled:
            launch.child.kill()
            launch.child.on_reaped(signal.SIGKILL)

    # --- fork servers --------------------------------------------------------------------------

    def _use_fork_server(self, runtime_key: RuntimeKey) -> None:
        """Switch to the fork server with that key, starting it if necessary."""
        server = self._fork_servers.get_or_start(runtime_key)
        if server is self._fork_server:
            return
        if self._fork_server is not None:
            self._loop.unregister(self._fork_server.control)
        self._fork_server = server
        self._fork_servers.evict_unused(runtime_key)
        if server is not None:
            self._loop.register(
                server.control, READ, partial(self._on_fork_server_readable, server)
            )

    def _on_fork_server_readable(self, fork_server: ForkServerClient, _mask: int) -> None:
        messages = fork_server.read_messages()
        if messages is None:
            self._on_fork_server_lost(fork_server)
            return
        for message in messages:
            match message:
                case ChildForked(request_id=serial, pid=pid):
                    if serial in self._launches_by_serial:
                        self._launches_by_serial[serial].child.on_started(pid)
                case ChildExited(request_id=serial, wait_status=status):
                    if serial in self._launches_by_serial:
                        self._launches_by_serial.pop(serial).child.on_reaped(status)
                case ForkUnsafe(reason=reason):
                    log.info(
                        "fork_server.fork_unsafe",
                        framework=fork_server.runtime_key.framework,
                        reason=reason,
                    )
                case ForkServerReady():
                    log.debug("fork_server.ready", framework=fork_server.runtime_key.framework)

    def _on_fork_server_lost(self, fork_server: ForkServerClient) -> None:
        """Record that its children have died with it, and start elsewhere those not forked yet."""
        self._loop.unregister(fork_server.control)
        self._fork_server = None
        launches, self._launches_by_serial = self._launches_by_serial, {}
        # Another server, or none after repeated deaths: then the launches below are spawned.
        self._use_fork_server(self._runtime_key or fork_server.runtime_key)
        for launch in launches.values():
            if launch.child.pid is not None or launch.child.is_kill_requested:
                launch.child.on_reaped(signal.SIGKILL, reason=EXIT_FORK_SERVER_DIED)
            elif launch.start is None:
                self._launch(launch)
            else:
                # The child may have been forked and have read its first frame: use a new socket.
                launch.child.discard()
                self._children.discard(launch.child)
                self._start_worker(launch.start)

    # --- workers -------------------------------------------------------------------------------

    def _start_worker(self, start: StartWorker) -> None:
        start = self._snapshots.prepare_start(start)
        child = ChildProcess(
            self._loop,
            on_messages=partial(self._on_worker_messages, start.round, start.rank),
            on_line=partial(self._logs.add_line, start.round, start.rank),
            on_exit=partial(self._on_worker_exit, start.round, start.rank),
        )
        self._workers[start.rank] = child
        self._round = start.round
        self._children.add(child)
        child.send(encode(start))  # read by the worker once it has started
        self._launch(_ChildLaunch("worker", child, start))

    def _launch(self, launch: _ChildLaunch) -> None:
        if self._unpack_error is not None:
            self._fail_launch(launch, self._unpack_error)
        elif self._runtime_key is None:
            self._pending_launches.append(launch)
            if self._spec is not None and not self._is_unpacking:
                self._start_unpacking(self._spec)  # the previous attempt has failed
        else:
            self._launch_now(launch, self._runtime_key)

    def _launch_now(self, launch: _ChildLaunch, runtime_key: RuntimeKey) -> None:
        self._use_fork_server(runtime_key)  # the previous one may have died since the last launch
        try:
            if self._fork_server is not None:
                serial = self._fork_server.fork(launch.kind, launch.child.descriptors)
                self._launches_by_serial[serial] = launch
            else:
                self._spawner.spawn(launch.kind, runtime_key, launch.child)
        except OSError as error:
            do = "Check the node's limits of processes and open files (ulimit -a)."
            self._fail_launch(
                launch, InfrastructureError(f"This node could not start a process: {error}", do=do)
            )

    def _fail_launch(self, launch: _ChildLaunch, error: Exception) -> None:
        """Report the error as if the process had sent it."""
        log.error("worker_pool.start_failed", what=launch.kind, reason=str(error))
        if launch.start is not None:
            self._on_worker_messages(
                launch.start.round, launch.start.rank, [encode(_to_failure_message(error))]
            )
        launch.child.on_reaped(signal.SIGKILL, reason=f"{EXIT_NOT_STARTED}: {error}")

    def _on_worker_messages(self, round_number: int, rank: int, frames: list[bytes]) -> None:
        # A late message of an earlier round says nothing about the worker that has the rank now.
        if (
            self._liveness is not None
            and round_number == self._round
            and self._liveness.record_heartbeat(rank)
        ):
            self._events.append(WorkerLivenessChanged(round_number, rank, 0.0))
        routed = [self._route_frame(round_number, rank, frame) for frame in frames]
        for_leader = [msgspec.Raw(frame) for frame in routed if frame is not None]
        if for_leader:
            self._events.append(WorkerFramesReceived(round_number, rank, for_leader))

    def _route_frame(self, round_number: int, rank: int, frame: bytes) -> bytes | None:
        """Handle a frame addressed to the agent; return the frame to forward, if any."""
        match message_tag(frame):
            case "worker_heartbeat":
                return None
            case "request_upload":
                assert self._uploader is not None
                request = _upload_request_decoder.decode(frame)
                self._uploader.submit(QueuedUpload(round_number, rank, request))
                return None
            case "snapshot_report":
                snapshot = _snapshot_decoder.decode(frame)
                self._snapshots.add(rank, snapshot)
                # The leader names it like any report with files; the segment concerns only us.
                report = FilesReport(
                    report_index=snapshot.report_index,
                    metrics=snapshot.metrics,
                    incremental=True,
                    reason=snapshot.reason,
                )
                return encode(report)
            case "rolled_back":
                self._snapshots.roll_back(_rollback_decoder.decode(frame).before_report_index)
                return None
            case _:
                return frame

    def _upload_named_snapshot(self, rank: int, named: CheckpointNamed) -> None:
        upload = self._snapshots.make_upload(rank, named)
        if upload is not None:
            assert self._uploader is not None
            self._uploader.submit(upload)

    def _on_upload_finished(self, upload: QueuedUpload, outcome: UploadDone | UploadError) -> None:
        """Report the outcome to the leader as the worker's own, and to the worker if it runs."""
        request, worker = upload.request, self._workers.get(upload.rank)
        report = partial(self._on_worker_messages, upload.round, upload.rank)
        if isinstance(outcome, UploadDone):
            completed = SaveCompleted(
                report_index=request.report_index,
                checkpoint_name=request.checkpoint_name,
                size_bytes=outcome.size_bytes,
                step=outcome.step,
            )
            report([encode(completed)])
            if worker is not None:
                worker.send(
                    encode(
                        Uploaded(
                            report_index=request.report_index,
                            checkpoint_name=request.checkpoint_name,
                        )
                    )
                )
        elif upload.is_snapshot:
            # Losing a snapshot costs a checkpoint, not the round (docs/decisions/0028).
            self._log_failed_upload(upload, outcome)
            report(
                [
                    encode(
                        SaveFailed(report_index=request.report_index, reason=outcome.traceback_text)
                    )
                ]
            )
            if worker is not None:
                worker.send(
                    encode(
                        UploadFailed(
                            report_index=request.report_index, reason=outcome.traceback_text
                        )
                    )
                )
        elif worker is not None:
            # A failed report() fails its worker, also if the function never looks at the result.
            report(
                [
                    encode(
                        WorkerRaised(
                            traceback_text=outcome.traceback_text,
                            pickled_exception=outcome.pickled_exception,
                        )
                    )
                ]
            )
            worker.kill()  # its function may run for hours before it looks at the upload
        else:
            self._log_failed_upload(upload, outcome)

    def _log_failed_upload(self, upload: QueuedUpload, outcome: UploadError) -> None:
        """Log the failure on this node and, if the worker has exited, in the rank's output."""
        name, rank = upload.request.checkpoint_name, upload.rank
        log.warning("checkpoint.failed", name=name, rank=rank, reason=outcome.traceback_text)
        if rank not in self._workers:
            error = outcome.traceback_text.strip().splitlines()[-1]
            line = f"[spotfit] checkpoint {name} is lost: the upload of this rank failed: {error}"
            self._logs.add_line(upload.round, rank, "err", line)

    def _on_worker_exit(self, round_number: int, rank: int, reason: str, is_clean: bool) -> None:  # noqa: FBT001 - see ChildProcess
        child = self._workers.pop(rank)
        if self._liveness is not None:
            self._liveness.remove(rank)
        self._children.discard(child)
        self._events.append(
            WorkerExited(
                round_number,
                rank,
                description=reason,
                is_clean=is_clean,
                killed_by_agent=child.was_killed,
            )
        )

    # --- liveness and stack dumps ------------------------------------------------------------

    def _check_liveness(self) -> None:
        assert self._liveness is not None
        for rank, silent_s in self._liveness.find_unresponsive(self._loop.clock.now()).items():
            self._events.append(WorkerLivenessChanged(self._round, rank, silent_s))
        # By timer, not by message: silence is what is looked for.
        self._loop.call_later(self._liveness.check_interval_s, self._check_liveness)

    def _dump_stacks(self, dump_id: int, pids: dict[int, int]) -> None:
        """Runs in a thread: a hung process answers after seconds, or never."""
        stacks = dump_stacks(pids, stacks_dir(self._scratch), self._loop.clock)
        self._loop.call_soon_threadsafe(partial(self._on_stacks_dumped, dump_id, stacks))

    def _on_stacks_dumped(self, dump_id: int, stacks: dict[int, str]) -> None:
        for rank, stack_text in stacks.items():
            self._events.append(
                WorkerStackDumped(self._round, dump_id, rank=rank, stack_text=stack_text)
            )


def _to_failure_message(error: Exception) -> WorkerRaised:
    diagnosis = diagnose_setup_failure(error)
    return WorkerRaised(
        traceback_text=str(error),
        pickled_exception=pickle.dumps(error),
        cause=diagnosis.cause,
        is_permanent=diagnosis.is_permanent,
    )


def _is_worker(launch: _ChildLaunch) -> bool:
    return launch.start is not None
