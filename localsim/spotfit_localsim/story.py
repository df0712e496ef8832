"""A run told as a timeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never

from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Submitted,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.view import View


@dataclass(frozen=True, slots=True)
class Line:
    """Something that happened, by the world's clock."""

    at_s: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:10.3f}  {self.who:<14} {self.what}"


@dataclass
class Story:
    """What happened in one world, and whether all that must hold did hold."""

    scenario: str
    seed: int
    lines: list[Line] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    view: View = field(default_factory=View)
    broken: str | None = None
    """What did not hold, if anything."""
    lasted_s: float = 0.0
    events: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """Requests to the bucket by kind."""
    agent_seconds: float = 0.0
    machine_seconds: float = 0.0
    steps_repeated: int = 0
    folders: frozenset[str] = frozenset()
    """What lies in the run's folder at the end, apart from what is ours."""

    @property
    def outcome(self) -> str | None:
        """How the run ended, if it did."""
        return self.view.ended.outcome if self.view.ended else None

    @property
    def elections(self) -> int:
        return self.view.epoch

    @property
    def rounds_from_memory(self) -> int:
        """How many rounds began from a state in memory."""
        events = (entry.event for entry in self.entries)
        return sum(isinstance(one, RoundOpened) and one.round.memory is not None for one in events)

    @property
    def rounds(self) -> int:
        return sum(isinstance(entry.event, RoundOpened) for entry in self.entries)

    def __str__(self) -> str:
        head = f"{self.scenario}, seed {self.seed}: {self.broken or self.outcome or 'no end'}"
        return "\n".join([head, *map(str, self.lines)])


def tell(event: Event) -> str:  # one line a kind of event
    """A journal entry in a few words."""
    match event:
        case FitStarted(spec=spec):
            return f"fit started: {spec.workers_min}..{spec.workers_max} workers"
        case LeaderElected(leader=leader, epoch=epoch, why=why, lost=lost):
            return f"{leader} leads, epoch {epoch}: {why}{f' (lost {lost})' if lost else ''}"
        case Intended(request=request, plan=plan, why=why):
            what = "machines" if request.role == "train" else "machine for validations"
            return f"intends {plan.token}: {plan.nodes} {what} ({why})"
        case Submitted(token=token):
            return f"submitted {token}"
        case Refused(token=token, why=why, final=final):
            return f"refused {token}{' for good' if final else ''}: {why}"
        case NodeLost(token=token, node=node, agent=agent, why=why):
            return f"lost {token}.{node} ({agent}): {why}"
        case Released(token=token, others=others):
            return f"released {', '.join((token, *others))}"
        case Noticed(agent=agent, notice=notice):
            return f"{agent} has a notice: {notice.seconds_left} s"
        case RoundOpened(round=opened):
            seats = ", ".join(
                f"{one.agent}:{one.first_rank}+{one.workers}" for one in opened.places
            )
            return f"round {opened.number} opened from {opened.checkpoint}: {seats}"
        case RoundClosed(number=number, blame=blame, why=why):
            return f"round {number} closed, blame {blame}: {why}"
        case CheckpointCommitted(name=name, round=number, report=report, metrics=metrics):
            return f"committed {name} (round {number}, report {report}): {metrics}"
        case CheckpointDropped(name=name, why=why):
            return f"dropped {name}: {why}"
        case ValidationBegun(name=name, mark=mark, attempt=attempt, agent=agent, why=why):
            return f"validates {name} ({mark}), attempt {attempt}, by {agent}: {why}"
        case ValidationEnded(name=name, mark=mark, status=status, metrics=metrics, why=why):
            return f"{status} {name} ({mark}): {metrics} {why}"
        case TrainingEnded(ended=ended):
            return f"training ended: {ended.outcome} {ended.why} {ended.metrics}"
        case CancelRequested(why=why):
            return f"cancel requested: {why}"
        case FitEnded(outcome=outcome, why=why, metrics=metrics):
            return f"FIT ENDED: {outcome} {why} {metrics}"
    assert_never(event)
