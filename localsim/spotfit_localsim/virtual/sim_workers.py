"""Simulated workers: they use the real protocol, step together, save, fail and are killed.

States of a `SimWorker` routine:

    starting -> restoring -> training (steps, saves, rollbacks) -> draining uploads -> returned

Every state can end early: the worker raises, crashes, hangs, or is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from spotfit.agent.ports import (
    ReplicaConfirmed,
    WorkerExited,
    WorkerFramesReceived,
    WorkerLivenessChanged,
    WorkerPoolEvent,
    WorkerStackDumped,
)
from spotfit.checkpoint.committed import read_data_positions
from spotfit.checkpoint.manifest import Manifest, newest_complete_manifests
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.events import CheckpointCommitted
from spotfit.model.reporting import SaveAtEnd
from spotfit.model.spec import RunSpec
from spotfit.model.topology import SnapshotShard
from spotfit.protocol.worker_agent import (
    AwaitReports,
    CheckpointNamed,
    CommitConfirmed,
    DataWaited,
    DiscardSnapshotAtEnd,
    FeedersChanged,
    FilesReport,
    FromWorker,
    FunctionStarted,
    MetricsReport,
    PreemptionUpdate,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    ReportsSettled,
    SaveCompleted,
    SaveFailed,
    SnapshotReport,
    StartWorker,
    ToWorker,
    Uploaded,
    UploadFailed,
    WorkerRaised,
    WorkerReturned,
)
from spotfit.security.object_mac import strip_mac
from spotfit.security.run_key import RunKey
from spotfit.sidecar.uploader import QueuedUpload
from spotfit.store.transfer import FileRecord
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.virtual.engine import Engine, SimProcess, Timer
from spotfit_localsim.virtual.sim_feeders import SimFeederNode
from spotfit_localsim.virtual.sim_network import SimNetwork
from spotfit_localsim.virtual.sim_snapshots import (
    FaultFreeStore,
    SimNodeMemory,
    SimRoutine,
    SimSavedState,
    decode_saved_state,
    fill_segment,
    read_bucket_state,
    read_memory_state,
    simulate_upload,
)
from spotfit_localsim.virtual.sim_store import SimBucket
from spotfit_localsim.virtual.workload import ModelState, SimTraining

if TYPE_CHECKING:
    from spotfit_localsim.virtual.sim_dataset import SimDataset
    from spotfit_localsim.virtual.trained_rows import RankBatch

# Time from the exit of a process until the agent has reaped it.
_REAP_S = 0.003


_Message = TypeVar("_Message", ReportsSettled, CheckpointNamed, RankZeroBroadcastResult)
_state_decoder = decoder(SimSavedState)
_manifest_decoder = decoder(Manifest)
_metrics_decoder = decoder(dict[str, Any])
_positions_decoder = decoder(dict[str, dict[str, Any]])
_spec_decoder = decoder(RunSpec)


def read_checkpoint_state(objects: Mapping[str, bytes], name: str) -> SimSavedState | str:
    """Return the state in a checkpoint, or why it cannot be read."""
    folder = f"{keys.MANIFESTS}{name}/"
    manifest_keys = [key for key in objects if key.startswith(folder) and key.endswith(".json")]
    # Of several attempts to save under one name, the last complete one counts.
    manifests = newest_complete_manifests(
        [_manifest_decoder.decode(strip_mac(objects[key])) for key in manifest_keys]
    )
    if manifests and manifests[0].is_snapshot:
        return read_bucket_state(objects, name)
    files = [f"{manifest.folder}/{file.name}" for manifest in manifests for file in manifest.files]
    missing = [key for key in files if key not in objects]
    if not files or missing:
        return f"files are missing: {missing}" if missing else "no complete set of manifests"
    states = {_state_decoder.decode(objects[key]) for key in files}
    return states.pop() if len(states) == 1 else f"the ranks saved different states: {states}"


class SimUserError(Exception):
    """The user's function raises."""


@dataclass
class SimWorkerContext:
    """What all simulated workers share."""

    engine: Engine
    network: SimNetwork
    bucket: SimBucket
    run_key: RunKey
    training: SimTraining
    stream: RandomStream
    report_violation: Callable[[str], None]
    """Called when something happened to a worker that must never happen."""
    log: Callable[[str, str], None]
    is_pending: Callable[[CheckpointCommitted], bool]
    """Whether the journal has the checkpoint waiting for validation."""
    latest_checkpoint: Callable[[], str | None]
    """The name of the last committed checkpoint."""
    process_groups: dict[int, SimProcessGroup] = field(default_factory=dict)
    node_memories: dict[str, SimNodeMemory] = field(default_factory=dict)
    """Snapshots of each machine, by the address of its peer store."""
    feeder_nodes: dict[str, SimFeederNode] = field(default_factory=dict)
    """Running feeders, by address."""
    dataset: SimDataset | None = None
    """What the workload trains on, if it has a dataset."""

    def now(self) -> float:
        return self.engine.now

    def schedule_after(self, seconds: float, callback: Callable[[], None]) -> object:
        return self.engine.schedule_after(seconds, callback)

    def draw_replication_s(self) -> float:
        return self.stream.uniform_in(self.training.workload.replication_s)

    def is_reachable(self, sender: str, receiver: str) -> bool:
        """Return whether messages pass in both directions."""
        return self.network.is_connected(sender, receiver)

    def is_superseded(self, round_number: int) -> bool:
        """Return whether a later round has started."""
        # A group exists as soon as the first worker of its round has started.
        return any(later > round_number for later in self.process_groups)

    def committed_state(self, round_number: int) -> SimSavedState:
        """Return the state of the latest checkpoint, to which the round rolls back."""
        # By the journal at this moment: ranks that read it later could see a newer one.
        name = self.latest_checkpoint()
        saved = (
            SimSavedState(0, ModelState().link)
            if name is None
            else read_checkpoint_state(self.bucket.objects, name)
        )
        if isinstance(saved, str):
            self.report_violation(f"round {round_number} rolls back to {name}, but {saved}")
            return SimSavedState(0, ModelState().link)
        return saved

    def process_group(self, start: StartWorker) -> SimProcessGroup:
        """Return the process group of the round, created on first use."""
        return self.process_groups.setdefault(
            start.round, SimProcessGroup(self, start.round, start.world_size)
        )


class SimProcessGroup:
    """The process group of one round: a step is done by all ranks or by none."""

    def __init__(self, context: SimWorkerContext, round_number: int, world_size: int) -> None:
        self.has_notice = False
        """Whether a rank knew of a preemption notice at the start of the step; equal on all ranks.
        """
        self._context = context
        self._round_number = round_number
        self._world_size = world_size
        self._workers: dict[int, SimWorker] = {}
        self._states_at_barrier: dict[int, ModelState] = {}
        self.restore_errors: dict[int, str | None] = {}
        """By rank, the error of restoring from memory, or None."""
        self._rolling_back: set[int] = set()
        self.rollback_count = 0
        """How often all ranks have rolled back."""
        self.rollback_state = SimSavedState(0, ModelState().link)
        """The state of the last rollback."""
        self.next_state = ModelState()
        """The state after the step that all ranks make."""

    @property
    def have_all_restored(self) -> bool:
        return len(self.restore_errors) == self._world_size

    def record_restore(self, worker: SimWorker, error: str | None) -> None:
        """Record that the rank has restored from memory, or failed to."""
        self.restore_errors[worker.rank] = error
        # The last rank wakes the others.
        for other in self._workers.values() if self.have_all_restored else ():
            other.resume()

    def add(self, worker: SimWorker) -> None:
        """Add a rank, once per round."""
        if worker.rank in self._workers:
            self._context.report_violation(
                f"rank {worker.rank} was started twice in round {self._round_number}"
            )
        self._workers[worker.rank] = worker

    def arrive_at_barrier(self, worker: SimWorker) -> None:
        """Record that the rank is ready for the next step; the last rank releases all."""
        self._states_at_barrier[worker.rank] = worker.state
        # As an all-reduce: no rank continues before all have arrived.
        if len(self._states_at_barrier) < self._world_size:
            return
        if len(set(self._states_at_barrier.values())) > 1:
            self._context.report_violation(
                f"the ranks of round {self._round_number} train different models"
            )
        self._states_at_barrier = {}
        self.next_state = self._train(worker.state)
        # Agreed on at the barrier: all ranks save in the same step, or none.
        self.has_notice = any(other.has_notice for other in self._workers.values())
        for other in self._workers.values():
            other.has_passed_barrier = True
            other.resume()

    def _train(self, before: ModelState) -> ModelState:
        history = self._context.training.history
        if history is None:
            return before.advance()
        batches = [self._workers[rank].batch for rank in range(self._world_size)]
        return history.train(before, [batch for batch in batches if batch is not None])

    def roll_back(self, worker: SimWorker) -> None:
        """Record that the rank has discarded its snapshots; the last rank reads the state to
        restore."""
        self._rolling_back.add(worker.rank)
        if len(self._rolling_back) < self._world_size:
            return
        self._rolling_back.clear()
        self.rollback_count += 1
        self.rollback_state = self._context.committed_state(self._round_number)
        # Once for all ranks, before any of them trains on.
        self._context.training.record_rollback(self._round_number)
        for other in self._workers.values():
            other.resume()

    def notify_peers_of_loss(self, worker: SimWorker) -> None:
        """Let peers of a lost rank detect it, each after a random delay."""
        load, stream = self._context.training.workload, self._context.stream
        # Without it, the loss of a rank is only reported by the agent.
        for peer in self._workers.values() if load.peer_error_probability else ():
            # A peer behind a partition sees no error, it hangs.
            cut_off = self._context.network.is_blocked(worker.host, peer.host)
            if peer is not worker and not cut_off and stream.bernoulli(load.peer_error_probability):
                self._context.engine.schedule_after(
                    stream.uniform_in(load.peer_error_delay_s), peer.lose_peer
                )


class SimWorker:
    """One worker process."""

    def __init__(self, context: SimWorkerContext, pool: SimWorkerPool, start: StartWorker) -> None:
        self.rank = start.rank
        self.host = pool.host
        self.round = start.round
        self.state = ModelState()
        self.is_alive = True
        self.has_notice = False
        self.has_passed_barrier = False
        self.batch: RankBatch | None = None
        """The rows of the current step."""
        self._has_returned = False
        self._is_ending = False
        self._has_lost_peer = False
        self._context = context
        self._pool = pool
        self.start_message = start
        self._inbox: list[ToWorker] = []
        self._background_uploads: set[int] = set()
        self._report_count = 0
        self._slots: list[tuple[ShmSegment, int | None]] = []
        """Segments, and the report that last used each."""
        self._save_count = 0
        self._saved_step = 0
        """The step of the last snapshot of the round, or of the restored checkpoint."""
        self._snapshots_with_agent: set[int] = set()
        """Reports whose snapshot the agent still uploads."""
        self._uncommitted_snapshots: set[int] = set()
        """Reports whose snapshot may still become a checkpoint."""
        self._is_waiting = False
        self._feeder_count = 0
        self._measured_wait_at: float | None = None
        self._timer: Timer | None = None
        self._routine = self._run()
        self._shard = (
            context.dataset.create_shard(
                pool.host, rank=start.rank, world_size=start.world_size, resume_worker=self.resume
            )
            if context.dataset is not None
            else None
        )
        self._process_group = context.process_group(start)
        self._process_group.add(self)
        self._schedule(0.0)

    @property
    def progress(self) -> float:
        """The share of the work that is done, from 0 to 1, as the user's code reports it."""
        return self._context.training.progress_at(self.state.step)

    # --- messages and signals ----------------------------------------------------------------

    def receive(self, frame: ToWorker) -> None:
        """Handle a message from the agent."""
        if isinstance(frame, PreemptionUpdate):
            self.has_notice = True
        elif isinstance(frame, FeedersChanged):
            self._feeder_count = len(frame.feeders)
            if self._shard is not None:
                self._shard.feeders = frame.feeders
        elif isinstance(frame, CheckpointNamed | RankZeroBroadcastResult | ReportsSettled):
            self._inbox.append(frame)
            self.resume()
        elif isinstance(frame, Uploaded):
            self._background_uploads.discard(frame.report_index)
        done = _finished_snapshot(frame)
        if done is not None:
            self._snapshots_with_agent.discard(done)
            self.resume()
        if isinstance(frame, CommitConfirmed):
            # The confirmation has the name of the checkpoint only; the report has to be looked up.
            self._uncommitted_snapshots -= {
                one.report_index
                for one in self._received(CheckpointNamed)
                if one.checkpoint_name == frame.checkpoint_name
            }
            self.resume()
        elif done is not None and not isinstance(frame, Uploaded):
            # An uploaded snapshot may still be committed, a failed or unnamed one never is.
            self._uncommitted_snapshots.discard(done)

    def resume(self) -> None:
        """Continue if the routine is waiting."""
        if self.is_alive and self._is_waiting:
            self._is_waiting = False
            self._schedule(0.0)

    def lose_peer(self) -> None:
        """The connection to a peer failed: the next step raises."""
        self._has_lost_peer = True
        self.resume()

    def kill(self) -> None:
        """Kill the process; it exits after a short time."""
        # SIGKILL is not immediate: the kernel releases accelerators and memory first.
        if not self._is_ending:
            self._is_ending = True
            end_s = self._context.stream.uniform_in(self._context.training.workload.exit_s)
            how = "was killed by SIGKILL"
            self._context.engine.schedule_after(
                end_s, lambda: self.exit(how, is_clean=False, was_requested=True)
            )

    def vanish(self, *, closes_connections: bool) -> None:
        """Stop at once: the machine is terminated."""
        if self.is_alive:
            self._stop()
            # After the return the process group is shut down: no rank waits for this one.
            if closes_connections and not self._has_returned:
                self._process_group.notify_peers_of_loss(self)

    # --- the routine -------------------------------------------------------------------------

    def _run(self) -> SimRoutine:
        load = self._context.training.workload
        # Start of the process and imports.
        yield self._context.stream.uniform_in(load.start_s)
        self._send(FunctionStarted())
        if self._shard is not None:
            feeders = _spec_decoder.decode(self.start_message.spec).feeders
            yield from self._shard.open(self._initial_positions, feeders, self._send_data_wait)
        yield from self._restore()
        while self.state.step < load.steps:
            yield from self._train_step()
            self._report_data_wait()
            # The notice is the same on all ranks since the barrier, so they save in the same step.
            if self._is_due(load.save_every) or (
                self._process_group.has_notice and load.saves_on_notice
            ):
                yield from self._save()
                if self._context.training.should_roll_back(self.round, self._report_count):
                    yield from self._roll_back()
            elif self._is_due(load.report_every):
                self._send(
                    MetricsReport(report_index=self._next_report_index(), metrics=self._metrics())
                )
        yield from self._end_training()
        # The process must not exit while the agent reads its segments.
        while self._background_uploads or self._snapshots_with_agent:
            yield None
        end = yield from self._save_at_end()
        self._has_returned = True
        self._send(
            WorkerReturned(
                report_count=self._report_count,
                pickled_value=self.state.link.encode(),
                save_at_end=end,
            )
        )
        yield _REAP_S

    def _end_training(self) -> SimRoutine:
        """Make the extra steps of the last rank, and let rank 0 wait for its reports."""
        load, last_rank = self._context.training.workload, self.start_message.world_size - 1
        for _ in range(load.extra_steps if self.rank == last_rank > 0 else 0):
            yield self._context.stream.uniform_in(load.step_s)
            self.state = self.state.advance()
        if load.awaits_reports and self.rank == 0:
            self._send(AwaitReports(report_count=self._report_count))
            while not self._received(ReportsSettled):
                yield None

    def _save_at_end(self) -> Generator[float | None, None, SaveAtEnd | None]:
        """Take a snapshot of the steps since the last save, as `Checkpointer` does."""
        load = self._context.training.workload
        if not (load.uses_snapshots and load.saves_at_end):
            return None
        end = SaveAtEnd(
            step=self.state.step,
            saved_step=self._saved_step,
            save_number=self._save_count + 1,
            state_digest=self.state.link,
            metrics=self._metrics(),
        )
        if end.step <= end.saved_step:
            return end
        segment = yield from self._write_snapshot(None)
        report = SnapshotReport(
            report_index=self._report_count,
            metrics=end.metrics,
            segment=str(segment.path),
            at_end=True,
        )
        self._pool.add_snapshot(self, report)
        return structs.replace(end, has_snapshot=True)

    def _restore(self) -> SimRoutine:
        if self.start_message.memory_snapshot is not None:
            state = self._read_from_memory()
            yield self._context.stream.uniform_in(self._context.training.workload.replication_s)
            # All ranks agree before any continues: one that failed sends all to the bucket.
            self._process_group.record_restore(self, state if isinstance(state, str) else None)
            while not self._process_group.have_all_restored:
                yield None
            if isinstance(state, SimSavedState) and not any(
                self._process_group.restore_errors.values()
            ):
                self._apply(state)
                self._saved_step = self.start_message.checkpoint_step
                return
        self._restore_from_bucket()
        self._saved_step = self.state.step

    def _read_from_memory(self) -> SimSavedState | str:
        """Return the in-memory state, or why it cannot be read."""
        memory, peers = self._pool.memory, self._context.node_memories
        assert memory is not None
        assert self.start_message.memory_snapshot is not None
        try:
            saved = read_memory_state(
                self.start_message,
                memory,
                peers,
                lambda peer_store: self._context.is_reachable(self.host, peer_store),
            )
        except IntegrityError as error:
            return error.message
        state = decode_saved_state(saved)
        # A segment may be overwritten between the decision of the leader and the start.
        expected_step = self.start_message.memory_snapshot.step
        if isinstance(state, str):
            self._context.report_violation(f"the state in memory is corrupt: {state}")
        elif state.step != expected_step:
            return f"its step is {state.step}, expected {expected_step}"
        elif not self._context.training.is_correct(ModelState(state.step, state.link)):
            self._context.report_violation(
                f"step {state.step} in memory differs from the reference run"
            )
        return state

    def _restore_from_bucket(self) -> None:
        name = self.start_message.checkpoint
        if name is None:
            return
        saved = read_checkpoint_state(self._context.bucket.objects, name)
        if isinstance(saved, str) and self._context.is_superseded(self.round):
            # Its agent was frozen and does not know that the round has ended.
            raise SimUserError("the checkpoint was deleted")
        if isinstance(saved, str):
            # The leader opens a round only from a committed checkpoint, which is complete.
            self._context.report_violation(f"round {self.round} starts from {name}, but {saved}")
            return
        self._apply(saved)
        metrics = self.start_message.checkpoint_metrics or {}
        # Metrics and files of a checkpoint come from the journal and from the bucket: they must
        # match.
        if metrics.get("step") != saved.step:
            self._context.report_violation(
                f"{name} contains step {saved.step}, its metrics are {metrics}"
            )

    def _apply(self, saved: SimSavedState) -> None:
        """Continue with a state, as `Checkpointer.restore` does if it is a snapshot."""
        self.state = ModelState(saved.step, saved.link)
        if self._shard is not None and self._context.training.workload.uses_snapshots:
            positions = saved.positions.encode() or b"{}"
            self._shard.resume(_positions_decoder.decode(positions))

    def _initial_positions(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the positions of the reported checkpoint from which the round has started."""
        start, context = self.start_message, self._context
        if start.checkpoint is None:
            return {}
        store = AuthenticatedStore(
            FaultFreeStore(context.bucket, self._pool.writer_name), context.run_key
        )
        return read_data_positions(
            store, start.checkpoint, start.rank, digest=start.checkpoint_digest
        )

    def _send_data_wait(self, waited_s: float, elapsed_s: float) -> None:
        self._send(DataWaited(waited_s=waited_s, elapsed_s=elapsed_s))

    def _report_data_wait(self) -> None:
        """Report after a step how long the rank has waited for rows since the previous one."""
        load, now, before = (
            self._context.training.workload,
            self._context.engine.now,
            self._measured_wait_at,
        )
        self._measured_wait_at = now
        if load.data_wait_share and before is not None:
            share = max(load.data_wait_share - self._feeder_count * load.share_per_feeder, 0.0)
            self._send_data_wait(share * (now - before), now - before)

    def _train_step(self) -> SimRoutine:
        self.has_passed_barrier = False
        if self._shard is not None:
            self.batch = yield from self._shard.next_batch()
        self._process_group.arrive_at_barrier(self)
        while not self.has_passed_barrier:
            yield None
            self._raise_if_peer_lost()
        training = self._context.training
        slowdown = training.workload.slowdown(self.start_message.world_size)
        yield self._context.stream.uniform_in(training.workload.step_s) * slowdown
        self._raise_if_peer_lost()
        crash = training.take_crash(self.state.step + 1, self.rank)
        if crash is not None:
            self._context.log(f"rank {self.rank}", f"{crash.kind} in step {crash.step} (scheduled)")
            if crash.kind == "raises":
                raise SimUserError(f"scheduled error in step {crash.step}")
            if crash.kind == "hangs":
                self._pool.schedule_unresponsive(self)
                while True:
                    yield None
            self.exit("was killed by SIGSEGV", is_clean=False)
            # The exit has cancelled the timer: the routine is never resumed.
            yield None
        self.state = self._process_group.next_state
        if self._shard is not None:
            self._shard.count_step()
        if self.rank == 0:
            # By rank 0 only: the group counts a step once.
            training.record_step(self.state.step)

    def _roll_back(self) -> SimRoutine:
        """Discard snapshots and restore, as `Checkpointer.restore` does after saves."""
        memory, times = self._pool.memory, self._process_group.rollback_count
        assert memory is not None
        # A commit during the rollback would decide by chance which state is restored.
        while self._uncommitted_snapshots:
            yield None
            self._raise_if_peer_lost()
        for segment, _ in self._slots:
            segment.path.unlink(missing_ok=True)
            segment.close()
        self._slots.clear()
        self._save_count = 0
        memory.snapshots.roll_back(self._report_count)
        self._process_group.roll_back(self)
        while self._process_group.rollback_count == times:
            yield None
            self._raise_if_peer_lost()
        self._apply(self._process_group.rollback_state)
        self._saved_step = self.state.step

    def _save(self) -> SimRoutine:
        n = self._next_report_index()
        load = self._context.training.workload
        if load.uses_barriers:
            self._send(RankZeroBroadcast(kind="barrier", seq=n))
            while n not in {one.seq for one in self._received(RankZeroBroadcastResult)}:
                yield None
        # Cleared before the save: a notice that arrives during it causes another one.
        self.has_notice = False
        yield from self._take_snapshot(n) if load.uses_snapshots else self._save_files(n)

    def _save_files(self, n: int) -> SimRoutine:
        """Report files, and upload them under the name that the leader assigns."""
        load = self._context.training.workload
        name = load.checkpoint_name(self.state.step)
        body = self._metrics()
        if self.rank and not load.all_ranks_save:
            self._send(MetricsReport(report_index=n, metrics=body, checkpoint_dir_name=name))
            return
        validation = self._context.training.validation_request(self.state.step)
        self._send(
            FilesReport(
                report_index=n,
                metrics=body,
                checkpoint_dir_name=name,
                validation=validation,
                progress=self.progress,
            )
        )
        while n not in {one.report_index for one in self._received(CheckpointNamed)}:
            yield None
        named = next(one for one in self._received(CheckpointNamed) if one.report_index == n)
        # The leader returns the metrics of rank 0: every rank must have reported the same step.
        if _state_decoder.decode(named.metrics) != SimSavedState(self.state.step, self.state.link):
            self._context.report_violation(
                f"report {n} of round {self.round} mixes different steps"
            )
        manifest = Manifest(
            name=named.checkpoint_name,
            round=self.round,
            report_index=n,
            rank=self.rank,
            ranks=named.ranks,
            metrics=_metrics_decoder.decode(named.metrics),
            files=(FileRecord(f"state-{self.rank}.json", len(bytes(body)), ""),),
            validation=validation,
            data_positions=self._positions(),
        )
        if load.uploads_in_background:
            self._background_uploads.add(n)
            self._pool.upload_file(manifest, bytes(body))
        else:
            yield from upload(self._context, self._pool.writer_name, manifest, bytes(body))
            self._send(
                SaveCompleted(
                    report_index=n, checkpoint_name=manifest.name, size_bytes=manifest.size_bytes
                )
            )

    def _take_snapshot(self, n: int) -> SimRoutine:
        segment = yield from self._write_snapshot(n)
        self._snapshots_with_agent.add(n)
        self._uncommitted_snapshots.add(n)
        report = SnapshotReport(
            report_index=n,
            metrics=self._metrics(),
            segment=str(segment.path),
            progress=self.progress,
        )
        self._pool.add_snapshot(self, report)

    def _write_snapshot(self, n: int | None) -> Generator[float | None, None, ShmSegment]:
        """Write into the older segment while the agent may still upload the newer one."""
        memory = self._pool.memory
        assert memory is not None
        # Two segments: one is uploaded while the other one is written.
        slot = self._save_count % 2
        if len(self._slots) <= slot:
            name = f"{self.round}-{self.rank}-{slot + 1}"
            self._slots.append((memory.create_segment(name), None))
        segment, report = self._slots[slot]
        while report in self._snapshots_with_agent:
            yield None
        # A reader must not find a half-written snapshot, also if the worker dies in the copy.
        segment.invalidate()
        yield self._context.stream.uniform_in(self._context.training.workload.snapshot_stall_s)
        positions = encode(self._positions()).decode() if self._shard is not None else ""
        fill_segment(
            segment,
            self.start_message,
            SimSavedState(self.state.step, self.state.link, positions),
        )
        self._context.training.snapshot_steps.setdefault(self.round, set()).add(self.state.step)
        self._save_count += 1
        self._saved_step = self.state.step
        self._slots[slot] = (segment, n)
        return segment

    def _received(self, kind: type[_Message]) -> list[_Message]:
        return [one for one in self._inbox if isinstance(one, kind)]

    def _raise_if_peer_lost(self) -> None:
        if self._has_lost_peer:
            raise SimUserError("connection closed by peer")

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _next_report_index(self) -> int:
        self._report_count += 1
        if self.rank == 0:
            position = (self.round, self._report_count - 1)
            self._context.training.record_report(position, self.state.step)
        return self._report_count - 1

    def _positions(self) -> dict[str, dict[str, Any]]:
        return self._shard.positions() if self._shard is not None else {}

    def _metrics(self) -> msgspec.Raw:
        return msgspec.Raw(encode(SimSavedState(self.state.step, self.state.link)))

    def _send(self, frame: FromWorker) -> None:
        self._pool.emit(WorkerFramesReceived(self.round, self.rank, [msgspec.Raw(encode(frame))]))

    # --- scheduling and exit -----------------------------------------------------------------

    def _schedule(self, delay_s: float) -> None:
        # One timer per worker: a routine is never resumed twice.
        self._timer = self._context.engine.schedule_after(delay_s, self._advance)

    def _advance(self) -> None:
        try:
            busy_s = next(self._routine)
        except StopIteration:
            self.exit("exited with code 0", is_clean=True)
        except SimUserError as raised:
            self._send(
                WorkerRaised(
                    traceback_text=f"Traceback: {raised}", pickled_exception=str(raised).encode()
                )
            )
            self._context.engine.schedule_after(
                # The traceback is sent before the exit is reported.
                _REAP_S,
                lambda: self.exit("exited with code 1", is_clean=False),
            )
        else:
            self._is_waiting = busy_s is None
            if busy_s is not None and self.is_alive:
                self._schedule(busy_s)

    def exit(self, reason: str, *, is_clean: bool, was_requested: bool = False) -> None:
        """End the process and report it to the agent."""
        if self.is_alive:
            self._stop()
            self._pool.reap(
                self, WorkerExited(self.round, self.rank, reason, is_clean, was_requested)
            )
            if not self._has_returned:
                self._process_group.notify_peers_of_loss(self)

    def _stop(self) -> None:
        self.is_alive = False
        if self._shard is not None:
            self._shard.close()
        for segment, _ in self._slots:
            segment.close()
        if self._timer is not None:
            self._timer.cancel()


def upload(context: SimWorkerContext, writer: str, part: Manifest, body: bytes) -> SimRoutine:
    """Upload one rank's file, then its manifest."""
    half_s = context.stream.uniform_in(context.training.workload.upload_s) / 2
    # The manifest is last: a killed upload leaves files, but no complete part.
    yield half_s
    context.bucket.write(writer, f"{part.folder}/{part.files[0].name}", body)
    yield half_s
    store = AuthenticatedStore(FaultFreeStore(context.bucket, writer), context.run_key)
    store.put(part.key, encode(part))


class _FileUpload(NamedTuple):
    """Upload of a rank's file by the uploader."""

    part: Manifest
    body: bytes

    @property
    def round(self) -> int:
        return self.part.round

    @property
    def rank(self) -> int:
        return self.part.rank

    def run(self, context: SimWorkerContext, writer: str) -> SimRoutine:
        yield from upload(context, writer, self.part, self.body)

    def report_done(self, pool: SimWorkerPool) -> None:
        pool.report_file_upload(self.part, len(self.body))


class _SnapshotUpload:
    """Upload of a rank's snapshot by the uploader."""

    def __init__(self, queued_upload: QueuedUpload) -> None:
        self.queued_upload = queued_upload
        self.round = queued_upload.round
        self.rank = queued_upload.rank
        self._outcomes: list[Manifest | str] = []

    def run(self, context: SimWorkerContext, writer: str) -> SimRoutine:
        duration_s = context.stream.uniform_in(context.training.workload.upload_s)
        yield from simulate_upload(
            context.bucket,
            context.run_key,
            writer=writer,
            queued_upload=self.queued_upload,
            duration_s=duration_s,
            outcomes=self._outcomes,
        )

    def report_done(self, pool: SimWorkerPool) -> None:
        pool.report_snapshot_upload(self.queued_upload, self._outcomes[-1])


class SimUploader:
    """The uploader of a machine, which outlives workers; uploads of one rank run in order."""

    def __init__(self, pool: SimWorkerPool, context: SimWorkerContext) -> None:
        self._pool = pool
        self._context = context
        self._queues: dict[int, list[_FileUpload | _SnapshotUpload]] = {}
        self._timers: dict[int, Timer] = {}

    @property
    def current_round(self) -> int | None:
        """The round of unfinished uploads, or None."""
        return next((queue[0].round for queue in self._queues.values() if queue), None)

    def enqueue(self, job: _FileUpload | _SnapshotUpload) -> None:
        """Start the upload when earlier ones of the same rank are finished."""
        # Uploads of different ranks run concurrently, as in the real uploader.
        queue = self._queues.setdefault(job.rank, [])
        queue.append(job)
        # With more than one, an earlier upload is running and starts this one at its end.
        if len(queue) == 1:
            self._start_next(job.rank)

    def cancel_all(self) -> None:
        """Cancel all uploads."""
        for timer in self._timers.values():
            timer.cancel()
        self._queues, self._timers = {}, {}

    def _start_next(self, rank: int) -> None:
        self._advance(rank, self._queues[rank][0].run(self._context, self._pool.writer_name))

    def _advance(self, rank: int, routine: SimRoutine) -> None:
        busy_s = next(routine, None)
        if busy_s is not None:
            self._timers[rank] = self._context.engine.schedule_after(
                busy_s, lambda: self._advance(rank, routine)
            )
            return
        self._queues[rank].pop(0).report_done(self._pool)
        if self._queues.get(rank):
            self._start_next(rank)


class SimWorkerPool:
    """The `WorkerPool` of one agent."""

    worker_type = SimWorker
    """The class of the workers; tests replace it by one that they control."""

    def __init__(self, context: SimWorkerContext, process: SimProcess) -> None:
        self._context = context
        self._process = process
        self._workers: dict[int, SimWorker] = {}
        self._uploader = SimUploader(self, context)
        self._events: list[WorkerPoolEvent] = []
        self._silent_s = 0.0
        saves = context.training.workload.uses_snapshots
        memories = context.node_memories
        self.memory = (
            SimNodeMemory(
                process.name, context, memories, lambda *kept: self.emit(ReplicaConfirmed(*kept))
            )
            if saves
            else None
        )

    @property
    def peer_store_address(self) -> str:
        """The address for replicas; empty without snapshots."""
        return self.memory.name if self.memory is not None else ""

    @property
    def host(self) -> str:
        """The host of the workers."""
        return self._process.name

    @property
    def writer_name(self) -> str:
        """The writer of these workers' objects in the bucket."""
        return f"{self._process.name} workers"

    def prepare(self, spec: RunSpec) -> None:
        self._process.simulate_call()
        self._silent_s = spec.hang_detection.worker_timeout_s

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        self._process.simulate_call()
        if self._workers:
            self._context.report_violation(
                f"{self._process.name} starts workers while earlier ones are running"
            )
        for start in start_messages:
            # Before the worker starts: it removes segments of other rounds.
            prepared = self.memory.snapshots.prepare_start(start) if self.memory else start
            self._workers[start.rank] = self.worker_type(self._context, self, prepared)

    def send(self, rank: int, frame: ToWorker) -> None:
        # As in production, the agent uploads snapshots itself, also those of exited workers.
        if self.memory is not None and isinstance(frame, CheckpointNamed):
            upload_job = self.memory.snapshots.make_upload(rank, frame)
            if upload_job is not None:
                self._uploader.enqueue(_SnapshotUpload(upload_job))
        elif self.memory is not None and isinstance(frame, DiscardSnapshotAtEnd):
            self.memory.snapshots.discard_at_end(rank)
        elif (
            self.memory is not None
            and isinstance(frame, RankZeroBroadcastResult)
            and frame.kind == "report"
        ):
            self.memory.snapshots.forget(rank, frame.seq)
        if rank in self._workers:
            self._workers[rank].receive(frame)

    def replicate_to(self, peer_store: str) -> None:
        if self.memory is not None:
            self.memory.snapshots.set_replication_target(peer_store)

    def add_snapshot(self, worker: SimWorker, snapshot: SnapshotReport) -> None:
        """Accept a snapshot of a worker."""
        assert self.memory is not None
        self.memory.snapshots.add(worker.rank, snapshot)
        if snapshot.at_end:
            return
        files = encode(
            FilesReport(
                report_index=snapshot.report_index,
                metrics=snapshot.metrics,
                incremental=True,
                step=worker.state.step,
                progress=snapshot.progress,
            )
        )
        self.emit(WorkerFramesReceived(worker.round, worker.rank, [msgspec.Raw(files)]))

    def report_snapshot_upload(self, queued_upload: QueuedUpload, outcome: Manifest | str) -> None:
        """Report that a snapshot was uploaded, or failed."""
        n, name = queued_upload.request.report_index, queued_upload.request.checkpoint_name
        message: FromWorker = (
            SaveFailed(report_index=n, reason=outcome)
            if isinstance(outcome, str)
            else SaveCompleted(
                report_index=n,
                checkpoint_name=outcome.name,
                size_bytes=outcome.size_bytes,
                step=outcome.step,
            )
        )
        self.emit(
            WorkerFramesReceived(
                queued_upload.round, queued_upload.rank, [msgspec.Raw(encode(message))]
            )
        )
        self.send(
            queued_upload.rank,
            UploadFailed(report_index=n, reason=outcome)
            if isinstance(outcome, str)
            else Uploaded(report_index=n, checkpoint_name=name),
        )

    def dump_stacks(self, dump_id: int) -> None:
        self._process.simulate_call()
        for worker in self._workers.values():
            text = f"in step {worker.state.step}"
            self.emit(WorkerStackDumped(worker.round, dump_id, worker.rank, text))

    def schedule_unresponsive(self, worker: SimWorker) -> None:
        """Report the hanging worker after the worker timeout."""

        def report_unresponsive() -> None:
            if worker.is_alive:
                self.emit(WorkerLivenessChanged(worker.round, worker.rank, self._silent_s))

        self._context.engine.schedule_after(self._silent_s, report_unresponsive)

    def kill_workers(self) -> None:
        self._process.simulate_call()
        # A copy: a worker that exits at once is removed from the dict.
        for worker in list(self._workers.values()):
            worker.kill()

    @property
    def is_warm(self) -> bool:
        """Always True: nothing is imported."""
        return True

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    @property
    def uploading_round(self) -> int | None:
        return self._uploader.current_round

    @property
    def snapshot_shards(self) -> tuple[SnapshotShard, ...]:
        return self.memory.snapshots.scan_shards() if self.memory is not None else ()

    def cancel_uploads(self) -> None:
        self._process.simulate_call()
        self._uploader.cancel_all()

    def drain_events(self) -> list[WorkerPoolEvent]:
        events, self._events = self._events, []
        return events

    def upload_file(self, part: Manifest, body: bytes) -> None:
        """Upload a worker's file in the background."""
        self._uploader.enqueue(_FileUpload(part, body))

    def report_file_upload(self, part: Manifest, size_bytes: int) -> None:
        """Report that a background upload is finished."""
        saved = encode(
            SaveCompleted(
                report_index=part.report_index, checkpoint_name=part.name, size_bytes=size_bytes
            )
        )
        self.emit(WorkerFramesReceived(part.round, part.rank, [msgspec.Raw(saved)]))
        self.send(part.rank, Uploaded(report_index=part.report_index, checkpoint_name=part.name))

    def emit(self, event: WorkerPoolEvent) -> None:
        """Queue an event for the agent."""
        # Without an agent there is no pipe to write to.
        if self._process.is_alive:
            self._events.append(event)
            self._process.wake()

    def reap(self, worker: SimWorker, exited: WorkerExited) -> None:
        """Remove an exited worker and report it."""
        self._workers.pop(worker.rank, None)
        self.emit(exited)

    def close(self, *, closes_connections: bool) -> None:
        """Stop all workers and uploads: the machine is terminated."""
        # The uploader has another process, but the same machine.
        self._uploader.cancel_all()
        for worker in self._workers.values():
            worker.vanish(closes_connections=closes_connections)
        self._workers = {}
        if self.memory is not None:
            self.memory.close()


def _finished_snapshot(frame: ToWorker) -> int | None:
    """Return the report whose snapshot the agent has finished with, if the message says so."""
    match frame:
        case (
            Uploaded(report_index=n)
            | UploadFailed(report_index=n)
            | CheckpointNamed(report_index=n, checkpoint_name="")
        ):
            return n
        # The report was not matched: the leader assigns no name to it.
        case RankZeroBroadcastResult(kind="report", seq=n, missing_ranks=missing, reason=why) if (
            missing or why
        ):
            return n
        case _:
            return None
