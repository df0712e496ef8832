"""fold: what each event means, and that no sequence a leader may write breaks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    Blame,
    CancelRequested,
    CheckpointDropped,
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    RankFailure,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Submitted,
    Taken,
)
from spotfit.model.group import GroupHandle, GroupPlan
from spotfit.model.view import View
from spotfit.testing.builders import (
    TOKEN,
    a_commit,
    a_notice,
    a_request,
    a_round,
    a_spec,
    a_view,
    an_agent,
    told,
)

PLAN = GroupPlan(TOKEN, "local", 2, 1)
HANDLE = GroupHandle(TOKEN, "local", "g")
ASKED = (FitStarted(a_spec()), Intended(a_request(), PLAN))
GRANTED = (*ASKED, Submitted(TOKEN, HANDLE))


def test_a_request_for_machines_is_pending_until_its_outcome() -> None:
    assert told(*ASKED).groups[TOKEN].pending
    assert told(*GRANTED).groups[TOKEN].handle == HANDLE
    assert told(*ASKED, Refused(TOKEN, "full")).groups[TOKEN].refused == "full"


def test_refusals_are_counted_until_a_group_is_granted() -> None:
    again = Intended(a_request(Token("t-2")), GroupPlan(Token("t-2"), "local", 2, 1))
    refused = told(*ASKED, Refused(TOKEN, "full"), again)
    assert (refused.refusals, refused.last_refusal, refused.final_refusal) == (1, "full", None)
    granted = told(Submitted(Token("t-2"), HANDLE), view=refused)
    assert (granted.refusals, granted.last_refusal) == (0, None)


def test_a_final_refusal_is_remembered() -> None:
    assert told(*ASKED, Refused(TOKEN, "no quota", final=True)).final_refusal == "no quota"


def test_a_lost_machine_takes_its_agent_along_if_one_is_known() -> None:
    view = told(*GRANTED, NodeLost(TOKEN, 1, None, "gone"))
    assert (view.groups[TOKEN].lost, view.lost_agents) == (frozenset({1}), frozenset())
    view = told(NodeLost(TOKEN, 0, an_agent(0), "gone"), view=view)
    assert (view.groups[TOKEN].standing, view.lost_agents) == ((), frozenset({an_agent(0)}))


def test_a_round_is_open_until_it_is_closed_and_the_blame_counted() -> None:
    opened = told(FitStarted(a_spec()), RoundOpened(a_round(1)))
    assert (opened.round, opened.round_slot) == (a_round(1), 1)
    closed = told(RoundClosed(1, Blame.WORKER, "raised"), view=opened)
    assert (closed.round, closed.last_round) == (None, a_round(1))
    assert closed.failures == {Blame.WORKER: 1}
    twice = told(RoundOpened(a_round(2)), RoundClosed(2, Blame.WORKER, "raised"), view=closed)
    assert twice.failures == {Blame.WORKER: 2}


def test_progress_refills_no_budget() -> None:
    failed = told(FitStarted(a_spec()), RoundOpened(a_round(1)), RoundClosed(1, Blame.WORKER, ""))
    saved = told(RoundOpened(a_round(2)), a_commit("c1", round=2), view=failed)
    assert saved.failures == {Blame.WORKER: 1}


def test_an_entry_is_the_checkpoint_and_another_its_end() -> None:
    view = told(FitStarted(a_spec()), a_commit("c1"), a_commit("c2"))
    assert [one.name for one in view.checkpoints] == ["c1", "c2"]
    assert view.latest_committed_slot == 2
    view = told(CheckpointDropped("c1", "old"), view=view)
    assert [one.name for one in view.checkpoints] == ["c2"]
    assert view.dropped == {"c1"}
    assert view.latest_committed_slot == 2, "dropping saves nothing"


def test_a_notice_remembers_where_it_stands() -> None:
    view = told(FitStarted(a_spec()), a_commit("c1"), Noticed(an_agent(0), a_notice()))
    assert view.notices == {an_agent(0): a_notice()}
    assert view.noticed_slots[an_agent(0)] > view.latest_committed_slot


def test_the_end_closes_what_is_open() -> None:
    view = told(FitStarted(a_spec()), RoundOpened(a_round(1)), FitEnded("finished"))
    assert (view.round, view.active) == (None, False)
    assert view.last_round == a_round(1)


def test_the_next_fit_keeps_checkpoints_and_numbers_and_starts_its_counts_afresh() -> None:
    before = a_view(
        round=a_round(3),
        checkpoints=(a_commit(),),
        dropped=frozenset({"c0"}),
        failures={Blame.WORKER: 1},
        notices={an_agent(1): a_notice()},
        lost_agents=frozenset({an_agent(1)}),
        cancelled="enough",
        final_refusal="no quota",
        ended=FitEnded("cancelled"),
    )
    view = told(FitStarted(a_spec(fit_id="f-2")), view=before)
    assert (view.active, view.fits) == (True, 2)
    assert (view.checkpoints, view.dropped) == ((a_commit(),), frozenset({"c0"}))
    assert view.last_round == a_round(3)
    assert (view.failures, view.notices, view.lost_agents) == ({}, {}, frozenset())
    assert (view.cancelled, view.final_refusal, view.round) == (None, None, None)


def test_after_a_new_start_nobody_leads_and_epochs_go_on() -> None:
    led = told(LeaderElected(an_agent(0), 7, "h:1"), view=a_view())
    assert (led.epoch, led.leads(an_agent(0))) == (7, True)
    view = told(FitStarted(a_spec()), view=replace(led, ended=FitEnded("finished")))
    assert (view.leader, view.epoch) == (None, 7)


def test_machines_that_die_at_birth_are_counted_until_a_round_is_opened() -> None:
    dead = told(*GRANTED, NodeLost(TOKEN, 0, None, "gone"), NodeLost(TOKEN, 1, None, "gone"))
    assert dead.stillborn == 2
    assert told(NodeLost(TOKEN, 1, an_agent(1), "gone"), view=dead).stillborn == 2
    assert told(RoundOpened(a_round()), view=dead).stillborn == 0


def test_groups_let_go_are_forgotten_by_the_next_fit_and_others_are_not() -> None:
    ended = told(*GRANTED, FitEnded("finished"))
    assert TOKEN in told(FitStarted(a_spec()), view=ended).groups
    let_go = told(Released(TOKEN), view=ended)
    assert TOKEN not in told(FitStarted(a_spec()), view=let_go).groups


def test_a_new_round_forgets_groups_that_are_history() -> None:
    let_go = told(*GRANTED, Released(TOKEN))
    assert TOKEN not in told(RoundOpened(a_round()), view=let_go).groups
    refused = told(*ASKED, Refused(TOKEN, "full"))
    opened = told(RoundOpened(a_round()), view=refused)
    assert (opened.groups, opened.last_refusal) == ({}, "full"), "but not that it was refused"
    assert TOKEN in told(*ASKED, RoundOpened(a_round())).groups, "its outcome is still to come"
    lost = told(*GRANTED, NodeLost(TOKEN, 0, an_agent(0), "gone"), RoundOpened(a_round()))
    assert lost.groups[TOKEN].lost == {0}, "it is still to be let go"


def test_a_new_round_forgets_notices_of_those_who_went() -> None:
    noticed = [Noticed(an_agent(n), a_notice()) for n in (0, 1)]
    gone = told(*GRANTED, *noticed, NodeLost(TOKEN, 1, an_agent(1), "gone"))
    opened = told(RoundOpened(a_round()), view=gone)
    assert opened.notices.keys() == opened.noticed_slots.keys() == {an_agent(0)}
    assert opened.lost_agents == {an_agent(1)}, "who was given up stays so"


def test_rounds_that_save_nothing_are_counted_until_one_does() -> None:
    failed = [RoundClosed(n, Blame.WORKER, "raised") for n in (1, 2)]
    assert told(*failed, view=a_view()).fruitless == 2
    assert told(*failed, a_commit(), view=a_view()).fruitless == 0
    assert told(*failed, FitEnded("failed"), FitStarted(a_spec()), view=a_view()).fruitless == 0


@pytest.mark.parametrize("blame", [Blame.PREEMPTION, Blame.RESIZE])
def test_a_round_that_a_machine_ended_was_not_fruitless(blame: Blame) -> None:
    assert told(RoundClosed(1, blame, "why"), view=a_view(fruitless=3)).fruitless == 3


def test_a_dropped_name_that_is_used_again_is_there_again() -> None:
    dropped = told(FitStarted(a_spec()), a_commit("c1"), CheckpointDropped("c1", "old"))
    again = told(a_commit("c1"), view=dropped)
    assert ([one.name for one in again.checkpoints], again.dropped) == (["c1"], frozenset())


# --- a connection that broke, and what came of it -------------------------------------------------

CUT = RoundClosed(
    1,
    Blame.NETWORK,
    "the connection to t-1/1 broke",
    (RankFailure(1, "lost", "not connected"), RankFailure(0, "raised", "an echo")),
)
BROKEN_OFF = (*GRANTED, RoundOpened(a_round(1)), CUT)


def test_a_connection_that_broke_costs_nothing_as_long_as_no_machine_is_lost() -> None:
    view = told(*BROKEN_OFF)
    assert (view.failures, view.fruitless) == ({Blame.NETWORK: 1}, 1)


@pytest.mark.parametrize(
    ("blame", "fruitless", "outages"),
    [(Blame.PREEMPTION, 0, frozenset()), (Blame.PLATFORM, 1, frozenset({an_agent(1)}))],
)
def test_a_machine_lost_with_it_is_charged_once_it_is_known(
    blame: Blame, fruitless: int, outages: frozenset[AgentId]
) -> None:
    view = told(*BROKEN_OFF, NodeLost(TOKEN, 1, an_agent(1), "not heard again", blame))
    assert view.failures == {blame: 1}
    assert (view.fruitless, view.outages) == (fruitless, outages)
    assert view.last_closed is not None
    assert (view.last_closed.blame, view.last_closed.failures) == (blame, CUT.failures)
    reclaimed = Taken({"t-1/1": (1,)}) if blame is Blame.PREEMPTION else None
    assert view.last_closed.taken == reclaimed
    assert view.last_closed.why.endswith("; t-1/1 is lost: not heard again")


def test_several_machines_of_one_round_are_one_failure() -> None:
    both = replace(CUT, failures=(RankFailure(0, "lost", ""), RankFailure(1, "lost", "")))
    lost = [NodeLost(TOKEN, n, an_agent(n), "gone", Blame.PREEMPTION) for n in (0, 1)]
    view = told(*GRANTED, RoundOpened(a_round(1)), both, *lost)
    assert view.failures == {Blame.PREEMPTION: 1}


@pytest.mark.parametrize(
    "lost",
    [
        NodeLost(TOKEN, 0, an_agent(0), "gone", Blame.PREEMPTION),
        NodeLost(TOKEN, 1, an_agent(1), "gone"),
        NodeLost(TOKEN, 1, an_agent(7), "gone", Blame.PREEMPTION),
    ],
    ids=["its connection had held", "an older journal", "it had no place"],
)
def test_other_losses_change_nothing_of_it(lost: NodeLost) -> None:
    assert told(*BROKEN_OFF, lost).failures == {Blame.NETWORK: 1}


# --- any sequence -------------------------------------------------------------------------------


def possible(view: View, n: int) -> Iterator[Event]:
    """What may be written after `view`, by a leader or by anybody."""
    yield LeaderElected(an_agent(n % 3), view.epoch + 1, None if n % 2 else f"10.0.0.{n}:1")
    if not view.active:
        yield FitStarted(a_spec())
    else:
        yield CancelRequested("enough")
        yield FitEnded("failed", "why", Blame.WORKER)
        yield Noticed(an_agent(n % 4), a_notice())
        token = Token(f"t-{view.next_slot}")
        yield Intended(a_request(token), GroupPlan(token, "local", 1 + n % 3, 1))
        yield a_commit(f"c{n % 5}")
        if view.round is None:
            yield RoundOpened(a_round((view.last_round.number if view.last_round else 0) + 1))
        else:
            yield RoundClosed(view.round.number, list(Blame)[n % len(Blame)], "why")
    for token, group in view.groups.items():
        if group.pending:
            yield Submitted(token, GroupHandle(token, "local", "g"))
            yield Refused(token, "full", final=bool(n % 2))
        elif group.handle is not None and not group.released:
            yield Released(token)
        for node in group.standing:
            blame = Blame.PREEMPTION if n % 3 else None
            yield NodeLost(token, node, an_agent(node) if n % 2 else None, "gone", blame)
    for kept in view.checkpoints:
        yield CheckpointDropped(kept.name, "old")


@given(st.lists(st.integers(0, 10**6), max_size=60))
def test_no_sequence_a_leader_may_write_breaks_it(choices: list[int]) -> None:
    view = told(FitStarted(a_spec()))
    for slot, n in enumerate(choices, 1):
        candidates = list(possible(view, n))
        event = candidates[n % len(candidates)]
        after = told(event, view=view)
        assert after == told(event, view=view), "equal views, equal entries: equal views"
        assert after.next_slot == slot + 1
        if isinstance(event, CheckpointDropped):
            assert event.name not in {one.name for one in after.checkpoints}
        assert after.round is None or after.active
        view = after
    assert decoder(View).decode(encode(view)) == view, "a snapshot loses nothing"


@pytest.mark.parametrize("blame", list(Blame))
def test_every_blame_is_counted_apart(blame: Blame) -> None:
    assert told(RoundClosed(1, blame, "why"), view=a_view()).failures == {blame: 1}
