"""`RoundParticipant`: the part of one node in the rounds of a run.

It starts the workers of a round, forwards their frames to the leader, and stops them:

| state     | event                                              | next                            |
|-----------|----------------------------------------------------|---------------------------------|
| idle      | journal opened a round with this node, and the     | running                         |
|           | connection leads to the leader that opened it      |                                 |
| running   | round closed, `AbortRound`, or leader lost         | aborting (workers are killed)   |
| running   | all workers exited, result of rank 0 written       | idle (`WorkersStopped` is sent) |
| aborting  | all workers exited                                 | idle (`WorkersStopped` is sent) |

A round is entered at most once. Uploads continue in "idle" and end with `UploadsDrained`.
"""

from __future__ import annotations

from functools import partial
from typing import Generic, NamedTuple, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from spotfit.agent.hang_detector import heartbeat_interval_s
from spotfit.agent.ports import (
    AgentTransport,
    EnvironmentBroken,
    NodeServices,
    ReplicaConfirmed,
    WorkerExited,
    WorkerFramesReceived,
    WorkerLivenessChanged,
    WorkerPool,
    WorkerPoolEvent,
    WorkerStackDumped,
)
from spotfit.control.background_calls import RetryingCalls
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.model.events import RankFailure
from spotfit.model.failure_model import FailureModel
from spotfit.model.spec import RunSpec
from spotfit.model.topology import NodeAssignment, Round, SnapshotShard
from spotfit.model.view import View
from spotfit.policy.recovery import assign_replica_peers, peer_store_addresses
from spotfit.protocol.agent_fork_server import EXIT_FORK_SERVER_DIED
from spotfit.protocol.agent_leader import (
    NodeUnusable,
    SnapshotReplicated,
    StackDump,
    UploadsDrained,
    WorkersStopped,
    WorkerTerminated,
    WorkerToLeader,
    WorkerUnresponsive,
)
from spotfit.protocol.worker_agent import (
    DiscardSnapshotAtEnd,
    OpenGate,
    StartWorker,
    ToWorker,
    WorkerRaised,
    WorkerReturned,
    message_tag,
)
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.store.api import Store

MessageT = TypeVar("MessageT")
_raised_decoder = decoder(WorkerRaised)
_returned_decoder = decoder(WorkerReturned)
# The text is stored in the journal, which every agent reads.
_MAX_TRACEBACK_CHARS = 50_000


class _PendingWrite(NamedTuple, Generic[MessageT]):
    """An object that must be in the bucket before `message` is sent to the leader."""

    key: str
    body: bytes
    message: MessageT


class RoundParticipant:
    """Manages the workers of this node, one round after the other, for the life of the agent.

    No method blocks. Messages to the leader are dropped while the agent is disconnected; its next
    `Join` contains the state.
    """

    def __init__(
        self,
        *,
        agent_id: AgentId,
        worker_pool: WorkerPool,
        transport: AgentTransport,
        store: Store,
        node_services: NodeServices,
        launch: AgentLaunchSpec,
        devices: tuple[str, ...],
        scratch: str,
    ) -> None:
        self._agent_id = agent_id
        self._worker_pool = worker_pool
        self._transport = transport
        self._store = store
        self._node_services = node_services
        self._retrying_calls = RetryingCalls(node_services.background_calls())
        self._launch = launch
        self._devices = devices
        self._scratch = scratch
        self.round: int | None = None
        """The round whose workers were started and have not all exited."""
        self.last_entered_round = -1
        """The last round that was entered, or aborted before it was; no round is entered twice."""
        self.uploading_round: int | None = None
        """The stopped round for which uploads were reported to the leader as in progress."""
        self.snapshot_shards: tuple[SnapshotShard, ...] = ()
        """Complete snapshot shards in shared memory when the last worker had exited."""
        self.node_failure: RankFailure | None = None
        """Why no worker can be started on this node, once that is known to the leader."""
        self._is_aborted = False
        self._replica_target = ""
        """Address of the peer store that replicates snapshots of this node; '' for none."""
        self._raised_ranks: set[int] = set()
        self._returned_ranks: set[int] = set()
        self._ranks_saving_at_end: set[int] = set()
        """Ranks that have returned, and whose last snapshot is neither uploaded nor discarded."""
        self._awaits_shutdown_hook = False
        """Whether hooks of the backend may still call workers whose function has returned."""
        self._pending_exceptions: dict[str, bytes] = {}
        """Encrypted exceptions that are being written to the bucket, by key."""
        self._pending_result: _PendingWrite[msgspec.Raw] | None = None
        """The return value of rank 0. The run must not end before it is in the bucket."""
        self._pending_node_failure: _PendingWrite[RankFailure] | None = None
        """The permanent error of this node. The run may end with it before any round is opened."""

    @property
    def has_workers(self) -> bool:
        """Whether any worker was started whose exit was not observed yet.

        Also while the last snapshot of a worker that has exited is being saved.
        """
        return self._worker_pool.has_workers or bool(self._ranks_saving_at_end)

    @property
    def has_pending_writes(self) -> bool:
        """Whether exceptions of workers are not in the bucket yet; this delays the agent's exit."""
        return bool(self._pending_exceptions)

    # --- orders of the journal and the leader ------------------------------------------------

    def apply_view(self, view: View, leader_address: str | None) -> None:
        """Enter the open round of the view, and stop the workers of a closed one. Idempotent.

        Called at each tick. A new round cancels uploads of earlier ones. `leader_address`:
        `host:port` of the leader that this agent is connected to, None without one. A round is only
        entered while connected to the leader that opened it: after a change of the leader the new
        one closes it.
        """
        opened = view.round
        uploading_round = self._worker_pool.uploading_round
        if opened is not None and uploading_round is not None and uploading_round < opened.number:
            # Such checkpoints are never committed, and the new round may use their names.
            self._worker_pool.cancel_uploads()
        if self.round is not None and (opened is None or opened.number != self.round):
            self.stop_workers()
        if opened is None:
            return
        if opened.number == self.round and not self._is_aborted:
            # The target changes when the node that holds the replicas receives a notice.
            target = self._find_replica_target(view, opened)
            if target != self._replica_target:
                self._replica_target = target
                self._worker_pool.replicate_to(target)
        # Killed workers hold accelerators and shared memory until they have exited.
        if self.round is not None or self._worker_pool.has_workers:
            return
        assignment = opened.assignment_of(self._agent_id)
        # A headless leader has no address, and None is also the address of "not connected".
        is_connected_to_leader = (
            leader_address is not None
            and view.leader is not None
            and leader_address == view.leader.coordinator_address
        )
        # The journal may still show a round that the leader has aborted (`abort_round`).
        is_new = opened.number > self.last_entered_round
        if assignment is not None and is_connected_to_leader and is_new:
            self._enter_round(view, opened, assignment)

    def stop_workers(self) -> None:
        """Kill all workers. Their later errors and exit codes are not reported as failures.

        Returns before they have exited, which `WorkersStopped` reports to the leader. Harmless if
        repeated.
        """
        # Set before the kill, whose errors and exits must be recognized as its consequences.
        self._is_aborted = True
        self._pending_result = None  # the round did not finish
        self._ranks_saving_at_end.clear()
        self._worker_pool.kill_workers()

    def abort_round(self, round_number: int) -> None:
        """Kill the workers of that round, because the leader sent `AbortRound`.

        For any other round than the running one, `WorkersStopped` is sent at once; one that was not
        entered yet is never entered.
        """
        self.last_entered_round = max(self.last_entered_round, round_number)
        if round_number == self.round:
            self.stop_workers()
        else:
            # The leader waits for this message from every agent of the round.
            self._transport.send_to_leader(
                WorkersStopped(round=round_number, snapshot_shards=self.snapshot_shards)
            )

    def dump_stacks(self, round_number: int, dump_id: int) -> None:
        """Request the stacks of the workers of that round; ignored for other rounds.

        Each is sent to the leader later, as a `StackDump` with the leader's `dump_id`.
        """
        if round_number == self.round:
            self._worker_pool.dump_stacks(dump_id)

    def forward_to_workers(
        self, round_number: int, rank: int | None, frame: ToWorker, view: View
    ) -> None:
        """Forward a frame of the leader to one worker of that round, or to all of this node.

        `rank` is global; None means all. Ignored for other rounds, ranks of other nodes and workers
        that have exited.
        """
        # After the last gate hooks call no workers any more: an exit is then regular.
        self._awaits_shutdown_hook = self._awaits_shutdown_hook and frame != OpenGate(phase="leave")
        if view.round is None or round_number != self.round:
            return
        # The leader addresses ranks or all; a worker that has exited is skipped by the pool.
        assignment = view.round.assignment_of(self._agent_id)
        for local_rank in assignment.ranks if assignment else ():
            if rank is None or rank == local_rank:
                self._worker_pool.send(local_rank, frame)
                if isinstance(frame, DiscardSnapshotAtEnd):
                    self._ranks_saving_at_end.discard(local_rank)

    def _enter_round(self, view: View, opened: Round, assignment: NodeAssignment) -> None:
        self.round = self.last_entered_round = opened.number
        self._is_aborted = False
        self._raised_ranks, self._returned_ranks = set(), set()
        self._ranks_saving_at_end = set()
        self._awaits_shutdown_hook = view.spec.has_backend_hooks
        self._replica_target = self._find_replica_target(view, opened)
        start = self._build_start_message(view, view.spec, opened, assignment)
        # Without holders of its shards the snapshot cannot be read from memory.
        if opened.shard_holders:
            addresses = peer_store_addresses(opened, self._agent_id)
            start = replace(
                start, memory_snapshot=opened.memory_snapshot, peer_store_addresses=addresses
            )
        self._worker_pool.start(
            [
                replace(start, rank=rank, local_rank=local_rank)
                for local_rank, rank in enumerate(assignment.ranks)
            ]
        )

    def _build_start_message(
        self, view: View, spec: RunSpec, opened: Round, assignment: NodeAssignment
    ) -> StartWorker:
        """Return the message for the first worker of this node; only ranks differ in the others."""
        metrics = view.metrics_of(opened.checkpoint_name) if opened.checkpoint_name else None
        committed = [each for each in view.checkpoints if each.name == opened.checkpoint_name]
        failure_model = FailureModel(
            market_prior=spec.market_prior,
            num_nodes=len(opened.assignments),
            lifetimes=view.lifetimes,
            group_age_s=view.group_age_s,
        )
        return StartWorker(
            run_id=self._launch.run_id,
            run_name=spec.name,
            round=opened.number,
            rank=assignment.first_rank,
            local_rank=0,
            world_size=opened.world_size,
            local_world_size=assignment.num_workers,
            node_rank=assignment.node_rank,
            host=assignment.host,
            storage_url=spec.storage_url,
            framework=spec.framework,
            framework_options=spec.framework_options,
            code_bundle=spec.code_bundle,
            checkpoint=opened.checkpoint_name,
            checkpoint_digest=committed[0].manifests_digest if committed else "",
            checkpoint_metrics=metrics,
            checkpoint_step=(committed[0].step or 0) if committed else 0,
            has_snapshots=any(checkpoint.is_snapshot for checkpoint in view.checkpoints),
            replica_target=self._replica_target,
            devices=self._devices,
            default_metadata=spec.default_metadata,
            scratch_dir=self._scratch,
            collective_timeout_s=spec.collective_timeout_s,
            relax_collectives=spec.relax_collectives,
            has_backend_hooks=spec.has_backend_hooks,
            share_devices=spec.share_devices,
            heartbeat_interval_s=heartbeat_interval_s(spec.hang_detection.worker_timeout_s),
            log_level=spec.log_level,
            secret=self._launch.secret,
            failure_model=failure_model,
            spec=msgspec.Raw(encode(spec)),
        )

    def _find_replica_target(self, view: View, opened: Round) -> str:
        """Return the address of the peer store for this node; '' if no other node stays."""
        # Computed by every node from the same view, so that no message has to assign it.
        peer = assign_replica_peers(opened.assignments, leaving=view.notices).get(self._agent_id)
        assignment = opened.assignment_of(peer) if peer is not None else None
        return assignment.peer_store_address if assignment is not None else ""

    # --- events of the workers ---------------------------------------------------------------

    def poll_worker_events(self, now: float) -> None:
        """Forward the events of workers to the leader, and report when all of them have exited.

        Called at each tick. Also advances the background writes of exceptions and results; errors
        of the store are retried.
        """
        # Read before the events: if no worker is left now, the events contain all their frames.
        has_workers = self._worker_pool.has_workers
        uploading_round = self._worker_pool.uploading_round
        for event in self._worker_pool.drain_events():
            self._on_worker_event(event)
        self._write_pending(now)
        # Until then the leader may still name the last snapshots of workers that have exited.
        is_finished = self._pending_result is None and not self._ranks_saving_at_end
        if self.round is not None and not has_workers and is_finished:
            stopped, self.round = self.round, None
            self.uploading_round = stopped if uploading_round == stopped else None
            # Slow, therefore only here: no worker writes segments any more.
            self.snapshot_shards = self._worker_pool.snapshot_shards
            self._transport.send_to_leader(
                WorkersStopped(
                    round=stopped,
                    is_uploading=self.uploading_round is not None,
                    snapshot_shards=self.snapshot_shards,
                )
            )
        elif self.uploading_round is not None and uploading_round != self.uploading_round:
            drained, self.uploading_round = self.uploading_round, None
            self._transport.send_to_leader(UploadsDrained(round=drained))

    def _on_worker_event(self, event: WorkerPoolEvent) -> None:
        send = self._transport.send_to_leader
        match event:
            case WorkerFramesReceived(round=number, rank=rank, frames=frames):
                # Frames of killed workers of an earlier round may still arrive.
                if number == self.round and frames:
                    self._forward_frames(number, rank, frames)
            case WorkerExited():
                self._on_exited(event)
            case WorkerLivenessChanged(round=number, rank=rank, silent_s=silent_s):
                send(WorkerUnresponsive(round=number, rank=rank, silent_s=silent_s))
            case WorkerStackDumped(round=number, dump_id=dump_id, rank=rank, stack_text=text):
                send(StackDump(round=number, dump_id=dump_id, rank=rank, stack_text=text))
            case EnvironmentBroken(raised=raised):
                # Stored under a key of the agent: no round may be open yet.
                key = keys.agent_failure(self._agent_id)
                self._pending_node_failure = _PendingWrite(
                    key,
                    self._node_services.seal(raised.pickled_exception, key),
                    _raised_failure(0, raised, key),
                )
            case ReplicaConfirmed(round=number, rank=rank, step=step, peer_store=address):
                send(
                    SnapshotReplicated(
                        round=number, rank=rank, step=step, peer_store_address=address
                    )
                )
            case _:
                assert_never(event)

    def _forward_frames(self, round_number: int, rank: int, frames: list[msgspec.Raw]) -> None:
        """Forward frames to the leader, except final ones that must be stored first."""
        forwarded: list[msgspec.Raw] = []
        for frame in frames:
            match message_tag(bytes(frame)):
                case "worker_raised":
                    self._on_raised(round_number, rank, _raised_decoder.decode(frame))
                    continue
                case "worker_returned":
                    forwarded += self._on_returned(round_number, rank, frame)
                    continue
                # All other uploads of a rank were complete before it returned.
                case "save_completed" | "save_failed":
                    self._ranks_saving_at_end.discard(rank)
            forwarded.append(frame)
        if forwarded:
            self._transport.send_to_leader(
                WorkerToLeader(round=round_number, rank=rank, frames=forwarded)
            )

    def _on_raised(self, round_number: int, rank: int, raised: WorkerRaised) -> None:
        self._raised_ranks.add(rank)
        # Workers that are being killed raise follow-up errors, for example in collectives.
        if self._is_aborted:
            return
        key = keys.failure(round_number, rank) if raised.pickled_exception else None
        self._transport.send_to_leader(
            WorkerTerminated(
                round=round_number, rank=rank, failure=_raised_failure(rank, raised, key)
            )
        )
        if key is not None:
            self._pending_exceptions[key] = self._node_services.seal(raised.pickled_exception, key)

    def _on_returned(self, round_number: int, rank: int, frame: msgspec.Raw) -> list[msgspec.Raw]:
        """Return the frame to forward now: none while the value of rank 0 is being stored."""
        self._returned_ranks.add(rank)
        returned = _returned_decoder.decode(frame)
        end = returned.save_at_end
        if end is not None and end.has_snapshot and not self._is_aborted:
            self._ranks_saving_at_end.add(rank)
        frame = msgspec.Raw(encode(replace(returned, pickled_value=b"")))
        if rank > 0 or not returned.pickled_value:
            return [frame]
        if not self._is_aborted:
            # The leader may end the run with this frame: first the value must be stored.
            key = keys.result(round_number, rank)
            body = self._node_services.seal(returned.pickled_value, key)
            self._pending_result = _PendingWrite(key, body, frame)
        return []

    def _write_pending(self, now: float) -> None:
        """Advance the writes to the bucket and send the messages that waited for them.

        Exceptions are reported before they are written: the leader must stop the round at once.
        """
        for key, body in list(self._pending_exceptions.items()):  # a copy: written ones are deleted
            if self._try_write(key, body, now):
                del self._pending_exceptions[key]
        result, node_failure = self._pending_result, self._pending_node_failure
        # The round stays open meanwhile: `poll_worker_events` waits for the result.
        if result is not None and self._try_write(result.key, result.body, now):
            self._pending_result = None
            assert self.round is not None
            self._transport.send_to_leader(
                WorkerToLeader(round=self.round, rank=0, frames=[result.message])
            )
        if node_failure is not None and self._try_write(node_failure.key, node_failure.body, now):
            self.node_failure, self._pending_node_failure = node_failure.message, None
            self._transport.send_to_leader(NodeUnusable(failure=node_failure.message))

    def _try_write(self, key: str, body: bytes, now: float) -> bool:
        return self._retrying_calls.run(key, partial(self._store.put, key, body), now) is not None

    def _on_exited(self, event: WorkerExited) -> None:
        is_expected = event.killed_by_agent or (self._is_aborted and event.is_clean)
        # An exit after a final message is regular, except while hooks may call the worker.
        is_finished = event.rank in self._raised_ranks or (
            event.rank in self._returned_ranks and not self._awaits_shutdown_hook
        )
        if event.round != self.round or is_expected or is_finished:
            return
        early = " before its function had returned" if event.is_clean else ""
        text = f"The worker of rank {event.rank} {event.description}{early}."
        # "lost" is charged to the platform: the fork server was killed, not the worker.
        is_platform_fault = event.description == EXIT_FORK_SERVER_DIED
        failure = RankFailure(
            rank=event.rank, kind="lost" if is_platform_fault else "died", message=text
        )
        self._transport.send_to_leader(
            WorkerTerminated(round=event.round, rank=event.rank, failure=failure)
        )


def _raised_failure(rank: int, raised: WorkerRaised, pickle_key: str | None) -> RankFailure:
    return RankFailure(
        rank=rank,
        kind="raised",
        message=_shorten(raised.traceback_text),
        pickle_key=pickle_key,
        cause=raised.cause,
        is_permanent=raised.is_permanent,
    )


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TRACEBACK_CHARS:
        return text
    # The end of a traceback names the exception; an exception may contain a text of any size.
    half = _MAX_TRACEBACK_CHARS // 2
    omitted = len(text) - 2 * half
    return f"{text[:half]}\n... {omitted} characters omitted ...\n{text[-half:]}"
