"""fold: what each event means, and that no sequence a leader may write breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, Token
from spotfit.model.cadence import Endings
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
    TrainingEnded,
    ValidationAsked,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.reporting import ReportedCheckpointStatus
from spotfit.model.view import DROPPED, View
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


def test_a_market_that_goes_back_on_its_word_has_refused_a_group_once() -> None:
    refused = [NodeLost(TOKEN, n, None, "no capacity", Blame.PREEMPTION) for n in (0, 1)]
    view = told(*GRANTED, *refused)
    assert (view.refusals, view.last_refusal, view.stillborn) == (1, "no capacity", 0)
    assert view.groups[TOKEN].standing == ()
    assert view.failures == {}


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
    assert view.dropped == ("c1",)
    assert view.latest_committed_slot == 2, "dropping saves nothing"


def test_a_notice_remembers_where_it_stands() -> None:
    view = told(FitStarted(a_spec()), a_commit("c1"), Noticed(an_agent(0), a_notice()))
    assert view.notices == {an_agent(0): a_notice()}
    assert view.noticed_slots[an_agent(0)] > view.latest_committed_slot


def test_a_nearer_notice_takes_the_place_of_the_first_and_what_was_saved_since_stays_safe() -> None:
    first, nearer = a_notice(seconds_left=None), a_notice(seconds_left=15.0)
    view = told(FitStarted(a_spec()), Noticed(an_agent(0), first), a_commit("c1"))
    view = told(Noticed(an_agent(0), nearer), view=view)
    assert view.notices == {an_agent(0): nearer}
    assert view.noticed_slots[an_agent(0)] < view.latest_committed_slot


def test_the_end_closes_what_is_open() -> None:
    view = told(FitStarted(a_spec()), RoundOpened(a_round(1)), FitEnded("finished"))
    assert (view.round, view.active) == (None, False)
    assert view.last_round == a_round(1)


def test_the_next_fit_keeps_checkpoints_and_numbers_and_starts_its_counts_afresh() -> None:
    before = a_view(
        round=a_round(3),
        checkpoints=(a_commit(),),
        dropped=("c0",),
        failures={Blame.WORKER: 1},
        notices={an_agent(1): a_notice()},
        lost_agents=frozenset({an_agent(1)}),
        cancelled="enough",
        final_refusal="no quota",
        ended=FitEnded("cancelled"),
    )
    view = told(FitStarted(a_spec(fit_id="f-2")), view=before)
    assert (view.active, view.fits) == (True, 2)
    assert (view.checkpoints, view.dropped) == ((a_commit(),), ("c0",))
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


def test_a_new_round_forgets_who_was_lost_but_for_the_leader_before() -> None:
    lost = [NodeLost(TOKEN, n, an_agent(n), "gone", Blame.PLATFORM) for n in (0, 1)]
    gone = told(*GRANTED, LeaderElected(an_agent(2), 2, "h:2", lost=an_agent(0)), *lost)
    assert gone.lost_agents == gone.outages == {an_agent(0), an_agent(1)}
    opened = told(RoundOpened(a_round()), view=gone)
    assert opened.lost_agents == opened.outages == {an_agent(0)}
    assert opened.groups[TOKEN].standing == (), "and no machine of theirs stands"


def test_a_new_round_remembers_that_a_validator_was_lost() -> None:
    begun = ValidationBegun("c1", "m", 1, an_agent(1), TOKEN, 1)
    view = told(*GRANTED, begun, NodeLost(TOKEN, 1, an_agent(1), "gone"), RoundOpened(a_round()))
    assert view.lost_agents == {an_agent(1)}


def test_of_what_was_dropped_only_the_last_is_remembered() -> None:
    names = [f"c{n}" for n in range(DROPPED + 10)]
    view = told(FitStarted(a_spec()), *(CheckpointDropped(name, "old") for name in names))
    assert view.dropped == tuple(names[10:])
    again = told(a_commit("c20"), CheckpointDropped("c15", "again"), view=view)
    assert again.dropped == (*[name for name in names[10:] if name not in ("c15", "c20")], "c15")


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
    assert ([one.name for one in again.checkpoints], again.dropped) == (["c1"], ())


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


# --- validations ---------------------------------------------------------------------------------

PENDING = a_commit("c1", metrics={"loss": 1.0}, validation=ValidationAsked())
LATER = a_commit("c2", report=1, validation=ValidationAsked())
VALIDATOR = Token("t-v")
FOR_VALIDATIONS = Intended(
    GroupRequest(VALIDATOR, 1, 1, role="validate"), GroupPlan(VALIDATOR, "local", 1, 1)
)


def begun(attempt: int, mark: str = "1-0", token: Token = VALIDATOR) -> ValidationBegun:
    return ValidationBegun("c1", mark, attempt, an_agent(9), token, 0)


def test_what_a_validation_found_belongs_to_its_checkpoint() -> None:
    view = told(*GRANTED, PENDING, LATER, begun(1))
    assert view.unvalidated == (PENDING, LATER)
    assert view.validation == begun(1)
    view = told(ValidationEnded("c1", "1-0", "validated", {"loss": 0.5, "acc": 1.0}), view=view)
    assert view.metrics_of("c1") == {"loss": 0.5, "acc": 1.0}
    assert (view.unvalidated, view.validation) == ((LATER,), None)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("validated", ReportedCheckpointStatus.VALIDATED),
        ("failed", ReportedCheckpointStatus.VALIDATION_FAILED),
        ("timeout", ReportedCheckpointStatus.VALIDATION_TIMEOUT),
    ],
)
def test_how_far_a_checkpoint_has_come(
    how: Literal["validated", "failed", "timeout"], status: ReportedCheckpointStatus
) -> None:
    view = told(*GRANTED, PENDING, a_commit("c3", report=2))
    pending, plain = view.checkpoints
    assert view.status_of(pending) is ReportedCheckpointStatus.PENDING_VALIDATION
    assert view.status_of(plain) is ReportedCheckpointStatus.COMMITTED
    view = told(ValidationEnded("c1", "1-0", how), view=view)
    assert view.status_of(view.checkpoints[0]) is status


def test_of_two_checkpoints_with_one_name_each_has_its_own_verdict() -> None:
    again = a_commit("c1", report=1, metrics={"loss": 2.0}, validation=ValidationAsked())
    view = told(*GRANTED, PENDING, again, ValidationEnded("c1", "1-1", "validated", {"acc": 1.0}))
    assert [one.metrics for one in view.checkpoints] == [{"loss": 1.0}, {"loss": 2.0, "acc": 1.0}]
    assert view.unvalidated == (PENDING,)


def test_a_verdict_goes_with_its_checkpoint() -> None:
    view = told(
        *GRANTED, PENDING, ValidationEnded("c1", "1-0", "failed"), CheckpointDropped("c1", "")
    )
    assert (view.verdicts, view.unvalidated) == ({}, ())


def test_how_often_a_validation_was_begun_is_counted_for_each() -> None:
    view = told(*GRANTED, FOR_VALIDATIONS, PENDING, LATER, begun(1), begun(2))
    assert (view.attempts, view.tries) == (2, 2)
    view = told(ValidationEnded("c1", "1-0", "failed"), begun(3, "1-1"), view=view)
    assert (view.attempts, view.tries) == (3, 1)


def test_machines_for_validations_are_refused_and_die_on_an_account_of_their_own() -> None:
    died = NodeLost(VALIDATOR, 0, None, "it did not join")
    view = told(*GRANTED, PENDING, FOR_VALIDATIONS, Submitted(VALIDATOR, HANDLE), died)
    assert (view.stillborn, view.validator_refusals) == (0, 1)
    again = Intended(
        GroupRequest(Token("t-w"), 1, 1, role="validate"), GroupPlan(Token("t-w"), "local", 1, 1)
    )
    view = told(again, Refused(Token("t-w"), "no quota", final=True), view=view)
    assert (view.refusals, view.final_refusal, view.validator_refusals) == (0, None, 2)
    assert view.no_validators == "no quota"
    assert told(begun(1, token=TOKEN), view=view).validator_refusals == 2, "beside the workers"


def test_a_machine_that_validates_ends_the_count_of_those_that_were_refused() -> None:
    view = told(*GRANTED, PENDING, FOR_VALIDATIONS, Refused(VALIDATOR, "full"))
    assert view.validator_refusals == 1
    more = (replace(FOR_VALIDATIONS), Submitted(VALIDATOR, HANDLE), begun(1))
    assert told(*more, view=view).validator_refusals == 0


def test_a_machine_for_validations_that_was_let_go_is_forgotten_when_another_is_asked_for() -> None:
    other = Token("t-w")
    again = Intended(GroupRequest(other, 1, 1, role="validate"), GroupPlan(other, "local", 1, 1))
    view = told(*GRANTED, FOR_VALIDATIONS, Submitted(VALIDATOR, HANDLE), Released(VALIDATOR), again)
    assert set(view.groups) == {TOKEN, other}


def test_when_training_has_ended_no_round_is_open_and_the_fit_goes_on() -> None:
    end = FitEnded("finished", metrics={"loss": 1.0})
    view = told(*GRANTED, PENDING, RoundOpened(a_round()), TrainingEnded(end))
    assert (view.round, view.training_ended, view.active) == (None, end, True)
    view = told(begun(1), end, view=view)
    assert (view.ended, view.validation) == (end, None)


def test_the_next_fit_takes_up_what_was_not_validated() -> None:
    cut_off = told(
        *GRANTED, PENDING, LATER, ValidationEnded("c1", "1-0", "failed"), begun(4, "1-1")
    )
    view = told(FitEnded("cancelled"), FitStarted(a_spec()), view=cut_off)
    assert (view.unvalidated, view.validation, view.training_ended) == ((LATER,), None, None)
    assert (view.attempts, list(view.verdicts)) == (4, ["1-0"])


# --- how long groups live --------------------------------------------------------------------


def closed(lived_s: float | None, blame: Blame = Blame.PREEMPTION) -> RoundClosed:
    return RoundClosed(1, blame, "gone", lived_s=lived_s)


OPENED = (*GRANTED, RoundOpened(a_round(1)))
ANNOUNCED = Noticed(an_agent(0), a_notice())


@pytest.mark.parametrize("blame", [one for one in Blame if one is not Blame.RESIZE])
def test_whatever_ends_a_group_counts_as_its_end(blame: Blame) -> None:
    view = told(*OPENED, closed(700.0, blame))
    assert view.endings == Endings().with_end(700.0, saved=False)


def test_a_group_that_changes_its_size_lives_on() -> None:
    view = told(*OPENED, closed(700.0, Blame.RESIZE), RoundOpened(a_round(2)))
    assert (view.endings, view.group_age_s) == (Endings(), 700.0)
    view = told(closed(100.0), view=view)
    assert view.endings == Endings().with_end(800.0, saved=False)
    assert view.group_age_s == 0.0


def test_an_end_that_was_announced_counts_so_if_something_was_saved_after_the_notice() -> None:
    in_time = told(*OPENED, ANNOUNCED, a_commit(), closed(700.0))
    assert in_time.endings == Endings().with_end(700.0, saved=True)
    too_early = told(*OPENED, a_commit(), ANNOUNCED, closed(700.0))
    assert too_early.endings == Endings().with_end(700.0, saved=False)
    smaller = told(*OPENED, ANNOUNCED, a_commit(), closed(700.0, Blame.RESIZE))
    assert smaller.endings.announced == 1, "it goes on without the machine that leaves"


def test_a_group_that_was_lost_with_its_leader_lived_until_it_last_saved_at_least() -> None:
    view = told(*OPENED, a_commit(age_s=500.0), closed(None))
    assert view.endings == Endings().with_end(500.0, saved=False)
    again = told(RoundOpened(a_round(2)), closed(None), view=view)
    assert again.endings.ended[0] == 2, "nothing was saved in its second life"


def test_what_was_learned_of_groups_serves_the_next_fit() -> None:
    view = told(*OPENED, closed(700.0), FitEnded("finished"), FitStarted(a_spec()))
    assert view.endings.all_ended == 1
