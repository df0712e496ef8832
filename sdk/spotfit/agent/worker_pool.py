"""The workers of this node: their frames, uploads, snapshots and liveness.

Frames of workers are verified, then routed: most are passed to the leader as
`WorkerFramesReceived`; heartbeats, uploads and snapshots are handled here. A worker that sends an
invalid frame is killed, and fails. `process_launcher` starts the processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from spotfit.agent.hang_detector import WorkerLiveness, dump_stacks, stacks_dir
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
from spotfit.agent.process_launcher import ProcessLaunch, ProcessLauncher, unpack_environment
from spotfit.agent.snapshot_registry import SnapshotRegistry
from spotfit.core.codec import encode
from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit.host import log
from spotfit.host.event_loop import EventLoop
from spotfit.host.memory import MemoryMonitor
from spotfit.host.process import KILLED_BY_SIGKILL
from spotfit.ledger import keys
from spotfit.model.spec import RunSpec
from spotfit.model.topology import SnapshotShard
from spotfit.protocol.agent_fork_server import ChildKind
from spotfit.protocol.agent_sidecar import UploadDone, UploadError
from spotfit.protocol.worker_agent import (
    MAX_WORKER_FRAME_BYTES,
    CheckpointNamed,
    DiscardSnapshotAtEnd,
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
    WorkerHeartbeat,
    WorkerRaised,
    decode_worker_message,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar.uploader import QueuedUpload, UploaderProxy
from spotfit.store.api import Store

_MEMORY_SAMPLE_INTERVAL_S = 1.0
# The end of the traceback of an upload; functions of the user may raise texts of any size.
_MAX_UPLOAD_ERROR_CHARS = 100_000

OnMessagesFn = Callable[[list[bytes]], None]
OnExitFn = Callable[[str, bool], None]


class ProcessWorkerPool:
    """The `WorkerPool` of real processes. It routes their frames and reports their events."""

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
        self._logs = logs
        self._scratch = Path(scratch)
        self._key = key
        self._snapshots = snapshots or SnapshotRegistry("")
        self._launcher = ProcessLauncher(
            loop,
            fork_servers,
            unpack=partial(unpack_environment, store=store, key=key, scratch=self._scratch),
            slots=slots,
            on_broken=lambda raised: self._events.append(EnvironmentBroken(raised)),
            on_slow_starts=self._on_slow_starts,
        )
        self._slow_starts: list[str] = []
        """Sentences for the user that were not shown yet."""
        self._workers: dict[int, ChildProcess] = {}
        self._round = -1
        """The round of `_workers`."""
        self._liveness: WorkerLiveness | None = None
        """None if the worker timeout is disabled."""
        self._uploader: UploaderProxy | None = None
        """Uploads for workers; None until `prepare`."""
        self._events: list[WorkerPoolEvent] = []
        self._memory = MemoryMonitor()
        self._is_sampling_memory = False

    # --- the protocol `WorkerPool` -----------------------------------------------------------

    def prepare(self, spec: RunSpec) -> None:
        """Start to unpack the environment in a thread, and to import the framework meanwhile.

        Called once per run. Also applies the run's log level, starts the liveness checks of workers
        (unless their timeout is 0), and creates the uploader proxy that later calls need.
        """
        log.set_level(spec.log_level)
        self._launcher.prepare(spec)
        self._uploader = UploaderProxy(
            spec.storage_url,
            self._key,
            partial(self.start_sidecar, "uploader"),
            self._on_upload_finished,
        )
        if spec.hang_detection.worker_timeout_s:
            self._liveness = WorkerLiveness(spec.hang_detection.worker_timeout_s)
            self._check_liveness()

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        """Start one worker process per message, once the environment is unpacked; does not wait."""
        for start in start_messages:
            self._start_worker(start)
        if not self._is_sampling_memory:
            self._is_sampling_memory = True
            self._sample_memory()

    def send(self, rank: int, frame: ToWorker) -> None:
        """Send a frame to the worker with that global rank; dropped if it has exited.

        A `CheckpointNamed` also starts the upload of the snapshot that the rank has submitted with
        that report, if any, even if the worker has exited.
        """
        match frame:  # the snapshots of a worker that has exited are uploaded, too
            case CheckpointNamed():
                upload = self._snapshots.make_upload(rank, frame)
                if upload is not None:
                    assert self._uploader is not None
                    self._uploader.submit(upload)
            case DiscardSnapshotAtEnd():
                self._snapshots.discard_at_end(rank)
            case RankZeroBroadcastResult(kind="report", seq=n):
                # A result of this kind rejects the report: its snapshot is never named.
                self._snapshots.forget(rank, n)
            case _:
                pass
        if rank in self._workers:
            self._workers[rank].send(encode(frame))

    def dump_stacks(self, dump_id: int) -> None:
        """Collect the stacks of the running workers in a thread; see `WorkerPool`.

        No event follows if none is running.
        """
        pids = {rank: child.pid for rank, child in self._workers.items() if child.pid is not None}
        if pids:
            # In a thread: a hung process answers after seconds, or never.
            threading.Thread(
                target=self._dump_stacks,
                args=(self._round, dump_id, pids),
                name="spotfit-stack-dump",
                daemon=True,
            ).start()

    def kill_workers(self) -> None:
        for child in list(self._workers.values()):
            child.kill()
        self._launcher.cancel_pending(only="worker")

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
        return self._launcher.is_warm

    def drain_events(self) -> list[WorkerPoolEvent]:
        events, self._events = self._events, []
        return events

    # --- for the driver ------------------------------------------------------------------------

    def record_replica(self, round_number: int, rank: int, step: int, peer_store: str) -> None:
        """Report by `ReplicaConfirmed` that a peer store has a replica of a rank's snapshot shard.

        `step` is the training step, `peer_store` the other node's `host:port`. Called by
        `PeerStore` from its own thread; the event appears at the next turn of the event loop.
        """
        event = ReplicaConfirmed(round_number, rank, step=step, peer_store=peer_store)
        # A lambda: `drain_events` replaces the list before the loop calls this.
        self._loop.call_soon_threadsafe(lambda: self._events.append(event))

    def start_sidecar(
        self, kind: ChildKind, on_messages: OnMessagesFn, on_exit: OnExitFn
    ) -> ChildProcess:
        """Start a sidecar process in the environment of the workers; return its handle at once.

        It starts once the environment is unpacked; frames sent before are kept. `on_messages`
        receives lists of frames. `on_exit` is called once, with the reason in words and whether the
        exit code is 0; also, even before this returns, for a process that cannot be started. Its
        output is stored with the run's logs.
        """
        # Sidecars are not ranks of a round; their output is stored under these pseudo ranks.
        log_source = keys.VALIDATION_RANK if kind == "validation" else keys.SIDECAR_RANK
        child = self._launcher.create_child(
            on_messages=on_messages,
            on_line=partial(self._logs.add_line, -1, log_source),
            on_exit=on_exit,
            log_fields={"sidecar": kind},
        )
        self._launcher.launch(ProcessLaunch(kind, child))
        return child

    @property
    def live_process_count(self) -> int:
        """How many workers and sidecars were not reaped, with those not started yet; 0 for none.

        A process that was spawned, not forked, may count twice.
        """
        return self._launcher.live_count

    def close(self) -> None:
        """Cancel uploads and kill all workers and sidecars; returns before they have exited.

        Their exits are still reported while the event loop runs. Harmless if repeated.
        """
        # First: the uploader proxy would start another process for what it has not uploaded.
        self.cancel_uploads()
        self._launcher.close()

    def kill_fork_server(self) -> None:
        """End the fork server, which has not reported the end of killed processes.

        The next run on this machine must not wait for one that does not respond.
        """
        self._launcher.kill_fork_server()

    def detach(self) -> None:
        """Stop reading from the fork server, which stays in its pool for the next run.

        Called last, when the agent has ended: exits of its children are not observed afterwards.
        """
        self._launcher.detach()

    # --- workers -------------------------------------------------------------------------------

    def _start_worker(self, start: StartWorker) -> None:
        start = self._snapshots.prepare_start(start)
        source = start.round, start.rank
        child = self._launcher.create_child(
            on_messages=partial(self._on_worker_messages, *source),
            on_line=partial(self._logs.add_line, *source),
            on_exit=partial(self._on_worker_exit, *source),
            log_fields={"rank": start.rank, "round": start.round},
            frame_limit_bytes=MAX_WORKER_FRAME_BYTES,
        )
        # Before the launch, which reports the exit of a process that cannot be started.
        self._workers[start.rank] = child
        self._report_slow_starts()
        self._round = start.round
        child.send(encode(start))  # read by the worker once it has started
        self._launcher.launch(
            ProcessLaunch(
                "worker",
                child,
                # Reported as if the worker had raised it: the leader treats both alike.
                on_not_started=lambda raised: self._forward(*source, [encode(raised)]),
                restart=partial(self._start_worker, start),
            )
        )

    def _on_slow_starts(self, text: str) -> None:
        self._slow_starts.append(text)
        self._report_slow_starts()

    def _report_slow_starts(self) -> None:
        # By one node only: usually all nodes have the same software.
        if 0 in self._workers:
            for text in self._slow_starts:
                self._logs.add_line(-1, keys.RUN_RANK, "err", text)
            self._slow_starts.clear()

    def _on_worker_messages(self, round_number: int, rank: int, frames: list[bytes]) -> None:
        # A late message of an earlier round says nothing about the worker that has the rank now.
        if (
            self._liveness is not None
            and round_number == self._round
            and self._liveness.record_heartbeat(rank)
        ):
            self._events.append(WorkerLivenessChanged(round_number, rank, 0.0))
        for_leader: list[bytes] = []
        try:
            for frame in frames:
                for_leader += self._route_frame(round_number, rank, frame)
        finally:
            self._forward(round_number, rank, for_leader)  # also those before an invalid frame

    def _forward(self, round_number: int, rank: int, frames: list[bytes]) -> None:
        if frames:
            raw_frames = [msgspec.Raw(frame) for frame in frames]
            self._events.append(WorkerFramesReceived(round_number, rank, raw_frames))

    def _route_frame(self, round_number: int, rank: int, frame: bytes) -> list[bytes]:
        """Handle a frame addressed to the agent; return the frames to forward, at most one.

        Raises `IntegrityError` if it is invalid.
        """
        match decode_worker_message(frame):
            case WorkerHeartbeat():
                return []  # every frame counts as one (`_on_worker_messages`)
            case RequestUpload() as request:
                assert self._uploader is not None
                self._uploader.submit(QueuedUpload(round_number, rank, request))
                return []
            case SnapshotReport() as snapshot:
                self._snapshots.add(rank, snapshot)
                # The leader reads of it in `WorkerReturned`, and then decides for all ranks.
                if snapshot.at_end:
                    return []
                # The leader names it like any report with files; the segment concerns only us.
                report = FilesReport(
                    report_index=snapshot.report_index,
                    metrics=snapshot.metrics,
                    incremental=True,
                    step=snapshot.step,
                    reason=snapshot.reason,
                    progress=snapshot.progress,
                )
                return [encode(report)]
            case RolledBack(before_report_index=before):
                self._snapshots.roll_back(before)
                return []
            case _:
                return [frame]

    def _on_upload_finished(self, upload: QueuedUpload, outcome: UploadDone | UploadError) -> None:
        """Report the outcome to the leader as the worker's own, and to the worker if it runs."""
        worker = self._workers.get(upload.rank)
        # Not a heartbeat: the worker may have exited, and would then count as unresponsive.
        report = partial(self._forward, upload.round, upload.rank)
        index, name = upload.request.report_index, upload.request.checkpoint_name
        if isinstance(outcome, UploadDone):
            completed = SaveCompleted(
                report_index=index,
                checkpoint_name=name,
                size_bytes=outcome.size_bytes,
                step=outcome.step,
                manifest_digest=outcome.manifest_digest,
            )
            report([encode(completed)])
            if worker is not None:
                worker.send(encode(Uploaded(report_index=index, checkpoint_name=name)))
            return
        error_text = outcome.traceback_text[-_MAX_UPLOAD_ERROR_CHARS:]
        if worker is not None and not upload.is_snapshot:
            # A failed report() fails its worker, also if the function never looks at the result.
            pickled = outcome.pickled_exception
            raised = WorkerRaised(traceback_text=error_text, pickled_exception=pickled)
            report([encode(raised)])
            worker.kill()  # its function may run for hours before it looks at the upload
            return
        log.warning("checkpoint.failed", name=name, rank=upload.rank, reason=error_text)
        if upload.is_snapshot:
            # Losing a snapshot costs a checkpoint, not the round (docs/decisions/0028).
            report([encode(SaveFailed(report_index=index, reason=error_text))])
        if worker is not None:
            worker.send(encode(UploadFailed(report_index=index, reason=error_text)))
        else:
            # No worker is left to raise it; the log of the node is not shown to the user.
            cause = error_text.strip().splitlines()[-1]
            line = f"[spotfit] checkpoint {name} is lost: the upload of this rank failed: {cause}"
            self._logs.add_line(upload.round, upload.rank, "err", line)

    def _on_worker_exit(self, round_number: int, rank: int, reason: str, is_clean: bool) -> None:  # noqa: FBT001 - see ChildProcess
        child = self._workers.pop(rank)
        if self._liveness is not None:
            self._liveness.remove(rank)
        if reason == KILLED_BY_SIGKILL and not child.was_killed:
            reason += self._memory.explain_kill()
        self._events.append(
            WorkerExited(round_number, rank, reason, is_clean, killed_by_agent=child.was_killed)
        )

    def _sample_memory(self) -> None:
        self._is_sampling_memory = bool(self._workers)
        if self._workers:
            self._memory.sample()
            self._loop.call_later(_MEMORY_SAMPLE_INTERVAL_S, self._sample_memory)

    # --- liveness and stack dumps ------------------------------------------------------------

    def _check_liveness(self) -> None:
        assert self._liveness is not None
        for rank, silent_s in self._liveness.find_unresponsive(self._loop.clock.now()).items():
            self._events.append(WorkerLivenessChanged(self._round, rank, silent_s))
        # By timer, not by message: silence is what is looked for.
        self._loop.call_later(self._liveness.check_interval_s, self._check_liveness)

    def _dump_stacks(self, round_number: int, dump_id: int, pids: dict[int, int]) -> None:
        """Runs in a thread."""
        stacks = dump_stacks(pids, stacks_dir(self._scratch), self._loop.clock)
        events = [
            WorkerStackDumped(round_number, dump_id, rank=rank, stack_text=stack_text)
            for rank, stack_text in stacks.items()
        ]
        self._loop.call_soon_threadsafe(lambda: self._events.extend(events))
