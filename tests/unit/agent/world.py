"""Several agents in one process, with in-memory network, workers, cloud, store and clock.

A test boots machines, sends frames from workers, ends them, injects failures, and advances time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from spotfit.agent.agent import Agent
from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    BackendHookRunner,
    CallbackRunner,
    EnvironmentBroken,
    LeaderDisconnected,
    LeaderMessageReceived,
    ReplicaConfirmed,
    TransportEvent,
    WorkerExited,
    WorkerFramesReceived,
    WorkerLivenessChanged,
    WorkerPoolEvent,
    WorkerStackDumped,
)
from spotfit.control.background_calls import BackgroundCalls, BackgroundResult, SynchronousCalls
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import StoreError, TransientStoreError
from spotfit.core.ids import AgentId, Token
from spotfit.ledger.run import Ledger
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
from spotfit.model.snapshot_id import SnapshotShard
from spotfit.model.spec import RunSpec, RunTiming
from spotfit.model.topology import Member, Notice, PreemptionRisk
from spotfit.model.view import View
from spotfit.protocol.agent_leader import FromLeader, Join, ToLeader
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
from spotfit.provision.api import Provisioner
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN_ID, a_spec
from spotfit.testing.manual_clock import ManualClock
from tests.unit.control.paper import LAUNCH, FakeProvisioner, token_factory

STEP_S = 0.05
TEMPO = RunTiming(
    observe_interval_s=0.5,
    journal_poll_interval_s=0.2,
    rejoin_timeout_s=1.0,
    heartbeat_timeout_s=6.0,
    lease_timeout_s=8.0,
    lease_interval_s=2.0,
)


class FlakyStore(MemoryStore):
    """Calls fail while `should_fail()` is True, half of them after they were executed."""

    def __init__(self) -> None:
        super().__init__()
        self.should_fail: Callable[[], bool] = lambda: False
        self.error_type: type[StoreError] = TransientStoreError
        self.failure_count = 0

    def get(self, key: str) -> bytes:
        self._fail()
        return super().get(key)

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._fail()
        super().put(key, body)
        self._fail()

    def create(self, key: str, body: bytes) -> None:
        self._fail()
        super().create(key, body)
        self._fail()

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Any]:
        self._fail()
        return super().list(prefix, after=after)

    def delete(self, key: str) -> None:
        self._fail()
        super().delete(key)

    def _fail(self) -> None:
        if self.should_fail():
            self.failure_count += 1
            raise self.error_type("the store fails")


class StallableCalls:
    """Background calls that complete at once, or on demand while `is_hanging`."""

    def __init__(self) -> None:
        self.is_hanging = False
        self._pending: dict[str, Callable[[], Any]] = {}
        self._results: dict[str, BackgroundResult] = {}

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        if name in self._results:
            return self._results.pop(name)
        if self.is_hanging:
            self._pending.setdefault(name, job)
            return None
        return SynchronousCalls().run(name, job)

    def send(self, name: str, job: Callable[[], Any]) -> None:
        if self.is_hanging:
            self._pending.setdefault(name, job)
        else:
            SynchronousCalls().send(name, job)

    def time_out(self, *, executed: bool) -> None:
        """Fail pending calls with a timeout, executed or not."""
        for name, job in self._pending.items():
            if executed:
                SynchronousCalls().run(name, job)
            self._results[name] = BackgroundResult(error=TransientStoreError("no answer"))
        self._pending = {}

    def complete(self) -> None:
        """Execute the pending calls."""
        for name, job in self._pending.items():
            done = SynchronousCalls().run(name, job)
            assert done is not None
            self._results[name] = done
        self._pending = {}


def fake_seal(key: str, payload: bytes) -> bytes:
    """Return what `FakeNodeServices.seal` returns for that payload."""
    return key.encode() + b":" + payload


class FakeNetwork:
    """Transports by address. A broken address does not answer; a dead one refuses at once."""

    def __init__(self) -> None:
        self.nets: dict[str, FakeTransport] = {}
        self.unreachable: set[str] = set()

    def find_listener(self, address: str) -> FakeTransport | None:
        net = self.nets.get(address)
        return net if net is not None and net.is_alive else None


class FakeTransport:
    """An `AgentTransport` that delivers messages at once and in order."""

    def __init__(self, wire: FakeNetwork, member: Member) -> None:
        self.is_alive = True
        self.dialed: list[str] = []
        self._network = wire
        self._agent_id = member.agent
        self._address = member.coordinator_address
        self._leader_net: FakeTransport | None = None
        self._agents: dict[AgentId, FakeTransport] = {}
        self._events: list[TransportEvent] = []
        wire.nets[member.coordinator_address] = self

    @property
    def address(self) -> str:
        return self._address

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def connect(self, address: str, join: Join) -> None:
        self.dialed.append(address)
        self.disconnect()
        hub = self._network.find_listener(address)
        if address in self._network.unreachable:
            self._events.append(LeaderDisconnected(address, "no answer", closed_by_peer=False))
        elif hub is None:
            self._events.append(LeaderDisconnected(address, "refused", closed_by_peer=True))
        else:
            self._leader_net = hub
            hub._agents[self._agent_id] = self
            hub._events.append(AgentMessageReceived(self._agent_id, join))

    def disconnect(self) -> None:
        hub, self._leader_net = self._leader_net, None
        if hub is not None and hub._agents.pop(self._agent_id, None) is not None:
            hub._events.append(AgentDisconnected(self._agent_id, "closed"))

    def send_to_leader(self, message: ToLeader) -> None:
        if self._leader_net is not None and self._leader_address not in self._network.unreachable:
            self._leader_net._events.append(AgentMessageReceived(self._agent_id, message))

    def send_to_agent(self, agent: AgentId, message: FromLeader) -> None:
        peer = self._agents.get(agent)
        if peer is not None and self._address not in self._network.unreachable:
            peer._events.append(LeaderMessageReceived(message))

    def disconnect_agent(self, agent: AgentId) -> None:
        peer = self._agents.pop(agent, None)
        if peer is not None:
            peer._lose_leader()

    def drain_events(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    def break_connections(self) -> None:
        """Break all connections of this agent; both ends get an event."""
        if self._leader_net is not None:
            hub = self._leader_net
            hub.disconnect_agent(self._agent_id)
            hub._events.append(AgentDisconnected(self._agent_id, "reset"))
        for agent in list(self._agents):
            self.disconnect_agent(agent)

    def crash(self) -> None:
        """End the machine; its peers see closed connections."""
        self.is_alive = False
        self.break_connections()

    def _lose_leader(self) -> None:
        if self._leader_net is not None:
            address, self._leader_net = self._leader_address, None
            self._events.append(LeaderDisconnected(address, "reset", closed_by_peer=True))

    @property
    def _leader_address(self) -> str:
        return self._leader_net._address if self._leader_net else ""


class FakeWorkerPool:
    """A `WorkerPool` controlled by the test."""

    def __init__(self) -> None:
        self.spec: RunSpec | None = None
        self.workers: dict[int, StartWorker] = {}
        self.received: dict[int, list[ToWorker]] = {}
        self.rounds: list[int] = []
        self.can_dump_stacks = True
        """Whether stack dumps are answered."""
        self.survives_kill = False
        """Whether SIGKILL is not enough."""
        self.is_warm = True
        self.uploading_round: int | None = None
        """The round with uploads in progress; set by the test."""
        self.replica_targets: list[str] = []
        """Where copies were rerouted to."""
        self.snapshot_shards: tuple[SnapshotShard, ...] = ()
        """The shards in shared memory; set by the test."""
        self._events: list[WorkerPoolEvent] = []

    def prepare(self, spec: RunSpec) -> None:
        self.spec = spec

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        assert not self.workers
        self.workers = {start.rank: start for start in start_messages}
        self.received = {start.rank: [] for start in start_messages}
        self.rounds.append(start_messages[0].round)

    def send(self, rank: int, frame: ToWorker) -> None:
        if rank in self.workers:
            self.received[rank].append(frame)

    def dump_stacks(self, dump_id: int) -> None:
        for start in self.workers.values() if self.can_dump_stacks else ():
            told = f"at work ({start.rank})"
            self._events.append(WorkerStackDumped(start.round, dump_id, start.rank, told))

    def mark_unresponsive(self, rank: int, silent_s: float) -> None:
        """That worker does not answer; 0: it does again."""
        self._events.append(WorkerLivenessChanged(self.workers[rank].round, rank, silent_s))

    def kill_workers(self) -> None:
        for rank in [] if self.survives_kill else list(self.workers):
            self.end_worker(rank, "was killed by SIGKILL", ordered=True)

    @property
    def has_workers(self) -> bool:
        return bool(self.workers)

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def cancel_uploads(self) -> None:
        self.uploading_round = None

    def replicate_to(self, peer_store: str) -> None:
        self.replica_targets.append(peer_store)

    def confirm_replica(self, rank: int, step: int, peer_store: str) -> None:
        """Confirm a replica of that worker's shard."""
        self._events.append(ReplicaConfirmed(self.workers[rank].round, rank, step, peer_store))

    def drain_events(self) -> list[WorkerPoolEvent]:
        events, self._events = self._events, []
        return events

    def send_from_worker(self, rank: int, *frames: FromWorker) -> None:
        """That worker writes those frames."""
        told = [msgspec.Raw(encode(frame)) for frame in frames]
        self._events.append(WorkerFramesReceived(self.workers[rank].round, rank, told))

    def break_environment(self, raised: WorkerRaised) -> None:
        """No worker can ever be started here."""
        self._events.append(EnvironmentBroken(raised))

    def end_worker(
        self,
        rank: int,
        exit_reason: str = "exited with code 0",
        *,
        clean: bool = False,
        ordered: bool = False,
    ) -> None:
        """That worker's process ends."""
        start = self.workers.pop(rank)
        self._events.append(WorkerExited(start.round, rank, exit_reason, clean, ordered))


class FakeCallbackRunner:
    """A `CallbackRunner` that records its calls."""

    def __init__(self) -> None:
        self.reports: list[tuple[list[Any], str | None]] = []
        self.failures: list[dict[int, str]] = []
        self.error_text: str | None = None
        self.is_idle = True

    def send_report(self, metrics: Sequence[msgspec.Raw], checkpoint: str | None) -> None:
        self.reports.append(([msgspec.json.decode(one) for one in metrics], checkpoint))

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        self.failures.append(traceback_texts)

    def user_code_error(self) -> UserCodeError | None:
        return (
            UserCodeError(reason="a callback raised", traceback_text=self.error_text)
            if self.error_text
            else None
        )


class FakeBackendHookRunner:
    """`Hooks` that come back when the test lets them."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, int, int]] = []
        self.unfinished: list[tuple[str, int]] = []
        """Ordered, and not performed yet."""
        self.ended_rounds: list[int] = []
        """Rounds that are over."""
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
        asks, self.calls = self.calls, []
        return asks

    def deliver_call_result(self, round_number: int, rank: int, call_result: CallResult) -> None:
        self.results.append((round_number, rank, call_result))

    def abandon_round(self, round_number: int) -> None:
        self.ended_rounds.append(round_number)

    def user_code_error(self) -> UserCodeError | None:
        return self.error

    @property
    def is_idle(self) -> bool:
        return not self.unfinished


class FakeValidator:
    """A `Validator` whose validations end on demand."""

    def __init__(self) -> None:
        self.checkpoint: CheckpointCommitted | None = None
        self.started_names: list[str] = []
        self._verdict: ValidationResult | None = None

    def start(self, spec: RunSpec, checkpoint: CheckpointCommitted) -> None:
        assert self.checkpoint is None, "one at a time"
        self.checkpoint = checkpoint
        self.started_names.append(checkpoint.name)

    def stop(self) -> None:
        self.checkpoint = self._verdict = None

    @property
    def is_running(self) -> bool:
        return self.checkpoint is not None

    @property
    def pending(self) -> bool:
        return self._verdict is not None

    def take_result(self) -> ValidationResult | None:
        verdict, self._verdict = self._verdict, None
        return verdict

    def finish(self, error_text: str = "", **metrics: Any) -> None:
        """The validation ends with those metrics, or with that text."""
        self.checkpoint, self._verdict = (
            None,
            ValidationResult(metrics=None if error_text else metrics, message=error_text),
        )


class FakeNoticeSource:
    """A `NoticeSource` that returns what the test sets."""

    def __init__(self) -> None:
        self.notice: Notice | PreemptionRisk | None = None

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        return self.notice


class FakeNodeServices:
    """In-memory `NodeServices`."""

    def __init__(self, world: FakeCluster, assessor: FakeValidator | None = None) -> None:
        self._cluster = world
        self._validator = assessor or FakeValidator()
        self.stallable_calls = StallableCalls()
        self.resign_count = 0
        """How often the sidecars were stopped."""

    def open_provisioner(self, spec: RunSpec) -> Provisioner:
        return self._cluster.cloud

    def open_callback_runner(self, spec: RunSpec) -> CallbackRunner | None:
        return self._cluster.callback_runner if spec.has_callbacks else None

    def open_backend_hook_runner(self, spec: RunSpec) -> BackendHookRunner | None:
        return self._cluster.hooks if spec.has_backend_hooks else None

    def stop_sidecars(self) -> None:
        self.resign_count += 1

    def write_run_log(self, text: str) -> None:
        self._cluster.messages.append(text)

    def open_validator(self) -> FakeValidator:
        return self._validator

    def background_calls(self) -> BackgroundCalls:
        return self.stallable_calls

    def journal_background_calls(self) -> BackgroundCalls:
        return self.stallable_calls

    def seal(self, payload: bytes, purpose: str) -> bytes:
        return fake_seal(purpose, payload)

    def new_token(self) -> str:
        return self._cluster.new_token()

    def default_checkpoint_name(self, report_index: int) -> str:
        return f"made-{report_index}"


class FakeNode:
    """A machine and its agent."""

    def __init__(self, world: FakeCluster, token: Token, node: int) -> None:
        self.name = f"{token}/{node}"
        host = f"{token}-{node}"
        again = "-again" if self.name in world.nodes else ""
        me = AgentId(f"a-{host}{again}")
        self.member = Member(
            agent=me,
            host=host,
            coordinator_address=f"{host}:7000",
            slots=1,
            token=token,
            node=node,
            peer_store_address=f"{host}:7001",
        )
        self.net = FakeTransport(world.network, self.member)
        self.worker_pool = FakeWorkerPool()
        self.validator = FakeValidator()
        self.notice_source = FakeNoticeSource()
        self.has_exited = False
        self.is_frozen = False
        """Whether its process is suspended: running, but not responding."""
        self.ledger = Ledger(world.store, RUN_ID, self.member.agent)
        self.node_services = FakeNodeServices(world, self.validator)
        self.background_calls = self.node_services.stallable_calls
        self.agent = Agent(
            member=self.member,
            ledger=self.ledger,
            transport=self.net,
            worker_pool=self.worker_pool,
            notice_sources=[self.notice_source],
            launch=LAUNCH,
            node_services=self.node_services,
            scratch="/scratch",
        )

    @property
    def agent_id(self) -> AgentId:
        return self.member.agent

    @property
    def ranks(self) -> list[int]:
        return sorted(self.worker_pool.workers)

    @property
    def is_running(self) -> bool:
        return not self.has_exited and not self.is_frozen

    @property
    def has_pending_events(self) -> bool:
        return self.is_running and (
            self.net.pending or self.worker_pool.pending or self.validator.pending
        )

    def tick(self, now: float) -> None:
        if self.agent.tick(now) is None:
            self.has_exited = True
            self.net.crash()


class FakeCluster:
    """A cloud, a bucket, a network and a clock; granted machines boot by themselves."""

    def __init__(self, *, told_late_s: float = 60.0, **given: Any) -> None:
        self.store = FlakyStore()
        self.cloud = FakeProvisioner(observe_interval_s=0.5, status_lag_s=told_late_s)
        self.network = FakeNetwork()
        self.clock = ManualClock(100.0)
        self.callback_runner = FakeCallbackRunner()
        self.hooks = FakeBackendHookRunner()
        self.messages: list[str] = []
        """Lines of the run's own log."""
        self.new_token = token_factory()
        self.nodes: dict[str, FakeNode] = {}
        self.boots_granted = True
        """Whether granted machines boot by themselves."""
        self._driver = Ledger(self.store, RUN_ID, AgentId("driver"))
        self._start_run(a_spec(**{"timing": TEMPO, **given}))

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

    def cancel(self) -> None:
        self.append(CancelRequested(reason="enough"))

    def boot(self, token: Token, node: int) -> FakeNode:
        """Start that machine and its agent."""
        booted = FakeNode(self, token, node)
        self.nodes[booted.name] = booted
        return booted

    def hang_store(self, *nodes: FakeNode) -> None:
        """Let store calls of these nodes (default: all) hang."""
        for node in nodes or self.nodes.values():
            node.background_calls.is_hanging = True

    def restore_store(self) -> None:
        """Execute the calls that hang, and answer later ones at once."""
        for node in self.nodes.values():
            node.background_calls.is_hanging = False
            node.background_calls.complete()

    def time_out_store_calls(self, *, executed: bool) -> None:
        """Let the store calls of all agents time out, executed or not."""
        for node in self.nodes.values():
            node.background_calls.time_out(executed=executed)

    def kill(self, node: FakeNode) -> None:
        """Preempt a machine without notice."""
        node.has_exited = True
        node.net.crash()
        if node.member.token in self.cloud.groups:
            self.cloud.reclaim_node(node.member.token, node.member.node)

    # --- time --------------------------------------------------------------------------------

    def advance(self, duration_s: float) -> None:
        """Advance the clock in steps."""
        end = self.clock.now() + duration_s
        while self.clock.now() < end:
            self.clock.wait(STEP_S)
            self.settle()

    def advance_until(self, condition: Callable[[], object], *, within_s: float = 30.0) -> float:
        """Advance the clock until the condition holds; return the seconds."""
        started_at = self.clock.now()
        self.settle()
        while not condition():
            assert self.clock.now() - started_at < within_s, self.journal_text
            self.clock.wait(STEP_S)
            self.settle()
        return self.clock.now() - started_at

    def settle(self) -> None:
        """Tick all agents until no event is pending."""
        self._boot_granted()
        for _ in range(200):
            for node in list(self.nodes.values()):
                if node.is_running:
                    node.tick(self.clock.now())
            if not any(node.has_pending_events for node in self.nodes.values()):
                return
        raise AssertionError(f"agents do not settle: {self.journal_text}")

    def _boot_granted(self) -> None:
        for token, nodes in self.cloud.groups.items() if self.boots_granted else ():
            for n, node in enumerate(nodes):
                if node.state is NodeState.RUNNING and f"{token}/{n}" not in self.nodes:
                    self.boot(token, n)

    # --- observation -------------------------------------------------------------------------

    @property
    def entries(self) -> list[JournalEntry]:
        """The entries of the journal in the bucket."""
        found = sorted(key for (key, _) in MemoryStore.list(self.store, ".spotfit/journal"))
        return [decoder(JournalEntry).decode(MemoryStore.get(self.store, key)) for key in found]

    @property
    def journal_text(self) -> str:
        """The journal as text, for failure messages."""
        return "\n".join(f"{entry.author}: {entry.event}" for entry in self.entries)

    def events_of(self, kind: type[Any]) -> list[Any]:
        """Every event of that kind."""
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    def last_event(self, kind: type[Any]) -> Any:
        """The last event of that kind, or None."""
        return next(iter(reversed(self.events_of(kind))), None)

    @property
    def view(self) -> View:
        failing, self.store.should_fail = self.store.should_fail, lambda: False
        try:
            self._driver.catch_up()
            return self._driver.view
        finally:
            self.store.should_fail = failing

    @property
    def leader(self) -> FakeNode:
        leader = self.view.leader
        assert leader is not None
        return next(node for node in self.nodes.values() if node.agent_id == leader.leader)

    def node_of_rank(self, rank: int) -> FakeNode:
        """Return the node that runs that rank."""
        return next(
            node
            for node in self.nodes.values()
            if node.is_running and rank in node.worker_pool.workers
        )

    @property
    def validating_node(self) -> FakeNode | None:
        """The node that runs a validation, or None."""
        return next(
            (n for n in self.nodes.values() if n.is_running and n.validator.is_running), None
        )

    @property
    def is_training(self) -> bool:
        """Whether every rank of the open round is running."""
        view = self.view
        if view.round is None:
            return False
        started = [
            rank
            for node in self.nodes.values()
            if node.is_running and node.worker_pool.rounds[-1:] == [view.round.number]
            for rank in node.ranks
        ]
        return sorted(started) == list(range(view.round.world_size))

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
        return [
            one
            for one in self.node_of_rank(rank).worker_pool.received[rank]
            if isinstance(one, kind)
        ]

    def report(self, n: int, **metrics: Any) -> None:
        """Send the n-th report of all ranks, without files."""
        assert self.view.round is not None
        for rank in range(self.view.round.world_size):
            self.send_from_worker(
                rank,
                MetricsReport(
                    report_index=n, metrics=msgspec.Raw(encode({"rank": rank, **metrics}))
                ),
            )

    def checkpoint(
        self, n: int, name: str, *, validation: ValidationRequest | None = None, **metrics: Any
    ) -> None:
        """Send the n-th report of all ranks; rank 0 has files and uploads them."""
        assert self.view.round is not None
        for rank in range(1, self.view.round.world_size):
            self.send_from_worker(
                rank,
                MetricsReport(
                    report_index=n, metrics=msgspec.Raw(encode({"rank": rank, **metrics}))
                ),
            )
        self.send_from_worker(
            0,
            FilesReport(
                report_index=n,
                metrics=msgspec.Raw(encode({"rank": 0, **metrics})),
                checkpoint_dir_name=name,
                validation=validation,
            ),
        )
        named = self.messages_to(0, CheckpointNamed)[-1]
        assert (named.report_index, named.checkpoint_name) == (n, name)
        self.send_from_worker(0, SaveCompleted(report_index=n, checkpoint_name=name, size_bytes=10))

    def finish_rank(self, rank: int, value: bytes = b"") -> None:
        """Let that rank's function return."""
        node = self.node_of_rank(rank)
        node.worker_pool.send_from_worker(rank, WorkerReturned(report_count=0, pickled_value=value))
        node.worker_pool.end_worker(rank, clean=True)
        self.settle()

    def fail_rank(self, rank: int, error_text: str = "ValueError: no") -> None:
        """Let that rank's function raise."""
        node = self.node_of_rank(rank)
        node.worker_pool.send_from_worker(
            rank,
            WorkerRaised(traceback_text=f"Traceback\n{error_text}", pickled_exception=b"pickle"),
        )
        node.worker_pool.end_worker(rank, "exited with code 1")
        self.settle()

    def read_object(self, key: str) -> bytes:
        return MemoryStore.get(self.store, key)
