"""Small grounds to stand on: one engine, and processes that do what a test tells them."""

from collections.abc import Callable
from typing import Any

from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.engine import Engine, SimClock, SimProcess
from spotfit_localsim.virtual.faults import (
    NO_FAULTS,
    ActiveFaults,
    FaultConfig,
    ProcessFaultInjector,
)


class SimHarness:
    """An engine with processes on it."""

    def __init__(self, faults: FaultConfig = NO_FAULTS) -> None:
        self.engine = Engine()
        self.season = ActiveFaults(faults)
        self.rng = SeededStreams(1)
        self.messages: list[tuple[str, str]] = []
        self.errors: list[BaseException] = []

    def process(self, name: str = "a1") -> SimProcess:
        """A process that is not started yet."""
        return SimProcess(
            self.engine,
            name,
            clock=SimClock(),
            fault_injector=ProcessFaultInjector(self.season, self.rng.stream(name)),
            on_exit=self._ended,
        )

    def idle(self, name: str) -> SimProcess:
        """A process that lives and does nothing."""
        process = self.process(name)
        process.start(lambda now: now + 1000.0)
        self.engine.run(until=self.engine.now)
        return process

    def run_jobs(self, process: SimProcess, *jobs: Callable[[], Any]) -> list[Any]:
        """Let the process do these one after the other; what they gave, or raised."""
        given: list[Any] = []

        def tick(_now: float) -> float | None:
            for job in jobs:
                try:
                    given.append(job())
                except Exception as error:  # noqa: BLE001  # handed to the test
                    given.append(error)
            return None

        process.start(tick)
        self.engine.run(until=self.engine.now + 1000.0)
        return given

    def record_message(self, who: str, what: str) -> None:
        self.messages.append((who, what))

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.errors.append(error)
