"""Agents on the simulated machines of `spotfit_localsim.virtual`, controlled by the test.

The network, the store and the worker pool are those of the simulator, without latency and faults.
A test boots machines, sends frames from workers, ends them, injects failures, and advances time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from spotfit.agent.ports import (
    BackendHookRunner,
    CallbackRunner,
    EnvironmentBroken,
    ReplicaConfirmed,
    WorkerFramesReceived,
    WorkerLivenessChanged,
    WorkerStackDumped,
)
from spotfit.checkpoint.manifest import Manifest
from spotfit.control.background_calls import BackgroundCalls, BackgroundResult, SynchronousCalls
from spotfit.core.codec import encode
from spotfit.core.errors import StoreError, TransientStoreError
from spotfit.core.ids import AgentId, Token
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Journal, Ledger, decode_entry
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    FitStarted,
    GroupPlanned,
    GroupSubmitted,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    ValidationRequest,
)
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.leader_state import UserCodeError
from spotfit.model.spec import RunSpec, RunTiming
from spotfit.model.topology import Member, SnapshotShard
from spotfit.model.view import View
from spotfit.protocol.agent_sidecar import BackendHook, CallWorkers, ValidationResult
from spotfit.protocol.worker_agent import (
    CallResult,
    CheckpointNamed,
    FilesReport,
    FromWorker,
    MetricsReport,
    SaveCompleted,
    StartWorker,
    ToWorker,
    WorkerRaised,
    WorkerReturned,
)
from spotfit.security.object_mac import strip_mac
from spotfit.testing.builders import RUN_ID, RUN_KEY, a_spec
from spotfit_localsim.virtual.engine import SimProcess
from spotfit_localsim.virtual.sim_cloud import SimInstance
from spotfit_localsim.virtual.sim_machine import SimDependencies, SimNode, SimNodeServices
from spotfit_localsim.virtual.sim_network import SimNet, SimNetwork
from spotfit_localsim.virtual.sim_snapshots import FaultFreeStore, SimRoutine
from spotfit_localsim.virtual.sim_store import SimBucket
from spotfit_localsim.virtual.sim_validator import SimValidator
from spotfit_localsim.virtual.sim_workers import SimWorker, SimWorkerPool
from spotfit_localsim.virtual.workload import ValidationWorkload, Workload
from tests.unit.control.fake_provisioner import (
    LAUNCH,
    DeferredCalls,
    FakeProvisioner,
    token_factory,
)
from tests.unit.localsim.sim_harness import SimHarness

STEP_S = 0.05
SETTLE_S = 0.02
"""Long enough for every exchange of messages: without latency, a tick takes 0.2 ms."""
TIMING = RunTiming(
    observe_interval_s=0.5,
    journal_poll_interval_s=0.2,
    rejoin_timeout_s=1.0,
    heartbeat_timeout_s=6.0,
    lease_timeout_s=8.0,
    lease_interval_s=2.0,
)
SCRIPTED = Workload(
    peer_error_probability=0.0, validations=ValidationWorkload(hang_probability=1.0)
)
"""Workers and validations do nothing by themselves."""


class FlakyStore(FaultFreeStore):
    """Calls fail while `should_fail()` is True, half of them after they were executed."""

    def __init__(self, bucket: SimBucket | None = None) -> None:
        super().__init__(bucket or SimBucket(), "agents")
        self.should_fail: Callable[[], bool] = lambda: False
        self.error_type: type[StoreError] = TransientStoreError
        self.failure_count = 0

    def _send_request(self, kind: str, operation: Callable[[], bool] | None = None) -> None:
        self._receive_response()

    def _receive_response(self) -> None:
        if self.should_fail():
            self.failure_count += 1
            raise self.error_type("the store fails")


class StallableCalls(DeferredCalls):
    """Background calls that complete at once, or on demand while `is_hanging`."""

    is_hanging = False

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        if self.is_hanging or name in self.results:
            return super().run(name, job)
        return SynchronousCalls().run(name, job)

    def send(self, name: str, job: Callable[[], Any]) -> None:
        if self.is_hanging:
            super().send(name, job)
        else:
            SynchronousCalls().send(name, job)

    def time_out(self, *, executed: bool) -> None:
        """Fail pending calls with a timeout, executed or not."""
        names = list(self.pending)
        if executed:
            self.complete()
        self.pending.clear()
        timeout = BackgroundResult(error=TransientStoreError("no answer"))
        self.results.update(dict.fromkeys(names, timeout))


def fake_seal(key: str, payload: bytes) -> bytes:
    """Return what `SimNodeServices.seal` returns for that payload."""
    return key.encode() + b":" + payload


class Infrastructure(SimHarness):
    """A network and a bucket without latency and faults, and what nodes need on them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = SimNetwork(self.engine, self.rng.stream("wire"), latency_s=None)
        self.bucket = SimBucket()
        self.store = FlakyStore(self.bucket)
        self.cloud = FakeProvisioner()
        self.callback_runner = FakeCallbackRunner()
        self.hooks = FakeBackendHookRunner()
        self.messages: list[str] = []
        """Lines of the run log."""
        self.new_token = token_factory()
        self.worker_context = self.create_worker_context(self.network, self.bucket, SCRIPTED)
        self.dependencies = SimDependencies(
            run_id=RUN_ID,
            worker_context=self.worker_context,
            network=self.network,
            open_store=lambda _process: AuthenticatedStore(self.store, RUN_KEY),
            open_provisioner=lambda _process, _name: self.cloud,
            on_entry_applied=lambda *_: None,
            new_id=self.new_token,
            uses_background_calls=False,
        )

    def open_transport(self, member: Member) -> SimNet:
        """Open the transport of an agent that is not simulated itself."""
        process = self.idle(member.agent)
        return SimNet(self.network, process, host=member.host, agent_id=member.agent)

    def report_violation(self, violation: str) -> None:
        raise AssertionError(violation)

    def is_pending(self, checkpoint: CheckpointCommitted) -> bool:
        return False


class ScriptedWorker(SimWorker):
    """A worker that does nothing by itself."""

    _pool: FakeWorkerPool

    def receive(self, frame: ToWorker) -> None:
        self._pool.received[self.rank].append(frame)

    def kill(self) -> None:
        if not self._pool.survives_kill:
            self.exit("was killed by SIGKILL", is_clean=False, was_requested=True)

    def _run(self) -> SimRoutine:
        while True:
            yield None


class FakeWorkerPool(SimWorkerPool):
    """The simulator's worker pool, with workers that the test controls."""

    worker_type = ScriptedWorker
    _workers: dict[int, ScriptedWorker]  # type: ignore[assignment]  # all are of `worker_type`
    is_warm = True
    uploading_round: int | None = None
    """The round with uploads in progress; set by the test."""
    snapshot_shards: tuple[SnapshotShard, ...] = ()
    """The shards in shared memory; set by the test."""
    can_dump_stacks = True
    """Whether stack dumps are answered."""
    survives_kill = False
    """Whether SIGKILL is not enough."""
    spec: RunSpec | None = None

    def __init__(self, infrastructure: Infrastructure, process: SimProcess | None = None) -> None:
        super().__init__(infrastructure.worker_context, process or infrastructure.idle("a"))
        self.received: dict[int, list[ToWorker]] = {}
        self.rounds: list[int] = []
        self.replica_targets: list[str] = []
        """Where copies were rerouted to."""

    @property
    def workers(self) -> dict[int, StartWorker]:
        """The start messages of the running workers, by rank."""
        return {rank: worker.start_message for rank, worker in self._workers.items()}

    @property
    def peer_store_address(self) -> str:
        return f"{self.host}:7001"

    def prepare(self, spec: RunSpec) -> None:
        super().prepare(spec)
        self.spec = spec

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        self.received = {start.rank: [] for start in start_messages}
        self.rounds.append(start_messages[0].round)
        super().start(start_messages)

    def dump_stacks(self, dump_id: int) -> None:
        for rank, start in self.workers.items() if self.can_dump_stacks else ():
            self.emit(WorkerStackDumped(start.round, dump_id, rank, f"at work ({rank})"))

    def cancel_uploads(self) -> None:
        self.uploading_round = None

    def replicate_to(self, peer_store: str) -> None:
        self.replica_targets.append(peer_store)

    def mark_unresponsive(self, rank: int, silent_s: float) -> None:
        """Make a worker unresponsive for that time; 0 makes it responsive again."""
        self.emit(WorkerLivenessChanged(self._workers[rank].round, rank, silent_s))

    def confirm_replica(self, rank: int, step: int, peer_store: str) -> None:
        """Confirm a replica of a worker's shard."""
        self.emit(ReplicaConfirmed(self._workers[rank].round, rank, step, peer_store))

    def send_from_worker(self, rank: int, *frames: FromWorker) -> None:
        """Send frames from a worker."""
        encoded = [msgspec.Raw(encode(frame)) for frame in frames]
        self.emit(WorkerFramesReceived(self._workers[rank].round, rank, encoded))

    def break_environment(self, raised: WorkerRaised) -> None:
        """Make every start of a worker fail permanently."""
        self.emit(EnvironmentBroken(raised))

    def end_worker(
        self, rank: int, exit_reason: str = "exited with code 0", *, clean: bool = False
    ) -> None:
        """End the process of a worker."""
        self._workers[rank].exit(exit_reason, is_clean=clean)


class FakeCallbackRunner:
    """A `CallbackRunner` that records its calls."""

    def __init__(self) -> None:
        self.reports: list[tuple[list[Any], str | None]] = []
        self.digests: list[str] = []
        """Of the checkpoints of `reports`."""
        self.failures: list[dict[int, str]] = []
        self.error_text: str | None = None
        self.is_idle = True
        self.finished_count = 0
        self.is_stuck = False
        """Whether calls do not return any more."""

    def send_report(
        self, metrics: Sequence[msgspec.Raw], checkpoint: str | None, *, digest: str = ""
    ) -> None:
        self.reports.append(([msgspec.json.decode(one) for one in metrics], checkpoint))
        self.digests.append(digest)
        self.finished_count += not self.is_stuck

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        self.failures.append(traceback_texts)
        self.finished_count += not self.is_stuck

    def user_code_error(self) -> UserCodeError | None:
        if self.error_text is None:
            return None
        return UserCodeError(reason="a callback raised", traceback_text=self.error_text)


class FakeBackendHookRunner:
    """A `BackendHookRunner` whose hooks return when the test empties `unfinished`."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, int, int]] = []
        self.unfinished: list[tuple[str, int]] = []
        self.ended_rounds: list[int] = []
        self.calls: list[CallWorkers] = []
        self.results: list[tuple[int, int, CallResult]] = []
        self.error: UserCodeError | None = None

    def submit(
        self, hook: BackendHook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        self.requested.append((hook, round_number, world_size))
        self.unfinished.append((hook, round_number))

    def is_done(self, hook: BackendHook, round_number: int) -> bool:
        return (hook, round_number) not in self.unfinished

    def drain_worker_calls(self) -> list[CallWorkers]:
        calls, self.calls = self.calls, []
        return calls

    def deliver_call_result(self, round_number: int, rank: int, call_result: CallResult) -> None:
        self.results.append((round_number, rank, call_result))

    def abandon_round(self, round_number: int) -> None:
        self.ended_rounds.append(round_number)

    def user_code_error(self) -> UserCodeError | None:
        return self.error

    @property
    def is_idle(self) -> bool:
        return not self.unfinished


class FakeValidator(SimValidator):
    """The simulator's validator; its validations end on demand."""

    def __init__(self, infrastructure: Infrastructure, process: SimProcess | None = None) -> None:
        super().__init__(infrastructure.worker_context, process or infrastructure.idle("a"))
        self.started_names: list[str] = []

    def start(self, spec: RunSpec, checkpoint: CheckpointCommitted) -> None:
        super().start(spec, checkpoint)
        self.started_names.append(checkpoint.name)

    def stop(self) -> None:
        self.exit(None)

    def finish(self, error_text: str = "", **metrics: Any) -> None:
        """End the validation with metrics or with an error."""
        self.exit(ValidationResult(metrics=None if error_text else metrics, message=error_text))


class FakeNodeServices(SimNodeServices):
    """The simulator's node services with sidecars and calls that the test controls."""

    def __init__(self, infrastructure: Infrastructure, process: SimProcess | None = None) -> None:
        process = process or infrastructure.idle("a")
        super().__init__(
            infrastructure.dependencies, process, FakeValidator(infrastructure, process)
        )
        self._infrastructure = infrastructure
        self.stallable_calls = StallableCalls()
        self.sidecar_stop_count = 0
        """How often the sidecars were stopped."""

    def open_callback_runner(self, spec: RunSpec) -> CallbackRunner | None:
        return self._infrastructure.callback_runner if spec.has_callbacks else None

    def open_backend_hook_runner(self, spec: RunSpec) -> BackendHookRunner | None:
        return self._infrastructure.hooks if spec.has_backend_hooks else None

    def stop_sidecars(self) -> None:
        self.sidecar_stop_count += 1

    def write_run_log(self, text: str) -> None:
        self._infrastructure.messages.append(text)

    def background_calls(self) -> BackgroundCalls:
        return self.stallable_calls

    def journal_background_calls(self) -> BackgroundCalls:
        return self.stallable_calls

    def default_checkpoint_name(self, report_index: int) -> str:
        return f"made-{report_index}"


class FakeNode(SimNode):
    """A machine and its agent."""

    worker_pool: FakeWorkerPool
    node_services: FakeNodeServices
    validator: FakeValidator

    def __init__(self, cluster: FakeCluster, token: Token, node: int) -> None:
        self.name = f"{token}/{node}"
        again = "-again" if self.name in cluster.nodes else ""
        process = cluster.process(f"a-{token}-{node}{again}", self._on_exit)
        super().__init__(
            cluster.dependencies,
            process,
            SimInstance(token, node, slots=1, launch=LAUNCH),
            worker_pool=FakeWorkerPool(cluster, process),
            node_services=FakeNodeServices(cluster, process),
        )

    @property
    def has_exited(self) -> bool:
        return not self.process.is_alive

    @property
    def is_running(self) -> bool:
        return self.process.is_alive and not self.process.is_frozen

    @property
    def ranks(self) -> list[int]:
        return sorted(self.worker_pool.workers)

    def _on_exit(self, error: BaseException | None) -> None:
        # The worker pool is kept: tests check that the agent has stopped its workers before.
        self.net.close()
        if error is not None:
            raise error


class FakeCluster(Infrastructure):
    """The nodes of a run; granted machines boot by themselves."""

    def __init__(self, *, status_lag_s: float = 60.0, **spec_fields: Any) -> None:
        super().__init__()
        self.cloud = FakeProvisioner(observe_interval_s=0.5, status_lag_s=status_lag_s)
        self.nodes: dict[str, FakeNode] = {}
        self.boots_granted = True
        """Whether granted machines boot by themselves."""
        # The driver's calls do not fail: tests observe the run through its ledger.
        driver_store = AuthenticatedStore(FaultFreeStore(self.bucket, "driver"), RUN_KEY)
        self._driver = Ledger(driver_store, RUN_ID, AgentId("driver"))
        self._start_run(a_spec(**{"timing": TIMING, **spec_fields}))

    def _start_run(self, spec: RunSpec) -> None:
        """Write the first entries and request machines, as `fit()` does."""
        request = GroupRequest(
            token=Token(self.new_token()),
            num_workers=spec.max_workers,
            total_workers=spec.max_workers,
        )
        plan = self.cloud.plan(request)
        self.append(FitStarted(spec=spec))
        self.append(LeaderElected(leader=self._driver.agent_id, epoch=1, coordinator_address=None))
        self.append(GroupPlanned(request=request, plan=plan))
        handle = self.cloud.submit(plan, LAUNCH)
        assert isinstance(handle, GroupHandle)
        self.append(GroupSubmitted(token=plan.token, handle=handle))

    # --- external events ---------------------------------------------------------------------

    def append(self, event: JournalEvent) -> None:
        """Append an entry as the driver."""
        self._driver.append(event, after=self._driver.catch_up())

    def append_without_key(self, event: JournalEvent) -> None:
        """Create an entry in the next slot as a process that has no run key."""
        outsider = Journal(FaultFreeStore(self.bucket, "outsider"))
        slot = len(self.entries)
        entry = JournalEntry(run_id=RUN_ID, author=AgentId("outsider"), event=event)
        outsider.create_entry(slot, encode(entry))

    def put_manifest(self, part: Manifest) -> None:
        """Write a manifest as a worker does."""
        AuthenticatedStore(self.store, RUN_KEY).put(part.key, encode(part))

    def cancel(self) -> None:
        self.append(CancelRequested(reason="enough"))

    def boot(self, token: Token, node: int) -> FakeNode:
        """Start a machine and its agent."""
        booted = FakeNode(self, token, node)
        self.nodes[booted.name] = booted
        return booted

    def hang_store(self, *nodes: FakeNode) -> None:
        """Make store calls of these nodes (default: all) hang."""
        for node in nodes or self.nodes.values():
            node.node_services.stallable_calls.is_hanging = True

    def restore_store(self) -> None:
        """Execute the calls that hang; later calls complete at once."""
        for node in self.nodes.values():
            node.node_services.stallable_calls.is_hanging = False
            node.node_services.stallable_calls.complete()

    def time_out_store_calls(self, *, executed: bool) -> None:
        """Make the store calls of all agents time out, executed or not."""
        for node in self.nodes.values():
            node.node_services.stallable_calls.time_out(executed=executed)

    def kill(self, node: FakeNode) -> None:
        """Preempt a machine without notice."""
        node.process.kill()
        if node.member.token in self.cloud.groups:
            self.cloud.reclaim_node(node.member.token, node.member.node)

    # --- time --------------------------------------------------------------------------------

    def advance(self, duration_s: float) -> None:
        """Advance the clock in steps."""
        end = self.engine.now + duration_s
        while self.engine.now < end:
            self.settle(STEP_S)

    def advance_until(self, condition: Callable[[], object], *, within_s: float = 30.0) -> float:
        """Advance the clock until the condition holds; return the seconds."""
        started_at = self.engine.now
        self.settle()
        while not condition():
            assert self.engine.now - started_at < within_s, self.journal_text
            self.settle(STEP_S)
        return self.engine.now - started_at

    def settle(self, duration_s: float = SETTLE_S) -> None:
        """Tick all agents until no event is pending, and advance the clock by that time."""
        for token, nodes in self.cloud.groups.items() if self.boots_granted else ():
            for n, node in enumerate(nodes):
                if node.state is NodeState.RUNNING and f"{token}/{n}" not in self.nodes:
                    self.boot(token, n)
        for booted in self.nodes.values():
            booted.process.wake()
        end = self.engine.now + duration_s
        self.engine.run(until=end)
        self.engine.now = end

    # --- observation -------------------------------------------------------------------------

    @property
    def entries(self) -> list[JournalEntry]:
        """The entries of the journal in the bucket."""
        objects = sorted(self.bucket.objects.items())
        bodies = [body for key, body in objects if key.startswith(".spotfit/journal/")]
        return [decode_entry(body) for body in bodies]

    @property
    def journal_text(self) -> str:
        """The journal as text, for failure messages."""
        return "\n".join(f"{entry.author}: {entry.event}" for entry in self.entries)

    def events_of(self, kind: type[Any]) -> list[Any]:
        """Every event of a type."""
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    def last_event(self, kind: type[Any]) -> Any:
        """The last event of a type, or None."""
        return next(iter(reversed(self.events_of(kind))), None)

    @property
    def view(self) -> View:
        self._driver.catch_up()
        return self._driver.view

    @property
    def leader(self) -> FakeNode:
        leader = self.view.leader
        assert leader is not None
        return next(node for node in self.nodes.values() if node.agent_id == leader.leader)

    def node_of_rank(self, rank: int) -> FakeNode:
        """Return the node that runs a rank."""
        return next(node for node in self.running_nodes if rank in node.ranks)

    @property
    def running_nodes(self) -> list[FakeNode]:
        return [node for node in self.nodes.values() if node.is_running]

    @property
    def validating_node(self) -> FakeNode | None:
        """The node that runs a validation, or None."""
        return next((node for node in self.running_nodes if node.validator.is_running), None)

    @property
    def is_training(self) -> bool:
        """Whether every rank of the open round is running."""
        round_ = self.view.round
        if round_ is None:
            return False
        started = [
            rank
            for node in self.running_nodes
            if node.worker_pool.rounds[-1:] == [round_.number]
            for rank in node.ranks
        ]
        return sorted(started) == list(range(round_.world_size))

    # --- workers -----------------------------------------------------------------------------

    def wait_for_round(self) -> int:
        """Wait until all ranks of a round run; return its number."""
        self.advance_until(lambda: self.is_training)
        assert self.view.round is not None
        return self.view.round.number

    def send_from_worker(self, rank: int, *frames: FromWorker) -> None:
        self.node_of_rank(rank).worker_pool.send_from_worker(rank, *frames)
        self.settle()

    def messages_to(self, rank: int, kind: type[Any]) -> list[Any]:
        """Return the messages of that type that a worker received."""
        received = self.node_of_rank(rank).worker_pool.received[rank]
        return [one for one in received if isinstance(one, kind)]

    def report(self, n: int, *, first_rank: int = 0, **metrics: Any) -> None:
        """Send the n-th report of all ranks, without files."""
        assert self.view.round is not None
        for rank in range(first_rank, self.view.round.world_size):
            report = MetricsReport(report_index=n, metrics=_metrics_of(rank, metrics))
            self.send_from_worker(rank, report)

    def checkpoint(
        self, n: int, name: str, *, validation: ValidationRequest | None = None, **metrics: Any
    ) -> None:
        """Send the n-th report of all ranks; rank 0 has files and uploads them."""
        self.report(n, first_rank=1, **metrics)
        files = FilesReport(
            report_index=n,
            metrics=_metrics_of(0, metrics),
            checkpoint_dir_name=name,
            validation=validation,
        )
        self.send_from_worker(0, files)
        named = self.messages_to(0, CheckpointNamed)[-1]
        assert (named.report_index, named.checkpoint_name) == (n, name)
        self.send_from_worker(0, SaveCompleted(report_index=n, checkpoint_name=name, size_bytes=10))

    def finish_rank(self, rank: int, value: bytes = b"") -> None:
        """Make the function of a rank return."""
        pool = self.node_of_rank(rank).worker_pool
        pool.send_from_worker(rank, WorkerReturned(report_count=0, pickled_value=value))
        pool.end_worker(rank, clean=True)
        self.settle()

    def fail_rank(self, rank: int, error_text: str = "ValueError: no") -> None:
        """Make the function of a rank raise."""
        pool = self.node_of_rank(rank).worker_pool
        raised = WorkerRaised(
            traceback_text=f"Traceback\n{error_text}", pickled_exception=b"pickle"
        )
        pool.send_from_worker(rank, raised)
        pool.end_worker(rank, "exited with code 1")
        self.settle()

    def read_object(self, key: str) -> bytes:
        """Return the content of an object, without its MAC."""
        return strip_mac(self.bucket.objects[key])


def _metrics_of(rank: int, metrics: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(encode({"rank": rank, **metrics}))
