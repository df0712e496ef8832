"""Small grounds to stand on: one engine, and processes that do what a test tells them."""

from collections.abc import Callable
from typing import Any

from spotfit_localsim.dice import Dice
from spotfit_localsim.engine import Clock, Engine, Process
from spotfit_localsim.faults import CALM, Faults, Hazards, Season


class Ground:
    """An engine with processes on it."""

    def __init__(self, faults: Faults = CALM) -> None:
        self.engine = Engine()
        self.season = Season(faults)
        self.dice = Dice(1)
        self.said: list[tuple[str, str]] = []
        self.broken: list[BaseException] = []

    def process(self, name: str = "a1") -> Process:
        """A process that is not started yet."""
        return Process(
            self.engine,
            name,
            clock=Clock(),
            hazards=Hazards(self.season, self.dice.stream(name)),
            ended=self._ended,
        )

    def idle(self, name: str) -> Process:
        """A process that lives and does nothing."""
        process = self.process(name)
        process.start(lambda now: now + 1000.0)
        self.engine.run(until=self.engine.now)
        return process

    def do(self, process: Process, *jobs: Callable[[], Any]) -> list[Any]:
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

    def say(self, who: str, what: str) -> None:
        self.said.append((who, what))

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.broken.append(error)
