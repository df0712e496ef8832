"""simulate(scenario, seed) -> SimulationResult: one deterministic simulation of a whole run."""

from __future__ import annotations

import traceback
from collections import ChainMap, Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.events import FailureCause, JournalEntry, LeaderElected, RoundClosed
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec, FeederSpec, RunSpec, ValidationSpec
from spotfit.provision.api import Provisioner
from spotfit.provision.feeder_backend import FeederBackendProvisioner, feeder_offers
from spotfit.provision.launch import UNREACHABLE_EXIT_CODES, AgentLaunchSpec
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.cost_invariants import (
    CostRecord,
    TimedEntry,
    find_cost_violation,
    read_alternations,
    read_choices,
    read_finish,
    read_releases,
    read_replaced,
    read_rounds,
)
from spotfit_localsim.virtual.engine import (
    Engine,
    SimClock,
    SimProcess,
    simulation_patches,
    wall_ms,
)
from spotfit_localsim.virtual.faults import ActiveFaults, FaultyConnection, ProcessFaultInjector
from spotfit_localsim.virtual.invariants import InvariantChecker, InvariantViolation
from spotfit_localsim.virtual.market import SimMarket
from spotfit_localsim.virtual.scenario import (
    AtMoveClosed,
    AtNetworkChange,
    AtStep,
    AtTime,
    BucketOutage,
    BucketStall,
    CancelRun,
    CrashAgent,
    FreezeAgent,
    InvalidCredentials,
    IsolateHost,
    KillForMemory,
    RaiseInAgent,
    ReclaimMachine,
    Scenario,
    ScenarioEvent,
    TargetSelector,
)
from spotfit_localsim.virtual.sim_cloud import (
    PROVISIONER_NAME,
    SimCloud,
    SimCloudProvisioner,
    SimInstance,
)
from spotfit_localsim.virtual.sim_feeders import SimFeederNode
from spotfit_localsim.virtual.sim_machine import (
    SimDependencies,
    SimNode,
    SimSupervisor,
    SimulatedError,
)
from spotfit_localsim.virtual.sim_network import NetworkPartition, SimNetwork
from spotfit_localsim.virtual.sim_store import SimBucket, SimStore
from spotfit_localsim.virtual.sim_workers import SimWorkerContext
from spotfit_localsim.virtual.timeline import (
    SimulationResult,
    TimelineEntry,
    describe_event,
)
from spotfit_localsim.virtual.workload import SimTraining

if TYPE_CHECKING:
    from spotfit_localsim.virtual.sim_dataset import SimDataset

# Constant: names of objects must not differ between seeds.
RUN_ID = RunId("5" * 32)
RUN_KEY = RunKey(b"run key of all simulated runs ..", RUN_ID)
# How often the end of the run is checked, in virtual time.
_CHECK_INTERVAL_S = 1.0
# How long the simulation continues after the end, for processes that record the last ends.
_RECORD_TIMEOUT_S = 30.0
# Of the clock of an object store, and of the time that its answer takes.
_WALL_SKEW_S = 0.2
_SPOTFIT_FOLDER = keys.RESERVED_PREFIX.rstrip("/")
_BACKGROUND_CALLS_FRACTION = 0.75
"""The fraction of simulations in which slow calls run concurrently with ticks, as in production."""

_OFFERS = tuple(
    Offer(
        name=f"{provisioner}-spot",
        provisioner=provisioner,
        market=Market.SPOT,
        price=Price(usd_per_hour=3.6, source="given", as_of_s=0.0),
    )
    for provisioner in (PROVISIONER_NAME, "sim-b")
)


@dataclass(frozen=True)
class SimDesign:
    """The components of the simulation; tests replace them by wrong ones."""

    store: type[SimStore] = SimStore
    provisioner: type[SimCloudProvisioner] = SimCloudProvisioner
    uses_background_calls: bool | None = None
    """Whether slow calls run concurrently with ticks; None: the seed decides."""


PRODUCTION_DESIGN = SimDesign()


def simulate(
    scenario: Scenario, seed: int, design: SimDesign = PRODUCTION_DESIGN
) -> SimulationResult:
    """Run one simulation. Raises `InvariantViolation`, with the timeline."""
    result = SimWorld(scenario, seed, design).run()
    if result.violation is not None:
        raise InvariantViolation(str(result))
    return result


class SimWorld:
    """All simulated components: bucket, cloud, network, machines and the laptop."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        design: SimDesign = PRODUCTION_DESIGN,
        *,
        engine: Engine | None = None,
    ) -> None:
        self.scenario = scenario
        self.result = SimulationResult(scenario.name, seed)
        # Passed in by the scale test, which needs more events.
        self.engine = engine or Engine()
        self.nodes: dict[str, SimNode] = {}
        self._random_streams = SeededStreams(seed)
        self._design = design
        # The names of streams and processes are part of every seed: renaming one changes all runs.
        self._fault_rng = self._random_streams.stream("fate")
        self._active_faults = ActiveFaults(scenario.faults)
        self._training = SimTraining(scenario.workload)
        self.bucket = SimBucket()
        self.bucket.clock = lambda: self.engine.now
        self.checker = InvariantChecker(
            self.bucket.objects,
            self._training,
            on_violation=self._on_violation,
            on_entry=self._on_entry,
        )
        # The checker sees each change before any process does.
        self.bucket.listeners.append(self.checker.on_object_changed)
        self._market = SimMarket(
            scenario.market,
            self._random_streams.stream("market"),
            lambda name: self._random_streams.stream(f"offer {name}"),
        )
        self.cloud = self._create_cloud(PROVISIONER_NAME)
        self.clouds = {self.cloud.name: self.cloud}
        """By the name of the provisioner."""
        if scenario.next_fit is not None:
            name = scenario.next_fit.provisioner
            self.clouds[name] = self._create_cloud(name)
        self.network = SimNetwork(
            self.engine, self._random_streams.stream("wire"), scenario.network.latency_s
        )
        self.network.is_firewalled = scenario.network.is_firewalled
        self._partitions: list[NetworkPartition] = []
        self._feeder_nodes: dict[str, SimFeederNode] = {}
        self._name_counters: dict[str, int] = {}
        self._started_at: dict[str, float] = {}
        self._processes: list[SimProcess] = []
        self._run_ended_at: float | None = None
        self._timed_entries: list[TimedEntry] = []
        self._change_events: list[ScenarioEvent] = []
        """Events that a change of machines triggers."""
        self._change_counts: Counter[type[AtNetworkChange | AtMoveClosed]] = Counter()
        self._machines_ended_at: float | None = None
        self._faults_stopped = False
        self._dataset = self._create_dataset() if scenario.workload.dataset is not None else None
        self._launch = AgentLaunchSpec("sim://run", RUN_ID, "not a secret", ("sim",))
        self._dependencies = self._create_dependencies()

    def run(self) -> SimulationResult:
        """Run the simulation to its end."""
        self.schedule_events()
        with simulation_patches(), self._dataset.patches() if self._dataset else nullcontext():
            self.engine.run(
                until=self.scenario.faults_duration_s + self.scenario.completion_timeout_s
            )
        result, checker, limits = self.result, self.checker, self.scenario.cost_limits
        result.cost = self._cost_record()
        # Before the check of the end, which a run that is late or expensive may fail as well.
        if limits and (broken := find_cost_violation(result.cost, limits)) is not None:
            checker.report_violation(broken)
        # After a violation the run is incomplete, and every check of its end would fail.
        if checker.violation is None:
            checker.check_end(self.scenario)
            books = ChainMap(*(cloud.billed_by_group() for cloud in self.clouds.values()))
            checker.check_books(books, wall_ms(self.engine.now))
        if self._dataset is not None and (state := checker.result_state()) is not None:
            result.world_sizes_by_epoch = self._dataset.history.world_sizes_by_epoch(state)
            result.slices_of_feeders = self._dataset.slices_of_feeders
        result.violation = checker.violation
        result.entries = checker.entries
        result.view = checker.reference_view
        result.duration_s = self.engine.now
        result.event_count = self.engine.event_count
        result.requests = self.bucket.total_requests
        result.machine_seconds = sum(cloud.machine_seconds for cloud in self.clouds.values())
        result.machine_count = sum(cloud.billed_count for cloud in self.clouds.values())
        result.steps_repeated = self._training.executed_steps - self._training.max_step
        result.top_level_folders = frozenset(
            key.partition("/")[0] for key in self.bucket.objects
        ) - {_SPOTFIT_FOLDER}
        # Agents that still run at the end were not counted by their exit.
        for name in self.nodes:
            result.agent_seconds += self.engine.now - self._started_at[name]
        # Greenlets that never end would keep the whole simulation in memory.
        for process in self._processes:
            process.discard()
        if self._dataset is not None:
            self._dataset.close()
        return result

    def schedule_events(self) -> None:
        """Start the laptop and schedule the events of the scenario."""
        plan = self.scenario.laptop
        laptop, supervisor = self._create_supervisor("laptop")
        laptop.start(supervisor.tick)

        def switch_off() -> None:
            self._log("laptop", "is switched off")
            laptop.kill()
            if plan.sweep_interval_s is not None and not plan.sweeps_from_start:
                self._start_sweep(plan.sweep_interval_s)

        if plan.sweeps_from_start and plan.sweep_interval_s is not None:
            self._start_sweep(plan.sweep_interval_s)
        if plan.dies_at_s is not None:
            self.engine.schedule_after(plan.dies_at_s, switch_off)
        if self.scenario.next_fit is not None:
            self.engine.schedule_after(self.scenario.next_fit.called_at_s, self._call_next_fit)
        for event in self.scenario.events:
            self._schedule_event(event)
        self._schedule_random_fault(
            self.scenario.network.resets_per_hour, self._reset_random_connection
        )
        self._schedule_random_fault(
            self.scenario.network.partitions_per_hour, self._isolate_random_host
        )
        self.engine.schedule_after(self.scenario.faults_duration_s, self._stop_faults)
        self.engine.schedule_after(_CHECK_INTERVAL_S, self._check_run_end)

    # --- instances ---------------------------------------------------------------------------

    def on_instance_booted(self, instance: SimInstance) -> None:
        """Start the agent of the instance."""

        def on_exit(error: BaseException | None) -> None:
            del self.nodes[process.name]
            self.result.agent_seconds += self.engine.now - self._started_at[process.name]
            if isinstance(error, SimulatedError):
                self.checker.crashed_agents.add(node.agent_id)
            else:
                self._report_exception(f"the agent {process.name}", error)
            node.clean_up()
            failure = node.agent.start_failure
            if failure is not None:
                instance.exit_code = UNREACHABLE_EXIT_CODES[failure.what]
            # A machine without its agent is useless; the backend ends it with its main process.
            self._cloud_of(instance).terminate(
                instance,
                "its agent exited",
                closes_connections=True,
                failed=error is not None or failure is not None,
                # As its exit code `DRAINED`.
                requeues=node.agent.is_drained and not node.agent.is_replaced,
            )

        process = self._create_process("a", on_exit)
        self.network.network_by_host[process.name] = self._market.offers[instance.offer].network
        self._log(process.name, f"starts on {instance.name}")
        node = self.nodes[process.name] = SimNode(self._dependencies, process, instance)

    def on_instance_terminated(self, instance: SimInstance, *, closes_connections: bool) -> None:
        """Terminate the agent of the instance."""
        # An instance whose agent has exited already has no node any more.
        for machine in self.nodes.values():
            if machine.instance is instance:
                self.checker.terminated_agents.add(machine.agent_id)
                machine.terminate(closes_connections=closes_connections)

    def _report_exception(self, actor: str, error: BaseException | None) -> None:
        """Agents and clients survive everything that the simulation does to them."""
        if error is not None:
            traceback_text = "".join(traceback.format_exception(error))
            self.checker.report_violation(f"{actor} raised: {traceback_text}")

    # --- client processes: laptop, sweeps, cancellation ---------------------------------------

    def _start_sweep(self, interval_s: float) -> None:
        sweep, supervisor = self._create_supervisor("sweep")
        sweep.start(supervisor.tick)
        self.engine.schedule_after(self.scenario.laptop.sweep_duration_s, sweep.kill)
        self.engine.schedule_after(interval_s, lambda: self._start_sweep(interval_s))

    def _call_next_fit(self) -> None:
        next_fit = self.scenario.next_fit
        assert next_fit is not None
        workers = next_fit.num_workers or self.scenario.num_workers
        spec = structs.replace(
            self._run_spec(),
            provisioner=next_fit.provisioner,
            min_workers=workers,
            max_workers=workers,
        )
        process = self._create_process("laptop", partial(self._report_exception, "laptop"))
        supervisor = SimSupervisor(self._dependencies, process, spec, self._launch, fit_number=2)
        process.start(supervisor.tick)

    def _create_supervisor(self, kind: str) -> tuple[SimProcess, SimSupervisor]:
        process = self._create_process(kind, lambda error: self._report_exception(kind, error))
        return process, SimSupervisor(self._dependencies, process, self._run_spec(), self._launch)

    def _run_spec(self) -> RunSpec:
        scenario, plan = self.scenario, self.scenario.workload.validations
        validation = None
        if plan is not None:
            validation = ValidationSpec(
                own_machine=plan.own_machine, resources={"CPU": 1.0}, timeout_s=plan.timeout_s
            )
        return RunSpec(
            run_id=RUN_ID,
            name="run",
            fit_id="fit",
            min_workers=scenario.min_workers or scenario.num_workers,
            max_workers=scenario.num_workers,
            is_elastic=scenario.min_workers is not None,
            resize_interval_s=scenario.resize_interval_s,
            failure_limits=scenario.failure_limits,
            retention=scenario.retention,
            provisioner="sim",
            storage_url="sim://run",
            hang_detection=scenario.hang_detection,
            timing=scenario.timing,
            time_budget_s=scenario.time_budget_s,
            validation=validation,
            feeders=self._feeder_spec(),
            cost=scenario.cost if scenario.cost.offers else CostSpec(offers=_OFFERS),
        )

    def _feeder_spec(self) -> FeederSpec | None:
        feeders, offers = self.scenario.feeders, self._feeder_offers()
        if feeders is None or not offers:
            return feeders
        return structs.replace(
            feeders,
            offers=offers,
            networks=tuple(dict.fromkeys(one.network for one in offers)),
            usd_per_hour=max(one.price.usd_per_hour for one in offers if one.price is not None),
        )

    # --- events and faults -------------------------------------------------------------------

    def _schedule_event(self, event: ScenarioEvent) -> None:
        def on_step(step: int) -> None:
            if event.trigger == AtStep(step):
                # Not inside the step: the worker must not be killed by its own call.
                self.engine.schedule_after(0.0, lambda: self._apply_event(event))

        match event.trigger:
            case AtTime(after_s=after_s):
                self.engine.schedule_after(after_s, lambda: self._apply_event(event))
            case AtStep():
                self._training.step_listeners.append(on_step)
            case AtNetworkChange() | AtMoveClosed():
                self._change_events.append(event)

    def _apply_event(self, event: ScenarioEvent) -> None:
        match event:
            case ReclaimMachine(target=target, with_notice=notice):
                for machine in self._select_targets(target):
                    self._cloud_of(machine.instance).reclaim(machine.instance, with_notice=notice)
            case FreezeAgent(target=target, duration_s=seconds):
                for machine in self._select_targets(target):
                    self._log(machine.agent_id, f"is frozen for {seconds:.1f} s")
                    machine.process.freeze(seconds)
            case CrashAgent(target=target):
                for machine in self._select_targets(target):
                    self._log(machine.agent_id, "is killed")
                    machine.process.kill()
            case KillForMemory(target=target):
                for machine in self._select_targets(target):
                    self._cloud_of(machine.instance).kill_for_memory(machine.instance)
                    self._training.memory_kill_count += 1
            case RaiseInAgent(target=target, interval_s=interval_s):
                for machine in self._select_targets(target):
                    self._log(machine.agent_id, "raises an exception")
                    machine.raise_error()
                if interval_s is not None and self.checker.reference_view.fit_end is None:
                    self.engine.schedule_after(interval_s, lambda: self._apply_event(event))
            case IsolateHost(
                target=target, duration_s=seconds, blocks_outbound=outbound, blocks_inbound=inbound
            ):
                for machine in self._select_targets(target):
                    self._add_partition(NetworkPartition(machine.host, outbound, inbound), seconds)
            case CancelRun():
                user, supervisor = self._create_supervisor("someone")
                user.start(supervisor.cancel)
            case InvalidCredentials(duration_s=seconds):
                self._log("cloud", f"rejects the credentials for {seconds:.1f} s")
                self._market.reject_credentials_until(self.engine.now + seconds)
            case BucketOutage(duration_s=seconds):
                self._log("bucket", f"fails all requests for {seconds:.1f} s")
                self._active_faults.start_outage()
                self.engine.schedule_after(seconds, self._active_faults.end_outage)
            case BucketStall(duration_s=seconds):
                self._log("bucket", f"hangs for {seconds:.1f} s")
                self._active_faults.stall_until(self.engine.now + seconds)

    def _select_targets(self, target: TargetSelector) -> list[SimNode]:
        leader = self.checker.leader
        alive = [machine for machine in self.nodes.values() if machine.process.is_alive]
        if target == "all":
            return alive
        if target == "leader":
            return [machine for machine in alive if machine.agent_id == leader]
        # Without a leader everyone is a follower.
        if target == "follower":
            alive = [machine for machine in alive if machine.agent_id != leader]
        return [self._fault_rng.choice(alive)] if alive else []

    def _schedule_random_fault(self, per_hour: float, inject: Callable[[], None]) -> None:
        """Inject a fault at random times (a Poisson process) until faults end."""

        def inject_and_repeat() -> None:
            if not self._faults_stopped:
                inject()
                self._schedule_random_fault(per_hour, inject)

        if per_hour > 0 and not self._faults_stopped:
            wait_s = self._fault_rng.expovariate(per_hour / 3600.0)
            self.engine.schedule_after(wait_s, inject_and_repeat)

    def _reset_random_connection(self) -> None:
        connections = list(self.network.connections)
        if connections:
            connection = self._fault_rng.choice(connections)
            self._log(connection.agent, f"loses its connection to {connection.address}")
            connection.reset()

    def _isolate_random_host(self) -> None:
        for machine in self._select_targets("any"):
            way = self._fault_rng.choice([(True, True), (True, False), (False, True)])
            self._add_partition(
                NetworkPartition(machine.host, *way),
                self._fault_rng.uniform_in(self.scenario.network.partition_s),
            )

    def _add_partition(self, partition: NetworkPartition, duration_s: float) -> None:
        way = {
            (True, True): "",
            (True, False): " (outbound only)",
            (False, True): " (inbound only)",
        }
        self._log(
            partition.host,
            f"is isolated for {duration_s:.1f} s"
            f"{way[partition.blocks_outbound, partition.blocks_inbound]}",
        )
        self.network.add_partition(partition)
        self._partitions.append(partition)
        self.engine.schedule_after(duration_s, lambda: self._remove_partition(partition))

    def _remove_partition(self, partition: NetworkPartition) -> None:
        # The end of the faults may have removed it earlier.
        if partition in self._partitions:
            self._partitions.remove(partition)
            self.network.remove_partition(partition)

    def _stop_faults(self) -> None:
        self._faults_stopped = True
        self._log("world", "faults end")
        self._active_faults.stop_faults()
        self._market.stop_faults()
        # Capacity is unlimited from now on, which no trace point announces.
        for cloud in self.clouds.values():
            cloud.schedule_allocation()
        # A copy: removing changes the list.
        for partition in list(self._partitions):
            self._remove_partition(partition)

    # --- factories ---------------------------------------------------------------------------

    def _create_process(
        self, kind: str, on_exit: Callable[[BaseException | None], None]
    ) -> SimProcess:
        name = self._new_name(kind)
        stream = self._random_streams.stream(name)
        # Every machine has its own epoch and rate: comparing clocks of two machines fails here.
        skew = self.scenario.clock_skew
        clock = SimClock(stream.uniform(0.0, 1e5), 1.0 + stream.uniform(-skew, skew))
        # Only agents crash at random; the scenario says when the client goes off.
        fault_injector = ProcessFaultInjector(self._active_faults, stream, can_crash=kind == "a")
        # A stream of its own: seeds keep their faults.
        wall_stream = self._random_streams.stream(f"wall clock of {name}")
        error_s = self.scenario.wall_clock_error_s
        largest_skew_s = _WALL_SKEW_S if error_s is None else error_s
        process = SimProcess(
            self.engine,
            name,
            clock=clock,
            fault_injector=fault_injector,
            on_exit=on_exit,
            wall_skew_s=wall_stream.uniform(-largest_skew_s, largest_skew_s),
        )
        self._started_at[name] = self.engine.now
        self._processes.append(process)
        return process

    def _new_name(self, kind: str) -> str:
        number = self._name_counters[kind] = self._name_counters.get(kind, 0) + 1
        return f"{kind}{number}"

    def _create_dependencies(self) -> SimDependencies:
        design, streams = self._design, self._random_streams

        def open_store(process: SimProcess) -> Store:
            stream = streams.stream(f"line of {process.name}")
            store = design.store(
                self.bucket, process, FaultyConnection(self._active_faults, stream)
            )
            return AuthenticatedStore(store, RUN_KEY)

        # Drawn in every simulation, so that a fixed design does not change the later faults.
        drawn = self._fault_rng.bernoulli(_BACKGROUND_CALLS_FRACTION)
        fixed = design.uses_background_calls
        worker_context = SimWorkerContext(
            engine=self.engine,
            network=self.network,
            bucket=self.bucket,
            run_key=RUN_KEY,
            training=self._training,
            stream=streams.stream("workers"),
            report_violation=self.checker.report_violation,
            log=self._log,
            is_pending=self.checker.is_pending,
            latest_checkpoint=self.checker.latest_checkpoint,
            feeder_nodes=self._feeder_nodes,
            dataset=self._dataset,
        )
        return SimDependencies(
            run_id=RUN_ID,
            worker_context=worker_context,
            network=self.network,
            open_store=open_store,
            open_provisioner=self._open_provisioner,
            on_entry_applied=self.checker.on_entry_applied,
            on_callback=self.checker.on_callback,
            new_id=lambda: self._new_name("t"),
            uses_background_calls=drawn if fixed is None else fixed,
        )

    def _create_dataset(self) -> SimDataset:
        # NumPy and PyArrow are extras; other scenarios do not need them.
        from spotfit_localsim.virtual.sim_dataset import SimDataset

        plan, spec = self.scenario.workload.dataset, self._run_spec()
        assert plan is not None
        dataset = SimDataset(
            plan,
            self.engine,
            stream=self._random_streams.stream("dataset"),
            world_sizes=tuple(range(spec.min_workers, spec.max_workers + 1)),
            report_violation=self.checker.report_violation,
            is_reachable=self.network.is_connected,
            feeder_nodes=self._feeder_nodes,
        )
        self._training.history = dataset.history
        return dataset

    def _create_cloud(self, name: str) -> SimCloud:
        cloud = SimCloud(self.engine, self._market, self._log, name)
        cloud.observer = self
        cloud.request_listeners.append(self.checker.on_machines_requested)
        cloud.call_listeners.append(self.checker.on_cloud_called)
        return cloud

    def _cloud_of(self, instance: SimInstance) -> SimCloud:
        return next(one for one in self.clouds.values() if instance.token in one.groups)

    def _open_provisioner(self, process: SimProcess, name: str) -> Provisioner:
        node = self.nodes.get(process.name)
        # As in reality, a machine has neither the packages nor the credentials of another cloud.
        if node is not None and (own := self._cloud_of(node.instance).name) != name:
            raise ConfigError(f"A machine of {own} has no credentials for {name}.")
        cloud, create = self.clouds[name], self._design.provisioner
        workers = create(cloud, self._market, process, slots=self.scenario.slots_per_machine)
        if not self._feeder_offers():
            return workers
        feeders = create(cloud, self._market, process, slots=1, for_feeders=True)
        return FeederBackendProvisioner(workers, feeders)

    def _feeder_offers(self) -> tuple[Offer, ...]:
        """The offers of the backend of feeders; empty if they have none of their own."""
        market = self.scenario.market
        return feeder_offers(market.offers_at(0.0, PROVISIONER_NAME, for_feeders=True))

    # --- timeline and result -----------------------------------------------------------------

    def _on_entry(self, entry: JournalEntry) -> None:
        number = len(self._timed_entries)
        self._timed_entries.append((self.engine.now, entry))
        self._log(entry.author, f"[{number}] {describe_event(entry.event)}")
        change = self._change_of(entry)
        if change is None:
            return
        self._change_counts[change] += 1
        for event in self._change_events:
            trigger = event.trigger
            # Not inside the write: the process that made it must not be killed by its own call.
            if isinstance(trigger, change) and trigger.number == self._change_counts[change]:
                self.engine.schedule_after(trigger.after_s, partial(self._apply_event, event))

    def _change_of(self, entry: JournalEntry) -> type[AtNetworkChange | AtMoveClosed] | None:
        """The kind of trigger that the entry is, judged before it is folded."""
        match entry.event:
            case LeaderElected(coordinator_address=str(), network=network):
                before = self.checker.reference_view.network
                return AtNetworkChange if before not in ("", network) else None
            case RoundClosed(cause=FailureCause.RESIZE):
                return AtMoveClosed
            case _:
                return None

    def _cost_record(self) -> CostRecord:
        clouds = self.clouds.values()
        return CostRecord(
            cost=self.scenario.cost,
            machines=tuple(one for cloud in clouds for one in cloud.books()),
            requests=tuple(one for cloud in clouds for one in cloud.requests),
            rounds=read_rounds(self._timed_entries),
            released_at_s=read_releases(self._timed_entries),
            replaced=read_replaced(self._timed_entries),
            chosen_at_s=read_choices(self._timed_entries),
            alternations_s=read_alternations(self._timed_entries),
            is_elastic=self.scenario.min_workers is not None,
            finished_at_s=read_finish(self._timed_entries),
            billed_usd=tuple(
                one for cloud in clouds for one in cloud.billed_usd_by_offer().items()
            ),
            ended_at_s=self.engine.now,
        )

    def _log(self, actor: str, text: str) -> None:
        self.result.timeline.append(TimelineEntry(self.engine.now, actor, text))

    def _on_violation(self, violation: str) -> None:
        self._log("CHECKER", violation)
        self.engine.stop()

    def _check_run_end(self) -> None:
        """Stop when the run has ended and all machines are released."""
        now = self.engine.now
        fit_count = 1 if self.scenario.next_fit is None else 2
        view = self.checker.reference_view
        if view.fit_end is not None and view.fit_count == fit_count:
            self._run_ended_at = now if self._run_ended_at is None else self._run_ended_at
            # A run that ended but still pays for machines is not over.
            active = [
                instance.name
                for cloud in self.clouds.values()
                for instance in cloud.active_instances()
            ]
            self._machines_ended_at = None if active else self._machines_ended_at or now
            if not active and self._is_recorded(now):
                self.engine.stop()
                return
            if (
                # While faults last, a release may fail any number of times.
                now - max(self._run_ended_at, self.scenario.faults_duration_s)
                > self.scenario.release_timeout_s
            ):
                self.checker.report_violation(
                    f"{', '.join(active)} not released long after the end of the run"
                )
        self.engine.schedule_after(_CHECK_INTERVAL_S, self._check_run_end)

    def _is_recorded(self, now: float) -> bool:
        """Whether the ends of all released machines are recorded, or will not be soon."""
        ended_at = self._machines_ended_at
        is_over = ended_at is not None and now - ended_at >= _RECORD_TIMEOUT_S
        return is_over or not self.checker.reference_view.usage.ending_groups
