"""The result of a simulation, with a timeline of what happened."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never

from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    DeadlineAtRisk,
    FeedersStopped,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    GroupWaiting,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    MachineEvent,
    MachinesChosen,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    PreemptionNoticed,
    PricesChanged,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.view import JournalView
from spotfit_localsim.virtual.cost_invariants import CostRecord


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One event, in virtual time."""

    at_s: float
    actor: str
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:10.3f}  {self.actor:<14} {self.text}"


@dataclass
class SimulationResult:
    """What happened in a simulation, and the first violated invariant."""

    scenario: str
    seed: int
    timeline: list[TimelineEntry] = field(default_factory=list)
    entries: list[JournalEntry] = field(default_factory=list)
    view: JournalView = field(default_factory=JournalView)
    violation: str | None = None
    """The first violated invariant, or None."""
    duration_s: float = 0.0
    event_count: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """Store requests by kind."""
    agent_seconds: float = 0.0
    machine_seconds: float = 0.0
    machine_count: int = 0
    """Number of instances that were billed."""
    steps_repeated: int = 0
    world_sizes_by_epoch: dict[int, list[int]] = field(default_factory=dict)
    """With a dataset: the number of ranks of each step that counts, by epoch of the dataset."""
    slices_of_feeders: int = 0
    """Slices of the dataset that machines for feeders have returned."""
    top_level_folders: frozenset[str] = frozenset()
    """Folders in the run's bucket prefix at the end, without spotfit's own."""
    cost: CostRecord = field(default_factory=CostRecord)
    """What was rented, and what it has cost."""

    @property
    def outcome(self) -> str | None:
        """The outcome of the run; None if it did not end."""
        return self.view.fit_end.outcome if self.view.fit_end else None

    @property
    def elections(self) -> int:
        return self.view.epoch

    @property
    def rounds_from_memory(self) -> int:
        """The number of rounds that started from a snapshot in memory."""
        events = (entry.event for entry in self.entries)
        return sum(
            isinstance(one, RoundOpened) and one.round.memory_snapshot is not None for one in events
        )

    @property
    def network_changes(self) -> int:
        """The number of times that the run has changed to machines of another network."""
        events = (entry.event for entry in self.entries)
        networks = [one.network for one in events if isinstance(one, LeaderElected) and one.network]
        return sum(one != other for one, other in itertools.pairwise(networks))

    @property
    def rounds(self) -> int:
        return sum(isinstance(entry.event, RoundOpened) for entry in self.entries)

    def __str__(self) -> str:
        head = f"{self.scenario}, seed {self.seed}: {self.violation or self.outcome or 'no end'}"
        return "\n".join([head, *map(str, self.timeline)])


def describe_event(event: JournalEvent) -> str:
    """Return a one-line summary of a journal entry."""
    match event:
        case FitStarted(spec=spec):
            return f"fit started: {spec.min_workers}..{spec.max_workers} workers"
        case LeaderElected(leader=leader, epoch=epoch, reason=reason, lost_leader=lost):
            lost_text = f" (lost {lost})" if lost else ""
            return f"{leader} elected leader, epoch {epoch}: {reason}{lost_text}"
        case RoundOpened(round=opened):
            nodes = [f"{on.agent}:{on.first_rank}+{on.num_workers}" for on in opened.assignments]
            return f"round {opened.number} opened from {opened.checkpoint_name}: {', '.join(nodes)}"
        case TrainingFunctionStarted(round_number=number, startup_s=startup_s):
            return f"round {number}: all ranks train after {startup_s:.1f} s"
        case RoundClosed(round_number=number, cause=cause, reason=reason):
            return f"round {number} closed, cause {cause}: {reason}"
        case CheckpointCommitted(name=name, round=number, report_index=report, metrics=metrics):
            return f"committed {name} (round {number}, report {report}): {metrics}"
        case CheckpointDropped(name=name, reason=reason):
            return f"dropped {name}: {reason}"
        case ValidationStarted(attempt=attempt, agent=agent, reason=reason):
            what = f"validation of {event.checkpoint_name} ({event.checkpoint_uid})"
            return f"{what} started, attempt {attempt}, on {agent}: {reason}"
        case ValidationEnded(status=status, metrics=metrics, reason=reason):
            return f"{status} {event.checkpoint_name} ({event.checkpoint_uid}): {metrics} {reason}"
        case TrainingEnded(fit_end=ended):
            return f"training ended: {ended.outcome} {ended.reason} {ended.metrics}"
        case MachinesChosen(workers=workers, standing_offer=standing, reason=reason):
            return f"machines chosen: {workers}, standing {standing!r}: {reason}"
        case FeedersStopped(reason=reason):
            return f"no further feeders: {reason}"
        case DeadlineAtRisk(risk=risk, reason=reason):
            return f"deadline at risk, {risk}: {reason}"
        case CancelRequested(reason=reason):
            return f"cancel requested: {reason}"
        case FitEnded(outcome=outcome, reason=reason, metrics=metrics):
            return f"FIT ENDED: {outcome} {reason} {metrics}"
        case _:
            return _describe_machine_event(event)


def _describe_machine_event(event: MachineEvent) -> str:
    match event:
        case GroupPlanned(request=request, plan=plan, reason=reason):
            # Groups for validation and for feeders have one machine.
            purposes = {"train": "machines", "validate": "machine for validation"}
            what = purposes.get(request.role, "machine for feeders")
            return f"planned {plan.token}: {plan.num_nodes} {what} ({reason})"
        case GroupSubmitted(token=token):
            return f"submitted {token}"
        case GroupRefused(token=token, reason=reason, is_final=final):
            return f"refused {token}{' permanently' if final else ''}: {reason}"
        case GroupWaiting(token=token, reason=reason):
            return f"{token} waits: {reason}" if reason else f"{token} runs"
        case NodeLost(token=token, node=node, agent=agent, reason=reason, is_unused=True):
            return f"released unused {token}.{node} ({agent}): {reason}"
        case NodeLost(token=token, node=node, agent=agent, reason=reason):
            return f"lost {token}.{node} ({agent}): {reason}"
        case GroupsReleased(token=token, other_tokens=others):
            return f"released {', '.join((token, *others))}"
        case PreemptionNoticed(agent=agent, notice=notice):
            return f"preemption notice for {agent}: {notice.seconds_left} s left"
        case MachinesObserved(times=times):
            nodes = [
                f"{token}.{one.node}{_describe_times(one)}"
                for token, of_group in times.items()
                for one in of_group
            ]
            return f"observed {', '.join(nodes)}"
        case PricesChanged(offers=offers):
            return f"prices of {', '.join(one.name for one in offers)}"
    assert_never(event)


def _describe_times(times: MachineTimes) -> str:
    started = f" started {times.started_ms}" if times.started_ms else ""
    ended = f" ended {times.ended_ms}" if times.ended_ms else ""
    unseen = f" unseen until {times.unseen_until_ms}" if times.unseen_until_ms else ""
    return started + ended + unseen or " unbilled"
