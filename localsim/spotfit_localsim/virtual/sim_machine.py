"""Simulated machines: they boot, run the production agent on simulated ports, and terminate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from spotfit.agent.agent import Agent
from spotfit.agent.driver import make_crash
from spotfit.agent.ports import BackendHookRunner, CallbackRunner
from spotfit.control.background_calls import BackgroundCalls, SynchronousCalls
from spotfit.control.headless_leader import HeadlessLeader
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.core.errors import StoreError, StorePermissionError, TransientStoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger.journal import EntryListener, Ledger
from spotfit.model.events import CancelRequested, FitStarted, JournalEntry
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Member, Notice, PreemptionRisk
from spotfit.model.view import JournalView, View
from spotfit.provision.api import Provisioner
from spotfit.provision.launch import AgentAssignment, AgentLaunchSpec
from spotfit.store.api import Store
from spotfit_localsim.virtual.engine import SimBackgroundCalls, SimProcess
from spotfit_localsim.virtual.sim_cloud import SimInstance
from spotfit_localsim.virtual.sim_feeders import SimFeederNode
from spotfit_localsim.virtual.sim_network import SimNet, SimNetwork
from spotfit_localsim.virtual.sim_validator import SimValidator
from spotfit_localsim.virtual.sim_workers import SimWorkerContext, SimWorkerPool


@dataclass(frozen=True)
class SimDependencies:
    """What all processes of the simulation share."""

    run_id: RunId
    worker_context: SimWorkerContext
    network: SimNetwork
    open_store: Callable[[SimProcess], Store]
    open_provisioner: Callable[[SimProcess, str], Provisioner]
    """Opens the provisioner of that name for a process."""
    on_entry_applied: Callable[[str, int, bytes, JournalView], None]
    """Called when a process applies a journal entry: reader, slot, body, resulting view."""
    new_id: Callable[[], str]
    uses_background_calls: bool
    """Whether slow calls run concurrently with ticks."""
    on_callback: Callable[[str, Sequence[msgspec.Raw], str | None], None] = lambda *_: None
    """Called for every call of the user's `after_report`: agent, metrics by rank, checkpoint."""

    def open_ledger(self, process: SimProcess) -> Ledger:
        """Open the run's ledger for the process."""
        return CheckedLedger(self, process)

    def create_background_calls(self, process: SimProcess) -> BackgroundCalls:
        """Create the executor of slow calls for the process."""
        return SimBackgroundCalls(process) if self.uses_background_calls else SynchronousCalls()


class CheckedLedger(Ledger):
    """The production ledger; the invariant checker sees every entry before the process does."""

    def __init__(self, dependencies: SimDependencies, process: SimProcess) -> None:
        super().__init__(
            dependencies.open_store(process),
            dependencies.run_id,
            AgentId(process.name),
            wall_ms=process.wall_ms,
        )
        self._on_entry_applied = dependencies.on_entry_applied
        # The checker also sees the entries that are read before a listener is set.
        self.set_entry_listener(lambda _slot, _body, _entry: None)

    def set_entry_listener(self, on_entry: EntryListener) -> None:
        def checked(slot: int, body: bytes, entry: JournalEntry) -> None:
            self._on_entry_applied(self.agent_id, slot, body, self.view)
            on_entry(slot, body, entry)

        super().set_entry_listener(checked)


class SimNoticeSource:
    """The notice source of one machine."""

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        return self._instance.notice


class SimCallbackRunner:
    """The callbacks of the user, which return at once; the invariant checker sees every call."""

    user_code_error = staticmethod(lambda: None)
    is_idle = True

    def __init__(self, on_report: Callable[[Sequence[msgspec.Raw], str | None], None]) -> None:
        self._on_report = on_report
        self.finished_count = 0

    def send_report(
        self, metrics: Sequence[msgspec.Raw], checkpoint: str | None, *, digest: str = ""
    ) -> None:
        """Pass the report to the checker."""
        self._on_report(metrics, checkpoint)
        self.finished_count += 1

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        """Do nothing: failures are checked in the journal."""
        self.finished_count += 1


class SimNodeServices:
    """The node services of the agent, without processes."""

    def __init__(
        self,
        dependencies: SimDependencies,
        process: SimProcess,
        own_validator: SimValidator | None = None,
    ) -> None:
        self._dependencies = dependencies
        self._process = process
        # One executor, so that a result is found under the name of its call.
        self._background_calls = dependencies.create_background_calls(process)
        self.own_validator = own_validator or SimValidator(dependencies.worker_context, process)
        self.feeder_node = SimFeederNode(process.name, dependencies.worker_context.feeder_nodes)

    def open_provisioner(self, spec: RunSpec) -> Provisioner:
        return self._dependencies.open_provisioner(self._process, spec.provisioner)

    def open_callback_runner(self, spec: RunSpec) -> CallbackRunner | None:
        return SimCallbackRunner(partial(self._dependencies.on_callback, self._process.name))

    def open_backend_hook_runner(self, spec: RunSpec) -> BackendHookRunner | None:
        return None

    def stop_sidecars(self) -> None:
        """Do nothing: there are no sidecars."""

    def write_run_log(self, text: str) -> None:
        """Discard the text."""

    @property
    def has_unwritten_logs(self) -> bool:
        return False

    def open_feeder_node(self) -> SimFeederNode:
        return self.feeder_node

    def open_validator(self) -> SimValidator:
        return self.own_validator

    def background_calls(self) -> BackgroundCalls:
        return self._background_calls

    def journal_background_calls(self) -> BackgroundCalls:
        return self._dependencies.create_background_calls(self._process)

    def seal(self, payload: bytes, purpose: str) -> bytes:
        # Readable: the checker looks for the payload in stored results.
        return f"{purpose}:".encode() + payload

    def new_token(self) -> str:
        return self._dependencies.new_id()

    def default_checkpoint_name(self, report_index: int) -> str:
        return f"checkpoint_{report_index:06d}_{self._dependencies.new_id()}"


class SimulatedError(Exception):
    """An error in spotfit that a scenario injects."""


class SimNode:
    """One agent process on one instance."""

    def __init__(
        self,
        dependencies: SimDependencies,
        process: SimProcess,
        instance: SimInstance,
        *,
        worker_pool: SimWorkerPool | None = None,
        node_services: SimNodeServices | None = None,
    ) -> None:
        """Tests replace the worker pool and the node services by ones that they control."""
        self.instance = instance
        self.process = process
        self.agent_id = AgentId(process.name)
        # One agent per machine, so the names are the same.
        self.host = process.name
        self.is_silent = False
        self._network = dependencies.network
        self.ledger = dependencies.open_ledger(process)
        self.net = SimNet(dependencies.network, process, host=self.host, agent_id=self.agent_id)
        self.worker_pool = worker_pool or SimWorkerPool(dependencies.worker_context, process)
        self.node_services = node_services or SimNodeServices(dependencies, process)
        self.validator = self.node_services.own_validator
        self.member = Member(
            agent=self.agent_id,
            host=self.host,
            coordinator_address=self.net.address,
            slots=instance.slots,
            token=instance.token,
            node=instance.node,
            peer_store_address=self.worker_pool.peer_store_address,
        )
        self.agent = Agent(
            member=self.member,
            ledger=self.ledger,
            transport=self.net,
            worker_pool=self.worker_pool,
            notice_sources=[SimNoticeSource(instance)],
            launch=instance.launch,
            node_services=self.node_services,
        )
        self._error: SimulatedError | None = None
        process.start(self._tick)

    def raise_error(self) -> None:
        """Let the next tick of the agent raise an exception."""
        self._error = SimulatedError("an error in spotfit")
        self.process.wake()

    def _tick(self, now: float) -> float | None:
        """The tick of the agent, or its crash as the driver handles it."""
        try:
            if self._error is not None:
                raise self._error
            return self.agent.tick(now)
        except SimulatedError as error:
            instance = self.instance
            assignment = AgentAssignment(
                instance.launch, instance.token, instance.node, instance.slots
            )
            with suppress(StoreError):
                self.ledger.publish_crash(make_crash(assignment, self.agent_id, error))
            raise

    def terminate(self, *, closes_connections: bool) -> None:
        """Terminate the machine; without `closes_connections` its peers are not notified."""
        self.is_silent = not closes_connections
        if self.is_silent:
            # Without FIN or RST, as when a host loses its power.
            self._network.silence_host(self.host)
        self.process.kill()

    def clean_up(self) -> None:
        """Release what the exited agent process held."""
        # Workers are closed first, as by a kernel that kills all processes of the machine.
        self.worker_pool.close(closes_connections=not self.is_silent)
        self.validator.close()
        self.node_services.feeder_node.close(closes_connections=not self.is_silent)
        self.net.close()


class SimSupervisor:
    """The client that called `fit()`, or a sweep: a headless leader with its own loop."""

    def __init__(
        self,
        dependencies: SimDependencies,
        process: SimProcess,
        spec: RunSpec,
        launch: AgentLaunchSpec,
        *,
        fit_number: int = 1,
    ) -> None:
        """It starts the fit of that number, from 1, once the one before it has ended."""
        self._dependencies = dependencies
        self._process = process
        self._spec = spec
        self._launch = launch
        self._fit_number = fit_number
        self._headless_leader: HeadlessLeader | None = None
        self._ledger = dependencies.open_ledger(process)

    def tick(self, now: float) -> float | None:
        """Start the fit unless it is started, then supervise it."""
        try:
            if self._ledger.journal_view.fit_count < self._fit_number:
                view = self._ledger.catch_up()
                if view.is_active and view.fit_count < self._fit_number:
                    return now + 0.1
                if view.fit_count < self._fit_number:
                    self._ledger.append(FitStarted(spec=self._spec), after=view)
                    return now
            # Not in the constructor: it needs the view with the run and the clock of the process.
            if self._headless_leader is None:
                self._headless_leader = self._create_headless_leader(now)
            return self._headless_leader.tick(now)
        # A denial that lasts ends `fit()`: its user calls it again.
        except (TransientStoreError, StorePermissionError):
            return now + 0.5

    def _create_headless_leader(self, now: float) -> HeadlessLeader:
        dependencies, process = self._dependencies, self._process
        # A client process may block: its journal calls need no threads.
        writer = JournalWriter(self._ledger, SynchronousCalls())
        # As `attach`: of the fit that the journal shows.
        provisioner = dependencies.open_provisioner(process, self._ledger.view.spec.provisioner)
        calls = dependencies.create_background_calls(process)
        reconciler = Reconciler(writer, provisioner, self._launch, calls, dependencies.new_id)
        settler = GroupSettler(
            writer,
            lambda name, _options: dependencies.open_provisioner(process, name),
            self._launch,
            calls,
        )
        return HeadlessLeader(writer, reconciler, settler, now)

    def cancel(self, now: float) -> float | None:
        """The tick of a client that cancels the run."""
        try:
            view = self._ledger.catch_up()
            # The entry was written although its response was lost, or another process cancelled.
            is_cancelled = view.cancel_reason is not None or view.fit_end is not None
            if is_cancelled or view.fit_count > self._fit_number:
                return None
            if isinstance(view, View):
                self._ledger.append(CancelRequested(reason="cancelled by the user"), after=view)
        except (TransientStoreError, StorePermissionError):
            return now + 0.5
        return now + 0.1
