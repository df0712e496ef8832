"""The timeline of a simulated run, with a line for every type of entry."""

import typing

import pytest

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    DeadlineAtRisk,
    FailureCause,
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
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.model.spec import RunSpec
from spotfit.model.topology import NodeAssignment, Notice, Round
from spotfit_localsim.virtual.timeline import SimulationResult, TimelineEntry, describe_event

A1, T1 = AgentId("a1"), Token("t1")
EVENTS: tuple[tuple[JournalEvent, str], ...] = (
    (
        FitStarted(
            spec=RunSpec(run_id=RunId("r"), name="run", fit_id="f", min_workers=2, max_workers=4)
        ),
        "2..4 workers",
    ),
    (
        LeaderElected(leader=A1, epoch=3, lost_leader=AgentId("a0"), reason="lease expired"),
        "epoch 3: lease expired (lost a0)",
    ),
    (
        GroupPlanned(
            request=GroupRequest(token=T1, num_workers=1, total_workers=1),
            plan=GroupPlan(token=T1, provisioner="sim", num_nodes=2, slots_per_node=1),
            reason="two",
        ),
        "2 machines (two)",
    ),
    (
        GroupSubmitted(token=T1, handle=GroupHandle(token=T1, provisioner="sim", name="x")),
        "submitted t1",
    ),
    (GroupRefused(token=T1, reason="none left", is_final=True), "permanently: none left"),
    (GroupWaiting(token=T1, reason="full"), "t1 waits: full"),
    (GroupWaiting(token=T1, reason=""), "t1 runs"),
    (NodeLost(token=T1, node=1, agent=A1, reason="gone"), "lost t1.1 (a1): gone"),
    (
        NodeLost(token=T1, node=1, agent=A1, reason="too few", is_unused=True),
        "released unused t1.1 (a1): too few",
    ),
    (GroupsReleased(token=T1), "released t1"),
    (
        TrainingFunctionStarted(round_number=1, startup_s=2.0),
        "round 1: all ranks train after 2.0 s",
    ),
    (PreemptionNoticed(agent=A1, notice=Notice(reason="spot", seconds_left=30.0)), "30.0 s"),
    (
        RoundOpened(
            round=Round(
                number=1,
                assignments=(
                    NodeAssignment(
                        agent=A1,
                        node_rank=0,
                        first_rank=0,
                        num_workers=2,
                        host="h",
                        token=T1,
                        node=0,
                    ),
                ),
                checkpoint_name="c",
            )
        ),
        "from c: a1:0+2",
    ),
    (RoundClosed(round_number=1, cause=FailureCause.NETWORK, reason="cut"), "cause network: cut"),
    (
        CheckpointCommitted(name="c", round=1, report_index=4, metrics={"step": 5}, ranks=(0,)),
        "round 1, report 4",
    ),
    (CheckpointDropped(name="c", reason="old"), "dropped c: old"),
    (
        GroupPlanned(
            request=GroupRequest(token=T1, num_workers=1, total_workers=1, role="validate"),
            plan=GroupPlan(token=T1, provisioner="sim", num_nodes=1, slots_per_node=1),
        ),
        "1 machine for validation",
    ),
    (
        ValidationStarted(
            checkpoint_name="c",
            checkpoint_uid="1-4",
            attempt=2,
            agent=A1,
            token=T1,
            node=0,
            reason="here",
        ),
        "validation of c (1-4) started, attempt 2, on a1: here",
    ),
    (
        ValidationEnded(checkpoint_name="c", checkpoint_uid="1-4", status="failed", reason="no"),
        "failed c (1-4): {} no",
    ),
    (
        TrainingEnded(fit_end=FitEnded(outcome="finished", reason="all")),
        "training ended: finished all",
    ),
    (MachinesChosen(workers={"spot": 2}, reason="cheap"), "machines chosen: {'spot': 2}"),
    (DeadlineAtRisk(risk="late", reason="slow"), "deadline at risk, late: slow"),
    (FeedersStopped(reason="no torch"), "no further feeders: no torch"),
    (CancelRequested(reason="enough"), "enough"),
    (FitEnded(outcome="failed", reason="why not"), "failed why not"),
    (
        MachinesObserved(times={T1: (MachineTimes(node=2, started_ms=(1, 5)),)}),
        "observed t1.2 started (1, 5)",
    ),
    (
        MachinesObserved(times={T1: (MachineTimes(node=2, is_unbilled=True),)}),
        "observed t1.2 unbilled",
    ),
    (PricesChanged(offers=(Offer(name="o", provisioner="sim", market=Market.SPOT),)), "of o"),
)


@pytest.mark.parametrize(("event", "text"), EVENTS, ids=lambda value: type(value).__name__)
def test_every_event_is_described(event: JournalEvent, text: str) -> None:
    assert text in describe_event(event)


def test_all_event_types_are_covered() -> None:
    assert {type(event) for event, _ in EVENTS} == set(typing.get_args(JournalEvent))


def test_first_line_of_a_timeline_is_the_outcome() -> None:
    result = SimulationResult(
        "scenario",
        7,
        timeline=[TimelineEntry(1.5, "a1", "starts"), TimelineEntry(2.0, "a1", "exits")],
    )
    assert str(result).splitlines()[0] == "scenario, seed 7: no end"
    assert str(result).splitlines()[2].split() == ["2.000", "a1", "exits"]
    result.violation = "a violation"
    assert "seed 7: a violation" in str(result)
    assert result.outcome is None


def test_network_changes_are_counted_without_leaders_that_have_no_machine() -> None:
    result = SimulationResult("scenario", 7)
    for network in ("a", "", "a", "b", "", "a"):
        elected = LeaderElected(leader=A1, epoch=len(result.entries), network=network)
        result.entries.append(JournalEntry(run_id=RunId("r"), author=A1, event=elected))
    assert result.network_changes == 2
