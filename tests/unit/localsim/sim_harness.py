"""An engine with processes that are controlled by the test."""

from collections.abc import Callable
from typing import Any

from spotfit.model.events import CheckpointCommitted
from spotfit.testing.builders import RUN_KEY
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.engine import Engine, SimClock, SimProcess
from spotfit_localsim.virtual.faults import (
    NO_FAULTS,
    ActiveFaults,
    FaultConfig,
    ProcessFaultInjector,
)
from spotfit_localsim.virtual.sim_network import SimNetwork
from spotfit_localsim.virtual.sim_store import SimBucket
from spotfit_localsim.virtual.sim_workers import SimWorkerContext
from spotfit_localsim.virtual.workload import SimTraining, Workload


class SimHarness:
    """An engine, its processes and what they recorded."""

    def __init__(self, faults: FaultConfig = NO_FAULTS) -> None:
        self.engine = Engine()
        self.active_faults = ActiveFaults(faults)
        self.rng = SeededStreams(1)
        self.timeline: list[tuple[str, str]] = []
        self.errors: list[BaseException] = []
        self.violations: list[str] = []

    def process(
        self, name: str = "a1", on_exit: Callable[[BaseException | None], None] | None = None
    ) -> SimProcess:
        """A process that is not started yet."""
        return SimProcess(
            self.engine,
            name,
            clock=SimClock(),
            fault_injector=ProcessFaultInjector(self.active_faults, self.rng.stream(name)),
            on_exit=on_exit or self._record_error,
        )

    def idle(self, name: str) -> SimProcess:
        """A running process that does nothing."""
        process = self.process(name)
        process.start(lambda now: now + 1000.0)
        self.engine.run(until=self.engine.now)
        return process

    def run_jobs(self, process: SimProcess, *jobs: Callable[[], Any]) -> list[Any]:
        """Run the jobs in the process, in order; return their results or exceptions."""
        results: list[Any] = []

        def tick(_now: float) -> float | None:
            for job in jobs:
                try:
                    results.append(job())
                except Exception as error:  # noqa: BLE001  # handed to the test
                    results.append(error)
            return None

        process.start(tick)
        self.engine.run(until=self.engine.now + 1000.0)
        return results

    def record_message(self, source: str, message: str) -> None:
        self.timeline.append((source, message))

    def report_violation(self, violation: str) -> None:
        self.violations.append(violation)

    def is_pending(self, checkpoint: CheckpointCommitted) -> bool:
        """Every checkpoint has a pending validation."""
        return True

    def create_worker_context(
        self, network: SimNetwork, bucket: SimBucket, workload: Workload
    ) -> SimWorkerContext:
        """The context that simulated workers share, without a checkpoint to resume from."""
        return SimWorkerContext(
            engine=self.engine,
            network=network,
            bucket=bucket,
            run_key=RUN_KEY,
            training=SimTraining(workload),
            stream=self.rng.stream("workers"),
            report_violation=self.report_violation,
            log=self.record_message,
            is_pending=self.is_pending,
            latest_checkpoint=lambda: None,
        )

    def _record_error(self, error: BaseException | None) -> None:
        if error is not None:
            self.errors.append(error)
