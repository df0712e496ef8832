"""Conduct: of all that could be done, the most urgent; and whatever it sees, it has an answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    CheckpointDropped,
    FitEnded,
    LeaderElected,
    NodeLost,
    Noticed,
    RankFailure,
    Released,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.group import NodeState
from spotfit.model.spec import Keep, Limits, Tempo
from spotfit.model.view import View
from spotfit.model.watch import Trouble, Watch
from spotfit.policy.actions import Action, Order, Release, Rest, Submit, Wait, Write
from spotfit.policy.conduct import conduct
from spotfit.testing.builders import (
    TOKEN,
    a_commit,
    a_group,
    a_last_life,
    a_member,
    a_notice,
    a_ready,
    a_round,
    a_seat,
    a_spec,
    a_status,
    a_view,
    a_watch,
    an_agent,
    seats,
)

NOW = 1000.0
OTHER = Token("t-2")
SPEC = a_spec(tempo=Tempo(settle_s=0.03))
OPEN = a_view(spec=SPEC, round=a_round())
BUSY = seats(a_seat(0, running=1), a_seat(1, running=1))
RAISED = RankFailure(0, "raised", "ValueError: no")
PENDING = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1, handle=None)}


def written(view: View, watch: Watch, now: float = NOW) -> Any:
    action = conduct(view, watch, now)
    assert isinstance(action, Write), action
    return action.event


def waited(view: View, watch: Watch, now: float = NOW) -> Wait:
    action = conduct(view, watch, now)
    assert isinstance(action, Wait), action
    return action


# --- from nothing to a round ---------------------------------------------------------------------


def test_a_run_without_machines_orders_them() -> None:
    assert conduct(a_view(groups={}), a_watch(seats={}), NOW) == Order(
        2, "2 of 2 workers have no machine"
    )


def test_what_was_intended_is_asked_for_by_whoever_leads_now() -> None:
    view = a_view(groups={OTHER: a_group(token=OTHER, handle=None)})
    assert conduct(view, a_watch(seats={}), NOW) == Submit(OTHER)


def test_after_a_refusal_it_waits_its_time() -> None:
    view = a_view(groups={}, refusals=3, last_refusal="full")
    wait = waited(view, a_watch(seats={}, refused_at=NOW))
    assert (wait.until, wait.why) == (NOW + 4.0, "refused 3 times: full")


def test_with_everybody_here_a_round_is_opened() -> None:
    event = written(a_view(), a_watch())
    assert event == RoundOpened(a_round(1), "2 workers on 2 machines")


def test_no_round_before_the_bucket_was_searched() -> None:
    wait = waited(a_view(), a_watch(surveyed=False))
    assert wait.why == "searching the bucket for complete checkpoints"


def test_no_round_before_the_uploads_of_the_last_are_there() -> None:
    closed = a_view(last_round=a_round(3))
    carrying = seats(a_seat(0), a_seat(1, carrying=3))
    watch = a_watch(surveyed=False, seats=carrying, turned_at=NOW, unsaved_s=20.0)
    action = conduct(closed, watch, NOW)
    assert isinstance(action, Wait)
    assert "still upload" in action.why


def test_a_run_that_has_failed_does_not_end_before_its_last_checkpoints_are_there() -> None:
    failed = RoundClosed(3, Blame.WORKER, "KeyError", (RankFailure(0, "raised", "KeyError"),))
    view = a_view(last_round=a_round(3), last_closed=failed, failures={Blame.WORKER: 1})
    assert isinstance(conduct(view, a_watch(surveyed=False), NOW), Wait)
    written = conduct(view, a_watch(), NOW)
    assert isinstance(written, Write)
    assert isinstance(written.event, FitEnded)


def test_a_caretaker_opens_no_round() -> None:
    assert waited(a_view(), a_watch(caretaker=True, seats={})).why == "all is well"


def test_a_leader_whose_machine_will_go_hands_over_between_rounds() -> None:
    leaving = a_view(
        groups={TOKEN: a_group(nodes=3)},
        notices={an_agent(0): a_notice()},
        noticed_slots={an_agent(0): 3},
        epoch=4,
    )
    three = seats(a_seat(0), a_seat(1, since=9.0), a_seat(2, since=5.0))
    event = written(leaving, a_watch(seats=three))
    assert event == LeaderElected(
        an_agent(2), 5, a_member(2).hub, "the leader before will be taken away"
    )
    in_round = replace(leaving, round=a_round(members=[a_member(0), a_member(1)]))
    within = a_watch(seats=three, led_since=NOW)
    assert isinstance(conduct(in_round, within, NOW), Wait), "not within one"


def test_whose_machine_would_not_come_back_leaves_the_lead_to_one_that_would() -> None:
    statuses = {TOKEN: a_last_life(0, nodes=3)}
    three = seats(a_seat(0), a_seat(1, since=9.0), a_seat(2, since=5.0))
    groups = {TOKEN: a_group(nodes=3)}
    watch = a_watch(seats=three, statuses=statuses)
    event = written(a_view(groups=groups), watch)
    why = "the machine of the leader before would not be brought back once more"
    assert event == LeaderElected(an_agent(2), 2, a_member(2).hub, why)
    alone = a_watch(statuses={TOKEN: a_last_life(0, 1)})
    asked = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=2)}
    opened = written(a_view(groups=asked), alone)
    assert isinstance(opened, RoundOpened), "nobody is better off"


def test_nobody_is_handed_over_to_who_leaves_too() -> None:
    both_go = {an_agent(n): a_notice() for n in (0, 1)}
    asked = {TOKEN: a_group(), OTHER: a_group(token=OTHER, handle=None)}
    view = a_view(notices=both_go, noticed_slots=dict.fromkeys(both_go, 3), groups=asked)
    assert conduct(view, a_watch(), NOW) == Submit(OTHER), "it leads until those are here"


def test_a_machine_that_leaves_without_a_place_is_given_up() -> None:
    view = replace(
        OPEN,
        round=a_round(2, members=[a_member(0)]),
        notices={an_agent(1): a_notice()},
        noticed_slots={an_agent(1): 2},
    )
    event = written(view, a_watch())
    assert event == NodeLost(TOKEN, 1, an_agent(1), "it announced its end, and was replaced")


def test_machines_that_die_at_birth_again_and_again_end_the_run() -> None:
    assert isinstance(conduct(a_view(stillborn=40), a_watch(), NOW), Write)
    event = written(a_view(stillborn=41, groups={}), a_watch(seats={}))
    assert isinstance(event, FitEnded)
    assert event.why == "41 machines in a row ended before their agents could join"


# --- in a round ----------------------------------------------------------------------------------


def test_as_long_as_all_is_well_it_looks_again_later() -> None:
    wait = waited(OPEN, a_watch(seats=BUSY))
    assert (wait.until, wait.why) == (NOW + 30.0, "all is well")


def test_a_complete_checkpoint_is_committed() -> None:
    ready = a_ready("c7", report=4, size_bytes=99)
    event = written(OPEN, a_watch(seats=BUSY, ready=(ready,)))
    assert event == CheckpointCommitted("c7", 1, 4, {"loss": 1.0}, (0,), 99)
    mine = written(OPEN, a_watch(seats=BUSY, ready=(replace(ready, at="mine"),)))
    assert mine == CheckpointCommitted("c7", 1, 4, {"loss": 1.0}, (0,), 99, at="mine")


def test_a_failed_round_saves_what_is_complete_before_it_closes() -> None:
    watch = a_watch(seats=BUSY, ready=(a_ready(),), failures={0: RAISED}, doomed_since=NOW - 9)
    assert isinstance(written(OPEN, watch), CheckpointCommitted)
    closed = written(OPEN, replace(watch, ready=()))
    assert isinstance(closed, RoundClosed)
    assert closed.blame is Blame.WORKER


def test_how_long_a_round_lived_is_told_by_who_had_opened_it() -> None:
    opener = a_watch(seats=BUSY, led_since=100.0, turned_at=400.0)
    committed = written(OPEN, replace(opener, ready=(a_ready(),)))
    assert committed.age_s == 600.0
    failed = replace(opener, failures={0: RAISED}, doomed_since=NOW - 9)
    assert written(OPEN, failed).lived_s == 600.0
    successor = replace(failed, led_since=400.0)
    assert written(OPEN, successor).lived_s is None
    late = a_ready("c7", round=0)
    assert written(OPEN, replace(opener, ready=(late,))).age_s is None, "its round is over"


def test_a_failure_is_listened_to_for_a_moment_to_hear_its_cause() -> None:
    watch = a_watch(seats=BUSY, failures={0: RAISED}, doomed_since=NOW, stopped=False)
    wait = waited(OPEN, watch, NOW + 0.02)
    assert wait.until == pytest.approx(NOW + 0.03)
    assert isinstance(written(OPEN, watch, NOW + 0.04), RoundClosed)
    assert isinstance(written(OPEN, replace(watch, stopped=True), NOW), RoundClosed), "all is known"


def test_when_all_have_returned_and_all_is_told_the_run_is_finished() -> None:
    done = a_watch(returned=frozenset({0, 1}), metrics={"loss": 0.5}, result_key="r")
    assert written(OPEN, done) == FitEnded("finished", metrics={"loss": 0.5}, result_key="r")
    lost = replace(done, unsaved="rank 0: the bucket is gone")
    assert written(OPEN, lost).unsaved == "rank 0: the bucket is gone"
    assert waited(OPEN, replace(done, settled=False)).why == "the last reports are being told"
    assert waited(OPEN, replace(done, returned=frozenset({0}))).why == "all is well"


def test_workers_whose_function_returned_may_end_in_peace_but_not_for_ever() -> None:
    leaving = a_watch(seats=BUSY, returned=frozenset({0, 1}), stopped=False, returned_at=NOW)
    assert isinstance(conduct(OPEN, leaving, NOW), Wait)
    assert isinstance(written(OPEN, leaving, NOW + 45.0), FitEnded)
    assert isinstance(written(OPEN, replace(leaving, stopped=True)), FitEnded)


def test_once_all_have_returned_a_machine_that_goes_changes_nothing() -> None:
    watch = a_watch(
        seats=seats(a_seat(0)),
        returned=frozenset({0, 1}),
        gone={an_agent(1): NOW},
        doomed_since=NOW,
    )
    event = written(OPEN, watch)
    assert isinstance(event, FitEnded)
    assert event.outcome == "finished"


def test_a_machine_that_went_takes_its_round_along_even_if_others_had_returned() -> None:
    watch = a_watch(
        seats=seats(a_seat(0)), returned=frozenset({0}), gone={an_agent(1): 0.0}, doomed_since=0.0
    )
    event = written(OPEN, watch)
    assert isinstance(event, RoundClosed)
    assert event.blame is Blame.NETWORK
    gone = {TOKEN: a_status(NodeState.RUNNING, NodeState.GONE)}
    event = written(OPEN, replace(watch, statuses=gone))
    assert isinstance(event, RoundClosed)
    assert event.blame is Blame.PREEMPTION


def test_where_somebody_is_missing_the_backend_is_heard_before_a_round_is_closed() -> None:
    missing = a_watch(seats=seats(a_seat(0)), gone={an_agent(1): NOW}, doomed_since=NOW)
    assert waited(OPEN, missing).until == NOW + SPEC.tempo.settle_s
    runs = replace(missing, statuses={TOKEN: a_status()}, seen={TOKEN: NOW})
    event = written(OPEN, runs)
    assert isinstance(event, RoundClosed)
    assert event.blame is Blame.NETWORK


def test_where_the_former_leader_is_missing_it_looks_every_second() -> None:
    led = LeaderElected(an_agent(0), 2, "h:1", "", lost=an_agent(7))
    assert waited(replace(OPEN, leader=led), a_watch(seats=BUSY)).until == NOW + 1.0
    given_up = replace(OPEN, leader=led, lost_agents=frozenset({an_agent(7)}))
    assert waited(given_up, a_watch(seats=BUSY)).until > NOW + 1.0


UNABLE = RankFailure(0, "raised", "Python differs", blame=Blame.WORKER, final=True)


def test_where_no_worker_can_ever_start_the_run_ends_between_rounds() -> None:
    there = a_watch(seats=seats(a_seat(0), a_seat(1, unable=UNABLE)))
    forming = replace(OPEN, round=None)
    event = written(forming, there)
    assert isinstance(event, FitEnded)
    assert (event.outcome, event.blame, event.failures) == ("failed", Blame.WORKER, (UNABLE,))
    assert not isinstance(conduct(OPEN, there, NOW), Write), "a round that is open needs it not"
    lost = replace(forming, lost_agents=frozenset({an_agent(1)}))
    assert not isinstance(conduct(lost, there, NOW), Write), "nor is a machine asked that is gone"


def test_what_a_machine_announces_is_written_down_once() -> None:
    noticed = a_watch(
        seats=seats(a_seat(0), a_seat(1, notice=a_notice())), noticed_at={an_agent(1): NOW}
    )
    assert written(OPEN, noticed) == Noticed(an_agent(1), a_notice())
    known = replace(OPEN, notices={an_agent(1): a_notice()}, noticed_slots={an_agent(1): 5})
    assert isinstance(conduct(known, noticed, NOW), Order), "its replacement comes next"


def test_a_replacement_is_asked_for_while_the_round_goes_on() -> None:
    leaving = replace(OPEN, notices={an_agent(1): a_notice()}, noticed_slots={an_agent(1): 5})
    watch = a_watch(
        seats=seats(a_seat(0), a_seat(1, notice=a_notice())), noticed_at={an_agent(1): NOW}
    )
    assert conduct(leaving, watch, NOW) == Order(1, "1 of 2 workers have no machine")
    asked = replace(leaving, groups=PENDING)
    assert conduct(asked, watch, NOW) == Submit(OTHER)


def test_a_slow_cloud_holds_up_neither_commits_nor_the_end_of_a_round() -> None:
    asked = replace(OPEN, groups=PENDING)
    ready = a_watch(seats=BUSY, ready=(a_ready(),))
    assert isinstance(written(asked, ready), CheckpointCommitted)
    failed = a_watch(seats=BUSY, failures={0: RAISED}, doomed_since=NOW - 9)
    assert isinstance(written(asked, failed), RoundClosed)
    noticed = a_watch(seats=seats(a_seat(0), a_seat(1, notice=a_notice())))
    assert isinstance(written(asked, noticed), Noticed)
    elastic = replace(asked, round=None, spec=a_spec(workers_min=1, workers_max=2))
    assert isinstance(written(elastic, a_watch()), RoundOpened)


def test_a_lost_machine_is_written_down_and_replaced() -> None:
    watch = a_watch(
        seats=seats(a_seat(0)),
        statuses={TOKEN: a_status(NodeState.RUNNING, NodeState.GONE)},
        gone={an_agent(1): NOW},
    )
    event = written(a_view(last_round=a_round()), watch)
    why = "the backend says it is gone"
    assert event == NodeLost(TOKEN, 1, an_agent(1), why, Blame.PREEMPTION)
    after = a_view(groups={TOKEN: a_group(lost=frozenset({1}))})
    assert conduct(after, watch, NOW) == Order(1, "1 of 2 workers have no machine")


def test_while_somebody_is_missing_it_looks_every_second() -> None:
    assert waited(OPEN, a_watch(seats=BUSY, gone={an_agent(7): NOW})).until == NOW + 1.0


def test_a_group_without_machines_is_let_go() -> None:
    groups = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1, lost=frozenset({0}))}
    assert conduct(a_view(round=a_round(), groups=groups), a_watch(), NOW) == Release(OTHER)


def test_old_checkpoints_are_dropped_but_not_before_what_is_urgent() -> None:
    kept = replace(
        OPEN, spec=a_spec(keep=Keep(last=1)), checkpoints=(a_commit("c1"), a_commit("c2"))
    )
    assert written(kept, a_watch(seats=BUSY)) == CheckpointDropped("c1", "only the last 1 stay")


def test_what_is_not_kept_is_dropped_before_the_end() -> None:
    kept = replace(
        OPEN, spec=a_spec(keep=Keep(last=1)), checkpoints=(a_commit("c1"), a_commit("c2"))
    )
    done = a_watch(returned=frozenset({0, 1}))
    assert isinstance(written(kept, done), CheckpointDropped)
    after = replace(kept, checkpoints=(a_commit("c2"),), dropped=frozenset({"c1"}))
    assert isinstance(written(after, done), FitEnded)


# --- the end -------------------------------------------------------------------------------------


def test_a_cancelled_run_ends_before_anything_else() -> None:
    view = a_view(round=a_round(), groups=PENDING, cancelled="Ctrl-C")
    watch = a_watch(metrics={"loss": 1}, ready=(a_ready(),))
    assert written(view, watch) == FitEnded("cancelled", "Ctrl-C", metrics={"loss": 1})


def test_a_callback_that_raised_ends_the_run() -> None:
    trouble = Trouble("a callback raised", "Traceback\nKeyError: 'x'", "f/1")
    event = written(OPEN, a_watch(trouble=trouble))
    assert isinstance(event, FitEnded)
    assert (event.outcome, event.why, event.blame) == ("failed", trouble.why, Blame.PLATFORM)
    assert event.failures == (RankFailure(-1, "raised", trouble.told, "f/1"),)


def test_a_final_refusal_ends_the_run_once_no_round_is_open() -> None:
    refused = a_view(final_refusal="no quota", groups={})
    alone = a_watch(seats=seats(a_seat(0)))
    assert written(refused, alone) == FitEnded("failed", "no quota", Blame.PLATFORM)
    assert isinstance(conduct(replace(OPEN, final_refusal="x"), a_watch(seats=BUSY), NOW), Wait)


@pytest.mark.parametrize("wrong", [{"final_refusal": "no quota"}, {"stillborn": 99}])
def test_whoever_has_its_machines_goes_on_though_there_are_no_more(wrong: dict[str, Any]) -> None:
    assert isinstance(written(a_view(**wrong), a_watch()), RoundOpened)
    alone = a_watch(seats=seats(a_seat(0)))
    assert isinstance(conduct(a_view(**wrong), alone, NOW), Wait), "the other one still boots"


def test_a_broken_budget_ends_the_run_with_the_workers_errors() -> None:
    view = a_view(
        spec=a_spec(limits=Limits(worker=0)),
        failures={Blame.WORKER: 1},
        last_closed=RoundClosed(1, Blame.WORKER, "rank 0 raised: no", (RAISED,)),
    )
    event = written(view, a_watch(metrics={"loss": 1.0}))
    assert isinstance(event, FitEnded)
    assert (event.blame, event.failures, event.metrics) == (
        Blame.WORKER,
        (RAISED,),
        {"loss": 1.0},
    )


def test_the_run_does_not_end_and_does_not_go_on_before_the_callbacks_have_heard_of_it() -> None:
    closed = RoundClosed(1, Blame.WORKER, "rank 0 raised", (RAISED,))
    view = a_view(last_closed=closed, failures={Blame.WORKER: 1}, groups={})
    assert waited(view, a_watch(seats={}, settled=False)).why.startswith("the callbacks are")
    assert isinstance(written(view, a_watch(seats={})), FitEnded)


def test_a_score_that_cannot_be_compared_ends_the_run_and_not_its_leader() -> None:
    view = replace(
        OPEN,
        spec=a_spec(keep=Keep(1, "acc")),
        checkpoints=(a_commit("c1", metrics={"acc": "high"}), a_commit("c2")),
    )
    event = written(view, a_watch(seats=BUSY))
    assert isinstance(event, FitEnded)
    assert (event.outcome, event.blame) == ("failed", Blame.PLATFORM)
    assert "must be a number" in event.why


# --- after the end -------------------------------------------------------------------------------

DONE = a_view(ended=FitEnded("finished"))
MINE_ONLY = seats(a_seat(0))
BOTH_CAME = {(TOKEN, 0): an_agent(0), (TOKEN, 1): an_agent(1)}


def test_machines_are_given_time_to_leave_by_themselves() -> None:
    wait = waited(DONE, a_watch(turned_at=NOW))
    assert (wait.until, wait.why) == (NOW + 1.0, "machines are leaving by themselves")


def test_the_leaders_own_group_ends_with_it_where_machines_end_themselves() -> None:
    watch = a_watch(seats=MINE_ONLY, turned_at=NOW, known=BOTH_CAME)
    assert written(DONE, watch) == Released(TOKEN)
    let_go = replace(DONE, groups={TOKEN: a_group(released=True)})
    assert conduct(let_go, watch, NOW) == Rest()


def test_a_machine_that_never_came_is_over_or_has_to_be_let_go() -> None:
    watch = a_watch(seats=MINE_ONLY, turned_at=NOW, known={(TOKEN, 0): an_agent(0)})
    assert conduct(DONE, watch, NOW) == Release(TOKEN), "it may still boot, and be paid"
    status = a_status(NodeState.RUNNING, NodeState.GONE)
    assert written(DONE, replace(watch, statuses={TOKEN: status})) == Released(TOKEN)


def test_where_machines_do_not_end_themselves_the_leader_lets_its_own_go_last() -> None:
    view = replace(DONE, groups={TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1)})
    watch = a_watch(seats=MINE_ONLY, turned_at=NOW, ends_itself=False, known=BOTH_CAME)
    assert conduct(view, watch, NOW) == Release(OTHER)
    assert conduct(DONE, watch, NOW) == Release(TOKEN)


def test_groups_of_others_are_let_go_first() -> None:
    spare = a_group(token=OTHER, nodes=1)
    view = replace(DONE, groups={TOKEN: a_group(), OTHER: spare})
    assert conduct(view, a_watch(seats=MINE_ONLY, turned_at=NOW), NOW) == Release(OTHER)


def test_who_will_not_leave_is_let_go_after_a_while() -> None:
    stays = seats(a_seat(0), a_seat(5, member=a_member(5, token=OTHER, node=0)))
    view = replace(DONE, groups={OTHER: a_group(token=OTHER, nodes=1)})
    watch = a_watch(seats=stays, turned_at=NOW)
    assert isinstance(conduct(view, watch, NOW + 14), Wait)
    assert conduct(view, watch, NOW + 15) == Release(OTHER)


def test_an_intent_is_seen_through_even_after_the_end() -> None:
    view = replace(DONE, groups=PENDING)
    assert conduct(view, a_watch(turned_at=NOW), NOW) == Submit(OTHER)


def test_a_caretaker_lets_everything_go() -> None:
    caretaker = a_watch(caretaker=True, seats={}, turned_at=NOW)
    assert conduct(DONE, caretaker, NOW) == Release(TOKEN)
    assert conduct(replace(DONE, groups={}), caretaker, NOW) == Rest()


def test_a_caretaker_closes_a_round_of_which_nobody_is_left() -> None:
    caretaker = a_watch(caretaker=True, seats={}, statuses={TOKEN: a_status()})
    one_left = replace(OPEN, lost_agents=frozenset({an_agent(0)}))
    assert isinstance(conduct(one_left, caretaker, NOW), Wait)
    nobody = replace(OPEN, lost_agents=frozenset({an_agent(0), an_agent(1)}))
    event = written(nobody, caretaker)
    assert isinstance(event, RoundClosed)
    assert event.blame is Blame.PREEMPTION


# --- whatever it sees ----------------------------------------------------------------------------

FAILURES = st.dictionaries(
    st.integers(0, 1),
    st.builds(
        RankFailure, st.integers(0, 1), st.sampled_from(["raised", "died"]), st.text(max_size=5)
    ),
    max_size=2,
)
AGENTS = st.integers(0, 3).map(an_agent)
TIMES = st.floats(0, 2000)


@st.composite
def views(draw: st.DrawFn) -> View:
    groups = {}
    for n in range(draw(st.integers(0, 3))):
        token = Token(f"t-{n + 1}")
        group = a_group(token=token, nodes=2, lost=draw(st.frozensets(st.integers(0, 1))))
        fate = draw(st.sampled_from(["granted", "pending", "refused", "released"]))
        if fate != "granted":
            changed: dict[str, Any] = {
                "pending": {"handle": None},
                "refused": {"handle": None, "refused": "full"},
                "released": {"released": True},
            }
            group = replace(group, **changed[fate])
        groups[token] = group
    noticed = draw(st.frozensets(AGENTS, max_size=2))
    low = draw(st.integers(1, 2))
    return a_view(
        spec=a_spec(
            workers_min=low,
            workers_max=draw(st.integers(low, 4)),
            limits=Limits(draw(st.integers(-1, 1)), -1, draw(st.integers(-1, 1))),
            keep=Keep(draw(st.sampled_from([None, 1])), draw(st.sampled_from([None, "loss"]))),
        ),
        groups=groups,
        round=draw(st.none() | st.just(a_round())),
        last_round=draw(st.none() | st.just(a_round())),
        leader=draw(st.just(LeaderElected(an_agent(0), 1, "h:1", "", draw(st.none() | AGENTS)))),
        last_closed=draw(
            st.none() | st.builds(RoundClosed, st.just(1), st.sampled_from(Blame), st.text())
        ),
        failures={blame: draw(st.integers(0, 2)) for blame in Blame},
        refusals=draw(st.integers(0, 3)),
        stillborn=draw(st.sampled_from([0, 1, 99])),
        final_refusal=draw(st.none() | st.just("no quota")),
        notices=dict.fromkeys(noticed, a_notice(seconds_left=draw(st.none() | TIMES))),
        noticed_slots=dict.fromkeys(noticed, draw(st.integers(0, 9))),
        latest_committed_slot=draw(st.integers(-1, 9)),
        lost_agents=draw(st.frozensets(AGENTS, max_size=2)),
        checkpoints=tuple(
            a_commit(f"c{n}", metrics=draw(st.sampled_from([{"loss": n}, {}, {"loss": "x"}])))
            for n in range(draw(st.integers(0, 3)))
        ),
        cancelled=draw(st.none() | st.just("enough")),
        ended=draw(st.none() | st.just(FitEnded("finished"))),
    )


@st.composite
def watches(draw: st.DrawFn) -> Watch:
    seated = draw(st.sets(st.integers(0, 3)))
    notice = draw(st.none() | st.just(a_notice()))
    return Watch(
        me=an_agent(0),
        caretaker=draw(st.booleans()),
        ends_itself=draw(st.booleans()),
        led_since=draw(TIMES),
        seats=seats(
            *(a_seat(n, running=draw(st.none() | st.just(1)), notice=notice) for n in seated)
        ),
        gone=draw(st.dictionaries(AGENTS, TIMES, max_size=2)),
        broken=draw(st.frozensets(AGENTS, max_size=1)),
        known=draw(st.sampled_from([{}, {(TOKEN, 0): an_agent(0)}, BOTH_CAME])),
        stopped=draw(st.booleans()),
        returned=draw(st.frozensets(st.integers(0, 1))),
        failures=draw(FAILURES),
        doomed_since=draw(st.none() | TIMES),
        settled=draw(st.booleans()),
        trouble=draw(st.none() | st.just(Trouble("a callback raised", "Traceback"))),
        ready=draw(st.sampled_from([(), (a_ready(),)])),
        surveyed=draw(st.booleans()),
        statuses=draw(
            st.dictionaries(st.just(TOKEN), st.sampled_from([a_status(), a_status(NodeState.GONE)]))
        ),
        granted=draw(st.dictionaries(st.just(TOKEN), TIMES)),
        refused_at=draw(st.none() | TIMES),
        turned_at=draw(TIMES),
        committed_at=draw(st.none() | TIMES),
    )


@given(views(), watches(), TIMES)
def test_it_is_total_and_two_who_see_the_same_do_the_same(
    view: View, watch: Watch, now: float
) -> None:
    action: Action = conduct(view, watch, now)
    assert action == conduct(view, watch, now)
    if isinstance(action, Wait):
        assert action.until <= now + 30.0, "it never sleeps for long"
        assert action.why


@given(views(), watches(), TIMES)
def test_what_it_orders_fits_what_is_written(view: View, watch: Watch, now: float) -> None:
    match conduct(view, watch, now):
        case Submit(token=token):
            assert view.groups[token].pending
        case Release(token=token):
            assert view.groups[token].handle is not None
            assert not view.groups[token].released
        case Order(workers=workers):
            assert workers > 0
            assert view.active
        case Write(event=RoundOpened()):
            assert view.round is None
            assert view.active
        case Write(event=RoundClosed(number=number)):
            assert view.round is not None
            assert view.round.number == number
        case Write(event=FitEnded()):
            assert view.ended is None
        case Rest():
            assert view.ended is not None
