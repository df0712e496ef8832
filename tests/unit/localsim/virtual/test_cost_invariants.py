"""Each invariant of cost and deadline is violated by the record that it is made for, and by no
other."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    GroupsReleased,
    GroupWaiting,
    JournalEntry,
    JournalEvent,
    MachinesChosen,
    NodeLost,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
)
from spotfit.model.offer import Market
from spotfit.model.spec import CostSpec
from spotfit.model.topology import NodeAssignment, Round
from spotfit.testing.builders import an_entry
from spotfit_localsim.virtual.cost_invariants import (
    CostBounds,
    CostRecord,
    ObservedRound,
    find_cost_violation,
    find_early_stops,
    find_exceeded_budget,
    find_missed_deadline,
    find_unstable_choice,
    find_unused_machines,
    read_alternations,
    read_finish,
    read_releases,
    read_replaced,
    read_rounds,
    unmet_conditions,
)
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.sim_cloud import CloudRequest, MachineRecord

DEADLINE_MS = wall_ms(10_000.0)
COST = CostSpec(deadline_ms=DEADLINE_MS, uses_on_demand=True, training_time_s=8_000.0)


WITH_BUDGET = structs.replace(COST, budget_usd=20.0)
LIMITS = CostBounds(arrival_s=120.0, changeover_s=600.0, set_size=1, settle_s=30.0, restart_s=20.0)


def machine(token: str, start_s: float, end_s: float | None = None, **fields: Any) -> MachineRecord:
    """A machine that is up 60 s after its billing has started; the offer is the first letter."""
    on_demand = token.startswith("d")
    record = MachineRecord(
        name=f"{token}.0",
        token=Token(token),
        offer=token[0],
        market=Market.ON_DEMAND if on_demand else Market.SPOT,
        billed_from_s=start_s,
        up_at_s=start_s + 60.0,
        ended_at_s=end_s,
    )
    return replace(record, **fields)


def request(token: str, at_s: float, refusal: str = "") -> CloudRequest:
    market = Market.ON_DEMAND if token.startswith("d") else Market.SPOT
    return CloudRequest(token=Token(token), at_s=at_s, market=market, refusal=refusal)


def round_of(
    number: int,
    token: str,
    times_s: tuple[float, float, float | None],
    cause: FailureCause = FailureCause.RESIZE,
) -> ObservedRound:
    """A round with one machine: opened, training and closed at these times."""
    return ObservedRound(
        number=number,
        machines=frozenset({(Token(token), 0)}),
        opened_at_s=times_s[0],
        trains_from_s=times_s[1],
        closed_at_s=times_s[2],
        cause=None if times_s[2] is None else cause,
    )


def released(*pairs: tuple[str, float]) -> tuple[tuple[Token, float], ...]:
    return tuple((Token(token), at_s) for token, at_s in pairs)


# A run that leaves spot machines "a" after their loss for on-demand machines "d", and these for
# spot machines "b" that start beside them.
KEPT = CostRecord(
    cost=COST,
    machines=(
        machine("a1", 10.0, 3000.0, reason="reclaimed"),
        machine("d1", 3050.0, 6240.0),
        machine("b1", 6000.0, 9020.0),
    ),
    requests=(request("a1", 5.0), request("d1", 3040.0), request("b1", 5995.0)),
    rounds=(
        round_of(1, "a1", (80.0, 82.0, 3005.0), FailureCause.PREEMPTION),
        round_of(2, "d1", (3120.0, 3125.0, 6200.0)),
        round_of(3, "b1", (6201.0, 6210.0, None)),
    ),
    released_at_s=released(("d1", 6220.0), ("b1", 9001.0)),
    finished_at_s=9000.0,
    billed_usd=(("a", 5.0), ("d", 10.0), ("b", 4.0)),
    ended_at_s=9100.0,
)


def test_correct_record_violates_no_invariant() -> None:
    assert unmet_conditions(KEPT, LIMITS) == ()
    assert find_missed_deadline(KEPT, LIMITS) is None
    assert find_exceeded_budget(replace(KEPT, cost=WITH_BUDGET), LIMITS) is None
    assert find_unused_machines(KEPT, LIMITS) is None
    assert find_early_stops(KEPT, LIMITS) is None


def test_first_violation_is_found() -> None:
    assert find_cost_violation(KEPT, LIMITS) is None
    dear = replace(KEPT, billed_usd=(("a", 21.0),), cost=WITH_BUDGET)
    assert find_cost_violation(dear, LIMITS) == ("$21.00 were billed; the budget is $20.00")


# --- deadline -------------------------------------------------------------------------------------


def test_late_finish_and_missing_finish_are_violations() -> None:
    assert (
        find_missed_deadline(replace(KEPT, finished_at_s=10_060.0), LIMITS)
        == "finished 60 s after the deadline"
    )
    unfinished = replace(KEPT, finished_at_s=None)
    assert find_missed_deadline(unfinished, LIMITS) is None
    assert find_missed_deadline(replace(unfinished, ended_at_s=10_001.0), LIMITS) == (
        "not finished at the deadline of 10000 s"
    )


LATE = replace(KEPT, finished_at_s=10_060.0)


@pytest.mark.parametrize(
    ("record", "condition"),
    [
        (replace(LATE, requests=(*KEPT.requests, request("d2", 5.0, "full"))), "d2 was refused"),
        (
            replace(LATE, machines=(replace(KEPT.machines[1], up_at_s=3161.0),)),
            "machines of d1 were not up within 120 s",
        ),
        (replace(LATE, machines=(), released_at_s=()), "machines of d1 were not up within 120 s"),
        (replace(LATE, released_at_s=()), "d1.0 was lost"),
        (replace(LATE, cost=structs.replace(COST, budget_usd=90.0)), "the budget limits"),
        (replace(LATE, cost=CostSpec(deadline_ms=DEADLINE_MS)), "not permitted"),
        (
            replace(
                LATE,
                cost=CostSpec(
                    deadline_ms=DEADLINE_MS, uses_on_demand=True, training_time_s=9_500.0
                ),
            ),
            "the training and a changeover take 10100 s",
        ),
    ],
)
def test_deadline_is_not_guaranteed_without_its_conditions(
    record: CostRecord, condition: str
) -> None:
    assert find_missed_deadline(record, LIMITS) is None
    assert condition in "; ".join(unmet_conditions(record, LIMITS))


def test_refused_or_late_spot_machines_keep_the_guarantee() -> None:
    late_spot = replace(KEPT.machines[0], up_at_s=2900.0)
    record = replace(
        LATE,
        machines=(late_spot, *KEPT.machines[1:]),
        requests=(*KEPT.requests, request("a2", 5.0, "full")),
    )
    assert find_missed_deadline(record, LIMITS) is not None


def test_on_demand_machine_that_was_released_while_it_booted_keeps_the_guarantee() -> None:
    unneeded = machine("d2", 100.0, 140.0, up_at_s=None)
    record = replace(
        LATE,
        machines=(*KEPT.machines, unneeded),
        # The second one was released before it was billed.
        requests=(*KEPT.requests, request("d2", 90.0), request("d3", 90.0)),
        released_at_s=(*KEPT.released_at_s, *released(("d2", 139.0), ("d3", 100.0))),
    )
    assert find_missed_deadline(record, LIMITS) is not None


# --- budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("margin_usd", "is_violation"), [(0.0, True), (0.5, True), (1.0, False)])
def test_cost_may_exceed_the_budget_by_the_margin_only(
    margin_usd: float, is_violation: bool
) -> None:
    record = replace(KEPT, billed_usd=(("a", 15.0), ("d", 6.0)), cost=WITH_BUDGET)
    found = find_exceeded_budget(record, replace(LIMITS, margin_usd=margin_usd))
    assert (found == "$21.00 were billed; the budget is $20.00") is is_violation


# --- machines beside those that train -------------------------------------------------------------


def test_machine_that_waits_too_long_for_a_round_is_a_violation() -> None:
    # It is up from 260 s on, and the second round trains until 6200 s.
    record = replace(KEPT, machines=(*KEPT.machines, machine("c1", 200.0, 900.0)))
    assert find_unused_machines(record, LIMITS) == "c1.0 was unused for more than 600 s"
    short = replace(KEPT, machines=(*KEPT.machines, machine("c1", 200.0, 800.0)))
    assert find_unused_machines(short, LIMITS) is None


def test_time_in_a_round_and_after_the_finish_is_not_unused() -> None:
    # The on-demand machine waits for 500 s before its round and for 500 s after it.
    before = round_of(1, "a1", (2080.0, 2500.0, 3005.0), FailureCause.PREEMPTION)
    on_demand = machine("d1", 2440.0, 6710.0)
    # Up from 8460 s on; the training finishes at 9000 s.
    late = machine("c1", 8400.0, 9090.0)
    record = replace(
        KEPT,
        rounds=(before, *KEPT.rounds[1:]),
        machines=(KEPT.machines[0], on_demand, KEPT.machines[2], late),
    )
    assert find_unused_machines(record, LIMITS) is None


def test_machine_that_is_kept_after_a_change_is_a_violation() -> None:
    kept = replace(KEPT.machines[1], ended_at_s=6900.0)
    record = replace(KEPT, machines=(KEPT.machines[0], kept, KEPT.machines[2]))
    assert find_unused_machines(record, LIMITS) == "d1.0 was unused for more than 600 s"


def test_machines_of_two_offers_beside_those_that_train_are_a_violation() -> None:
    two = (machine("b2", 1000.0, 1100.0), machine("c2", 1040.0, 1200.0))
    found = find_unused_machines(replace(KEPT, machines=(*KEPT.machines, *two)), LIMITS)
    assert found == "2 machines of b, c beside round 1 for more than 30 s"
    following = (machine("b2", 1000.0, 1100.0), machine("c2", 1080.0, 1200.0))
    assert (
        find_unused_machines(replace(KEPT, machines=(*KEPT.machines, *following)), LIMITS) is None
    )


@pytest.mark.parametrize(
    ("tokens", "violation"),
    [
        (("b2", "d2"), None),
        (("b2", "c2"), "2 machines of b, c beside round 1 for more than 30 s"),
        (("b2", "b3", "d2"), "3 machines of b, d beside round 1 for more than 30 s"),
    ],
)
def test_set_of_an_elastic_group_may_have_machines_of_both_markets(
    tokens: tuple[str, ...], violation: str | None
) -> None:
    both = (machine(token, 1000.0, 1200.0) for token in tokens)
    record = replace(KEPT, machines=(*KEPT.machines, *both), is_elastic=True)
    assert find_unused_machines(record, replace(LIMITS, set_size=2)) == violation


def test_set_of_a_group_of_fixed_size_has_machines_of_one_offer() -> None:
    both = (machine(token, 1000.0, 1200.0) for token in ("b2", "d2"))
    record = replace(KEPT, machines=(*KEPT.machines, *both))
    assert find_unused_machines(record, replace(LIMITS, set_size=2)) is not None


def test_second_set_of_one_offer_is_a_violation() -> None:
    two = (machine("b2", 1000.0, 1100.0), machine("b3", 1000.0, 1100.0))
    found = find_unused_machines(replace(KEPT, machines=(*KEPT.machines, *two)), LIMITS)
    assert found == "2 machines of b beside round 1 for more than 30 s"


def test_replacement_of_the_same_offer_and_another_set_are_no_violation() -> None:
    both = (machine("a2", 1000.0, 1200.0), machine("b2", 1000.0, 1200.0))
    assert find_unused_machines(replace(KEPT, machines=(*KEPT.machines, *both)), LIMITS) is None
    two = (*both, machine("a3", 1000.0, 1200.0))
    found = find_unused_machines(replace(KEPT, machines=(*KEPT.machines, *two)), LIMITS)
    assert found == "3 machines of b beside round 1 for more than 30 s"


def test_machines_without_a_round_that_trains_are_not_judged() -> None:
    record = replace(KEPT, rounds=(), machines=(machine("a1", 0.0), machine("b1", 0.0)))
    assert find_unused_machines(record, LIMITS) is None


# --- choices --------------------------------------------------------------------------------------

SPOT_CHOSEN, BOTH_CHOSEN = MachinesChosen(workers={"a": 1}), MachinesChosen(workers={"d": 1})


def entries(*events: JournalEvent) -> list[tuple[float, JournalEntry]]:
    return [(float(n), an_entry(event)) for n, event in enumerate(events)]


def test_choice_that_is_changed_back_without_an_observation_is_a_violation() -> None:
    alternating = read_alternations(entries(SPOT_CHOSEN, BOTH_CHOSEN, SPOT_CHOSEN))
    assert alternating == (2.0,)
    record = replace(KEPT, alternations_s=alternating)
    assert find_cost_violation(record, LIMITS) == "the choice was changed back at 2 s for no reason"


@pytest.mark.parametrize(
    "observed",
    [
        NodeLost(token=Token("a1"), node=0, agent=None, reason="reclaimed"),
        GroupWaiting(token=Token("a1"), reason="no capacity"),
    ],
)
def test_choice_that_is_changed_back_after_an_observation_is_no_violation(
    observed: JournalEvent,
) -> None:
    assert read_alternations(entries(SPOT_CHOSEN, BOTH_CHOSEN, observed, SPOT_CHOSEN)) == ()


# --- changes --------------------------------------------------------------------------------------


def test_choice_that_changes_all_the_time_is_a_violation() -> None:
    assert find_unstable_choice(replace(KEPT, chosen_at_s=tuple(range(0, 300, 5)))) is None
    found = find_unstable_choice(replace(KEPT, chosen_at_s=(7.0, *range(100, 150))))
    assert found == "the choice of machines was changed 20 times after 100 s"


def test_long_gap_at_a_voluntary_change_is_a_violation() -> None:
    slow = (*KEPT.rounds[:2], round_of(3, "b1", (6201.0, 6230.0, None)))
    assert (
        find_early_stops(replace(KEPT, rounds=slow), LIMITS)
        == "no training for 30 s before round 3"
    )


def test_release_before_the_change_is_a_violation() -> None:
    record = replace(KEPT, released_at_s=released(("d1", 6190.0)))
    assert find_early_stops(record, LIMITS) == "d1 was released while round 2 trained with it"


@pytest.mark.parametrize(
    "lost",
    [
        machine("d1", 3050.0, 6195.0, reason="its agent exited"),
        machine("d1", 3050.0, 6240.0, noticed_at_s=6100.0),
        machine("d1", 3050.0, 6205.0, reason="reclaimed"),
        machine("d1", 3050.0, 6240.0, noticed_at_s=6210.0),
    ],
)
def test_gap_after_a_loss_or_a_notice_is_no_violation(lost: MachineRecord) -> None:
    slow = (*KEPT.rounds[:2], round_of(3, "b1", (6201.0, 6500.0, None)))
    record = replace(KEPT, rounds=slow, machines=(KEPT.machines[0], lost, KEPT.machines[2]))
    assert find_early_stops(record, LIMITS) is None


@pytest.mark.parametrize(("lost_s", "is_violation"), [(6250.0, False), (6600.0, True)])
def test_gap_with_a_loss_of_another_machine_is_no_violation(
    lost_s: float, *, is_violation: bool
) -> None:
    slow = (*KEPT.rounds[:2], round_of(3, "b1", (6201.0, 6500.0, None)))
    lost = machine("b2", 6050.0, lost_s, reason="reclaimed")
    record = replace(KEPT, rounds=slow, machines=(*KEPT.machines, lost))
    assert (find_early_stops(record, LIMITS) is not None) == is_violation


@pytest.mark.parametrize("cause", [FailureCause.NETWORK, FailureCause.LEADER_CHANGE])
def test_gap_after_a_failure_of_the_round_is_no_violation(cause: FailureCause) -> None:
    failed = round_of(2, "d1", (3120.0, 3125.0, 6200.0), cause)
    slow = round_of(3, "b1", (6201.0, 6500.0, None))
    assert find_early_stops(replace(KEPT, rounds=(KEPT.rounds[0], failed, slow)), LIMITS) is None


# --- the journal ----------------------------------------------------------------------------------


def test_rounds_releases_and_the_finish_are_read_from_the_journal() -> None:
    opened = Round(
        number=4,
        assignments=(
            NodeAssignment(
                agent=AgentId("a1"),
                node_rank=0,
                first_rank=0,
                num_workers=1,
                host="a1",
                token=Token("t1"),
                node=2,
            ),
        ),
    )
    end = FitEnded(outcome="finished")
    events: list[JournalEvent] = [
        RoundOpened(round=opened),
        TrainingFunctionStarted(round_number=4, startup_s=2.0),
        NodeLost(token=Token("t2"), node=0, agent=None, reason="", is_unused=True),
        NodeLost(token=Token("t3"), node=0, agent=None, reason=""),
        RoundClosed(round_number=4, cause=FailureCause.RESIZE, reason=""),
        TrainingEnded(fit_end=end),
        end,
        GroupsReleased(token=Token("t1"), other_tokens=(Token("t4"),)),
    ]
    entries = [
        (
            float(number),
            JournalEntry(run_id=RunId("r"), author=AgentId("a1"), event=event, written_at_ms=0),
        )
        for number, event in enumerate(events)
    ]
    assert read_rounds(entries) == (
        ObservedRound(
            number=4,
            machines=frozenset({(Token("t1"), 2)}),
            opened_at_s=0.0,
            trains_from_s=1.0,
            closed_at_s=4.0,
            cause=FailureCause.RESIZE,
        ),
    )
    assert read_releases(entries) == (("t2", 2.0), ("t1", 7.0), ("t4", 7.0))
    assert read_finish(entries) == 5.0
    assert read_finish(entries[:4]) is None


def test_machines_that_the_run_has_replaced_or_released_are_not_lost() -> None:
    gone = machine("d1", 0.0, 100.0)
    lost = NodeLost(token=Token("d1"), node=0, agent=AgentId("a"), reason="it was replaced")
    preempted = structs.replace(lost, cause=FailureCause.PREEMPTION)
    for event, is_lost in ((lost, False), (preempted, True)):
        entry = JournalEntry(run_id=RunId("r"), author=AgentId("a1"), event=event, written_at_ms=0)
        record = replace(KEPT, replaced=read_replaced([(99.0, entry)]), released_at_s=())
        assert record.is_lost(gone) is is_lost
    assert not replace(KEPT, released_at_s=()).is_lost(replace(gone, reason="released"))
