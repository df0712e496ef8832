"""A pretend training: what its ranks do step by step, and what must come out in the end.

The state of the model is a chain of hashes, one link a step, the same whatever the size of the
group. So a checkpoint tells whether a step was lost, or counted twice, and the result of any run
can be compared with that of the undisturbed one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from spotfit.model.events import ValidationAsked
from spotfit_localsim.faults import Span

How = Literal["raises", "dies", "hangs"]
Names = Literal["made", "by step", "one"]


@dataclass(frozen=True, slots=True)
class Crash:
    """The user's own mistake: that rank fails in that step, the first `times` times it is there."""

    step: int
    rank: int = 0
    how: How = "raises"
    times: int = 1


@dataclass(frozen=True, slots=True)
class Validations:
    """How checkpoints are validated."""

    share: float = 1.0
    """Of the checkpoints, those that are to be validated."""
    takes_s: Span = (0.5, 10.0)
    failing: float = 0.1
    """The share of validations that raise."""
    hanging: float = 0.1
    """The share of validations that never end by themselves."""
    timeout_s: float = 30.0
    own_machine: bool | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained."""

    steps: int = 40
    step_s: Span = (0.3, 0.6)
    start_s: Span = (0.1, 1.0)
    report_every: int = 2
    save_every: int = 8
    """Steps between two checkpoints; 0 for none."""
    save_s: Span = (0.1, 1.5)
    everyone_saves: bool = True
    """Whether every rank brings files, or only rank 0."""
    background: bool = False
    """Whether ranks train on while their machine uploads for them."""
    snapshots: bool = False
    """Whether ranks save as a Checkpointer does: into memory, of which a neighbour has a copy."""
    stall_s: Span = (0.001, 0.05)
    """How long a snapshot takes."""
    copy_s: Span = (0.01, 0.5)
    """How long a copy takes to the neighbour, and back."""
    goes_back: float = 0.0
    """The chance that a training goes back to the latest checkpoint once it has saved."""
    saves_on_notice: bool = True
    names: Names = "made"
    """Whether the user chooses the names of checkpoints: the same ones in every attempt, or always
    the same one."""
    barriers: bool = False
    """Whether ranks meet at the hub before each checkpoint."""
    peers_raise: float = 0.5
    """The chance that a rank notices a lost peer by itself, and raises."""
    peers_raise_s: Span = (0.001, 8.0)
    end_s: Span = (0.005, 0.3)
    """How long a killed worker takes to be gone."""
    crashes: tuple[Crash, ...] = ()
    validations: Validations | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The model after so many steps."""

    step: int = 0
    link: str = "seed"

    def next(self) -> State:
        """One step further."""
        link = hashlib.sha1(f"{self.link} {self.step + 1}".encode(), usedforsecurity=False)
        return State(self.step + 1, link.hexdigest()[:16])


def score(step: int) -> int:
    """What a validation finds in a checkpoint of that step."""
    return step * 7 % 11


class Chain:
    """The undisturbed training."""

    def __init__(self) -> None:
        self._states = [State()]

    def at(self, step: int) -> State:
        """The model after so many steps, if nothing is lost and nothing done twice."""
        while len(self._states) <= step:
            self._states.append(self._states[-1].next())
        return self._states[step]


@dataclass
class Training:
    """The workload as it goes in one world."""

    load: Workload
    chain: Chain = field(default_factory=Chain)
    happened: dict[Crash, int] = field(default_factory=dict)
    furthest: int = 0
    """The last step that was ever done."""
    steps_done: int = 0
    """Steps of all rounds, the repeated ones too."""
    saved: dict[int, set[int]] = field(default_factory=dict)
    """By round, the steps whose states a rank has in memory, unless they were taken back."""
    reached: list[Callable[[int], None]] = field(default_factory=list)
    """Told of every step that is done for the first time."""

    def done(self, step: int) -> None:
        """The group has made that step."""
        self.steps_done += 1
        if step > self.furthest:
            self.furthest = step
            for told in self.reached:
                told(step)

    def asks(self, step: int) -> ValidationAsked | None:
        """Whether a checkpoint of that step is to be validated: all ranks and attempts agree."""
        plan = self.load.validations
        drawn = int(self.chain.at(step).link[:4], 16) / 0x10000 if step else 1.0
        return ValidationAsked() if plan is not None and drawn < plan.share else None

    def goes_back(self, round_: int, report: int) -> bool:
        """Whether all ranks do, after that report."""
        drawn = (
            int(
                hashlib.sha1(f"{round_} {report}".encode(), usedforsecurity=False).hexdigest()[:4],
                16,
            )
            / 0x10000
        )
        return drawn < self.load.goes_back

    def went_back(self, round_: int) -> None:
        """All ranks of that round have; whatever was saved so far is left behind."""
        self.saved = {number: saved for number, saved in self.saved.items() if number > round_}

    def crash(self, step: int, rank: int) -> Crash | None:
        """Whether that rank fails now."""
        for crash in self.load.crashes:
            here = crash.step == step and crash.rank == rank
            if here and self.happened.get(crash, 0) < crash.times:
                self.happened[crash] = self.happened.get(crash, 0) + 1
                return crash
        return None

    @property
    def crashed(self) -> int:
        """How often the user's own mistakes struck so far."""
        return sum(self.happened.values())

    @property
    def result(self) -> State:
        """What the run must return."""
        return self.chain.at(self.load.steps)
