"""Agents: one is elected, rounds open and close, and whatever dies, the run goes on."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.errors import QuotaError, StoreError, StorePermissionError
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    FitEnded,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Taken,
    TrainingEnded,
    ValidationAsked,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import NodeState, NodeStatus
from spotfit.model.spec import Limits, ValidationSpec
from spotfit.model.wire import (
    Assessed,
    Committed,
    Files,
    Gather,
    Gathered,
    Join,
    Judged,
    Named,
    Preempted,
    Raised,
    Rejected,
    Report,
    Returned,
    Saved,
    SaveSoon,
)
from spotfit.model.world import Advice
from spotfit.testing.builders import a_notice
from tests.unit.agent.world import TEMPO, Node, World, signed

ANY_FAILURES = Limits(worker=-1)
BRIEF = replace(TEMPO, validator_idle_s=2.0)


# --- a run without trouble -----------------------------------------------------------------------


def test_a_leader_is_elected_and_everybody_takes_its_place() -> None:
    world = World()
    assert world.train() == 1
    assert [one.epoch for one in world.all_of(LeaderElected)] == [1, 2]
    assert sorted(rank for node in world.nodes.values() for rank in node.ranks) == [0, 1]


def test_a_worker_is_told_who_and_where_it_is() -> None:
    world = World()
    world.train()
    for rank in (0, 1):
        node = world.holder(rank)
        start = node.crew.workers[rank]
        assert (start.rank, start.world_size, start.node_rank, start.local_rank) == (
            rank,
            2,
            rank,
            0,
        )
        assert (start.host, start.round, start.checkpoint) == (node.member.host, 1, None)
        assert start.secret == "secret"
        assert node.crew.spec == world.view.spec


def test_who_the_agents_are_can_be_read_in_the_bucket() -> None:
    world = World()
    world.train()
    offers = {one.agent for one in world.holder(0).ledger.offers()}
    assert offers == {node.me for node in world.nodes.values()}


def test_when_all_have_returned_the_run_is_finished_and_everybody_leaves() -> None:
    world = World()
    world.train()
    world.report(0, loss=0.5)
    world.finish(1)
    assert world.view.active
    world.finish(0, b"the result")
    world.until(lambda: all(node.over for node in world.nodes.values()))
    assert world.last(FitEnded) == FitEnded(
        "finished", metrics={"rank": 0, "loss": 0.5}, result_key=keys.result(1, 0)
    )
    assert world.object_at(keys.result(1, 0)) == signed(keys.result(1, 0), b"the result")
    assert world.last(Released) is not None, "nothing is paid for any more"
    assert not any(node.agent.given_up for node in world.nodes.values())


def test_a_checkpoint_is_committed_and_every_worker_told() -> None:
    world = World()
    world.train()
    world.checkpoint(0, "c1", loss=0.5)
    committed = world.last(CheckpointCommitted)
    assert (committed.name, committed.report, committed.ranks) == ("c1", 0, (0,))
    for rank in (0, 1):
        assert world.heard(rank, Committed) == [Committed("c1", {"rank": 0, "loss": 0.5})]


# --- workers fail --------------------------------------------------------------------------------


def test_a_worker_that_raises_ends_the_round_for_all_and_the_next_begins() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    world.checkpoint(0, "c1")
    failed = world.holder(1)
    world.fail(1)
    world.until(lambda: world.training)
    closed = world.last(RoundClosed)
    assert (closed.blame, closed.why) == (Blame.WORKER, "rank 1 raised: ValueError: no")
    assert [(one.rank, one.pickle_key) for one in closed.failures] == [(1, keys.failure(1, 1))]
    assert world.object_at(keys.failure(1, 1)) == signed(keys.failure(1, 1), b"pickle")
    assert world.view.round is not None
    assert (world.view.round.number, world.view.round.checkpoint) == (2, "c1")
    assert world.holder(1) is failed, "survivors keep their places"
    assert world.holder(0).crew.workers[0].checkpoint_metrics == {"rank": 0}


def test_a_peer_stops_at_once_when_a_worker_dies_without_a_word() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    peer = world.holder(0)
    world.holder(1).crew.exit(1, "was killed by SIGKILL")
    took_s = world.until(lambda: world.training and peer.crew.rounds == [1, 2])
    assert took_s < 0.2, "nobody waits for a collective to time out"
    closed = world.last(RoundClosed)
    assert closed.failures[0].told == "The worker of rank 1 was killed by SIGKILL."


def test_a_worker_that_ends_well_without_having_returned_has_failed() -> None:
    world = World()
    world.train()
    world.holder(0).crew.exit(0, "exited with code 0", clean=True)
    world.until(lambda: world.view.ended)
    assert "exited with code 0 before its function had returned" in world.last(FitEnded).why


def test_without_a_budget_the_first_failure_ends_the_run() -> None:
    world = World()
    world.train()
    world.fail(0)
    world.until(lambda: all(node.over for node in world.nodes.values()))
    ended = world.last(FitEnded)
    assert (ended.outcome, ended.blame) == ("failed", Blame.WORKER)
    assert len(world.all_of(RoundOpened)) == 1


def test_workers_that_will_not_end_cost_their_machine_not_the_run() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    stuck = world.holder(1)
    stuck.crew.immortal = True
    world.fail(0)
    world.until(lambda: world.training, within_s=60)
    lost = world.last(NodeLost)
    assert (lost.agent, lost.why) == (stuck.me, "its workers would not end")
    stuck.crew.immortal = False
    world.until(lambda: stuck.over)
    assert stuck.agent.given_up, "nobody waits for it"


def spoil(node: Node) -> None:
    node.crew.spoil(Raised("no such package", b"pickle", Blame.WORKER, final=True))


def test_one_machine_on_which_nothing_will_ever_start_ends_the_run_before_all_are_here() -> None:
    world = World(limits=ANY_FAILURES)
    world.boots = False
    first = world.boot(Token("t-1"), 0)
    world.until(lambda: world.leader is first)
    spoil(first)
    world.until(lambda: world.view.ended)
    ended = world.last(FitEnded)
    assert (ended.outcome, ended.blame) == ("failed", Blame.WORKER)
    assert ended.why == "another try would end the same way: rank 0 raised: no such package"
    assert ended.failures[0].pickle_key == keys.machine_failure(first.me)
    assert world.all_of(RoundOpened) == []


def test_a_successor_is_told_of_it_when_it_is_joined() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    leader, other = world.leader, world.holder(follower(world))
    spoil(other)
    world.run(0.2)
    assert world.training, "those at work need nothing more to be started"
    world.kill(leader)
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).why.endswith("no such package")


# --- machines go ---------------------------------------------------------------------------------


def given_up(world: World) -> set[str | None]:
    """Agents whose machines the journal says are lost."""
    return {lost.agent for lost in world.all_of(NodeLost)}


def follower(world: World) -> int:
    """A rank that does not live beside the leader."""
    return next(rank for rank in (0, 1) if world.holder(rank) is not world.leader)


def test_a_machine_that_goes_is_replaced_and_the_run_goes_on() -> None:
    world = World()
    world.train()
    world.checkpoint(0, "c1")
    gone = world.holder(follower(world))
    world.kill(gone)
    world.until(lambda: world.training)
    closed = world.last(RoundClosed)
    assert closed.blame is Blame.PREEMPTION
    assert world.last(NodeLost).agent == gone.me
    assert world.last(Intended).request.workers == 1
    assert world.view.round is not None
    assert world.view.round.checkpoint == "c1"
    assert world.view.failures == {Blame.PREEMPTION: 1}


def test_when_the_leader_goes_another_takes_over_within_a_moment() -> None:
    world = World()
    world.train()
    world.checkpoint(0, "c1")
    old = world.leader
    world.kill(old)
    took_s = world.until(lambda: world.leader is not old)
    assert took_s < 1.0, "nobody waits for a lease where nobody listens any more"
    world.until(lambda: world.training)
    assert world.last(LeaderElected).lost == old.me
    assert world.last(RoundClosed).blame is Blame.PREEMPTION
    assert world.view.latest_checkpoint is not None


def test_a_checkpoint_the_dead_leader_did_not_commit_is_adopted() -> None:
    world = World()
    world.train()
    part = Manifest("c9", 1, 0, 0, (0,), {"loss": 0.1}, ())
    world.store.put(keys.manifest("c9", 1, 0), encode(part))
    world.kill(world.leader)
    world.until(lambda: world.training)
    assert [one.name for one in world.all_of(CheckpointCommitted)] == ["c9"]
    assert world.view.round is not None
    assert world.view.round.checkpoint == "c9"


def test_an_old_checkpoint_of_a_straggler_does_not_take_the_run_back() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    world.checkpoint(0, "old")
    world.checkpoint(1, "new")
    part = Manifest("late", 1, 0, 0, (0,), {}, ())
    world.store.put(keys.manifest("late", 1, 0), encode(part))
    world.fail(0)
    world.until(lambda: world.training)
    assert world.view.round is not None
    assert world.view.round.checkpoint == "new"


def test_a_broken_connection_is_tried_once_more_before_anybody_claims() -> None:
    world = World()
    world.train()
    leader, other = world.leader, world.holder(follower(world))
    before = len(other.net.dialled)
    other.net.cut()
    world.until(lambda: world.training)
    assert other.net.dialled[before:] == [leader.net.hub]
    assert world.leader is leader
    assert world.last(RoundClosed).number == 1, "the round is over all the same"


def test_a_connection_that_breaks_is_no_machine_lost_while_its_backend_says_that_it_runs() -> None:
    world = World(told_late_s=0.0, limits=Limits(preemption=0, platform=0))
    world.train()
    slept = world.holder(follower(world))
    slept.asleep = True
    slept.net.cut()
    world.until(lambda: world.last(RoundClosed))
    assert world.last(RoundClosed).blame is Blame.NETWORK
    slept.asleep = False
    world.until(lambda: world.training)
    assert world.view.failures == {Blame.NETWORK: 1}
    assert world.all_of(NodeLost) == []


@pytest.mark.parametrize(
    ("told_late_s", "blame"), [(0.0, Blame.PLATFORM), (60.0, Blame.PREEMPTION)]
)
def test_an_agent_that_is_not_back_in_time_is_charged_to_whom_the_backend_says(
    told_late_s: float, blame: Blame
) -> None:
    """A backend that tells late cannot excuse the market: most who fall silent were taken away."""
    world = World(told_late_s=told_late_s)
    world.train()
    slept = world.holder(follower(world))
    slept.asleep = True
    slept.net.cut()
    world.until(lambda: world.last(NodeLost))
    assert world.last(RoundClosed).blame is Blame.NETWORK
    assert world.last(NodeLost).blame is blame
    assert world.view.failures == {blame: 1}
    assert world.view.last_closed is not None
    assert world.view.last_closed.blame is blame


def test_a_budget_is_judged_once_it_is_known_whose_it_is() -> None:
    world = World(told_late_s=0.0, limits=Limits(platform=0))
    world.train()
    slept = world.holder(follower(world))
    slept.asleep = True
    slept.net.cut()
    world.until(lambda: world.view.ended)
    ended = world.last(FitEnded)
    assert (ended.outcome, ended.blame) == ("failed", Blame.PLATFORM)
    assert "its agent was not heard again" in ended.why


def test_only_when_nobody_answers_the_second_call_the_leader_is_given_up() -> None:
    world = World()
    world.train()
    leader, other = world.leader, world.holder(follower(world))
    before = len(other.net.dialled)
    leader.net.alive = False
    leader.asleep = True
    other.net.cut()
    world.until(lambda: world.leader is other)
    assert other.net.dialled[before:][:2] == [leader.net.hub, other.net.hub]
    assert world.last(LeaderElected).why == "nobody listens at the leader's hub"


def test_a_leader_that_only_fell_silent_is_waited_for() -> None:
    world = World()
    world.train()
    leader, other = world.leader, world.holder(follower(world))
    leader.asleep = True
    took_s = world.until(lambda: world.leader is other, within_s=60)
    assert took_s > TEMPO.silent_s
    assert world.last(LeaderElected).lost is None, "it may live"


def test_a_deposed_leader_stops_leading_and_joins_its_successor() -> None:
    world = World()
    world.train()
    old = world.leader
    old.asleep = True
    world.until(lambda: world.leader is not old, within_s=60)
    written = len(world.entries)
    old.asleep = False
    world.until(lambda: world.training or old.over, within_s=60)
    assert not any(entry.by == old.me for entry in world.entries[written:])
    assert world.view.failures.get(Blame.WORKER, 0) == 0
    assert old.workplace.resigned == 1, "callbacks and hooks are its successor's"
    assert world.leader.workplace.resigned == 0


def test_an_agent_that_was_given_up_leaves_when_it_wakes() -> None:
    world = World()
    world.train()
    slept = world.holder(follower(world))
    slept.asleep = True
    world.until(lambda: slept.me in given_up(world), within_s=60)
    slept.asleep = False
    world.until(lambda: slept.over)
    assert slept.agent.given_up
    assert not slept.crew.busy, "its workers went first"


def test_who_is_still_needed_when_its_time_is_over_leaves_at_the_last_moment() -> None:
    """With a code of its own: started again it wakes a run that nobody else is awake for."""
    world = World()
    world.boots = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=20.0)
    took_s = world.until(lambda: leaving.over)
    assert took_s == pytest.approx(20.5, abs=1.0)
    assert leaving.agent.drained
    assert not leaving.crew.busy, "its workers went first"
    assert not leaving.agent.given_up


def test_a_machine_that_no_standing_request_asked_for_leaves_by_itself() -> None:
    """Whoever rented it was deposed while asking; nobody else would let it go."""
    world = World()
    world.train()
    stray = world.boot(Token("t-unheard-of"), 0)
    world.until(lambda: stray.over)
    assert stray.agent.given_up
    assert stray.crew.rounds == []
    assert world.training


def test_a_machine_that_comes_back_before_it_was_missed_goes_on_with_its_new_agent() -> None:
    world = World()
    world.boots = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.train()
    lost = world.holder(follower(world))
    lost.over = True  # the backend has brought it back before anybody looked
    lost.net.die()
    again = world.boot(lost.member.token, lost.member.node)
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    assert again.crew.rounds == [2]
    assert [one.request.workers for one in world.all_of(Intended)] == [2], "nothing was ordered"
    assert world.view.failures == {Blame.PREEMPTION: 1}


def test_a_machine_that_comes_back_after_it_was_replaced_leaves_by_itself() -> None:
    """A backend that requeues what it lost does so whether or not somebody else was faster."""
    world = World()
    world.train()
    lost = world.holder(follower(world))
    world.kill(lost)
    world.until(lambda: lost.me in given_up(world) and world.training)
    again = world.boot(lost.member.token, lost.member.node)
    world.until(lambda: again.over)
    assert again.agent.given_up
    assert again.crew.rounds == []
    assert world.training


def test_who_does_not_lead_turns_callers_away() -> None:
    world = World()
    world.train()
    other, leader = world.holder(follower(world)), world.leader
    caller = world.boot(Token("t-1"), 7)
    caller.asleep = True
    caller.net.dial(other.net.hub, Join(world.view.run_id or "", caller.member, 0))
    world.settle()
    said = [getattr(event, "message", event) for event in caller.net.events()]
    assert said[0] == Rejected("not_leading")
    assert world.leader is leader


def test_a_caller_from_another_run_is_turned_away() -> None:
    world = World()
    world.train()
    caller = world.boot(Token("t-1"), 7)
    caller.asleep = True
    caller.net.dial(world.leader.net.hub, Join("another", caller.member, 0))
    world.settle()
    said = [getattr(event, "message", event) for event in caller.net.events()]
    assert said[0] == Rejected("other_run")
    assert world.view.round is not None, "and disturbs nobody"


def test_who_is_told_no_for_good_asks_no_more_and_lives_on_what_there_is() -> None:
    """A machine on its last life is replaced while it works, but not at any price."""
    world = World(limits=Limits(worker=-1))
    world.boots = False
    world.until(lambda: world.cloud.groups)
    (token,) = world.cloud.groups
    world.cloud.groups[token][0] = NodeStatus(NodeState.RUNNING, last=True)
    world.run(1.0)
    world.cloud.answers = [QuotaError("0 of 0")] * 99
    world.boot(token, 0)
    world.boot(token, 1)
    world.until(lambda: world.all_of(Refused))
    world.run(30.0)
    assert len(world.all_of(Refused)) == 1
    assert world.all_of(RoundClosed) == []
    world.fail(0)
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    world.kill(world.holder(0))
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).why == "0 of 0"


# --- machines that announce their end ------------------------------------------------------------


def test_a_notice_is_told_to_all_and_its_machine_replaced_before_it_goes() -> None:
    world = World()
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=60.0, deadline_ms=77)
    world.until(lambda: world.last(Noticed))
    assert world.last(Noticed).agent == leaving.me
    for rank in (0, 1):
        warned = world.heard(rank, Preempted)[-1]
        assert warned.deadline_ms == 77
        assert warned.nodes == {leaving.name: (follower(world),)}
    world.until(lambda: world.last(Intended).request.workers == 1)
    world.run(5.0)
    assert len(world.all_of(RoundClosed)) == 0, "a notice alone costs nothing"


def test_that_a_machine_is_in_danger_is_told_to_all_workers_once_and_changes_nothing() -> None:
    world = World()
    world.train()
    world.holder(follower(world)).fate.notice = Advice("higher risk")
    world.until(lambda: world.heard(0, SaveSoon))
    world.run(5.0)
    for rank in (0, 1):
        assert world.heard(rank, SaveSoon) == [SaveSoon("higher risk")]
        assert not world.heard(rank, Preempted)
    assert not world.all_of(Noticed)
    assert len(world.all_of(Intended)) == 1, "nothing is replaced"


def test_a_nearer_end_is_told_as_well_and_counts() -> None:
    world = World()
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=None)
    world.until(lambda: world.last(Noticed))
    world.run(3.0)
    leaving.fate.notice = a_notice(seconds_left=15.0)
    world.until(lambda: len(world.all_of(Noticed)) == 2)
    told_at = world.clock.now()
    world.run(10.0)
    assert len(world.all_of(Noticed)) == 2, "the same word is no news"
    assert len(world.all_of(RoundClosed)) == 0
    world.until(lambda: world.all_of(RoundClosed))
    assert world.last(RoundClosed).why == "the time the notice gave is over"
    assert world.clock.now() - told_at < 20.0, "one whose time nobody knows has 120 s"


def test_a_farther_end_is_no_news() -> None:
    world = World()
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=30.0)
    world.until(lambda: world.last(Noticed))
    leaving.fate.notice = a_notice(seconds_left=60.0)
    world.run(2.0)
    leaving.fate.notice = a_notice(seconds_left=None)
    world.run(2.0)
    assert len(world.all_of(Noticed)) == 1


def test_once_saved_and_replaced_the_group_moves_on_without_losing_a_step() -> None:
    world = World()
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=60.0)
    world.until(lambda: len(world.nodes) == 3)
    world.checkpoint(0, "c1")
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    closed = world.last(RoundClosed)
    assert (closed.blame, closed.why) == (Blame.PREEMPTION, "saved after the notice, and replaced")
    assert leaving.ranks == []
    assert world.view.round is not None
    assert world.view.round.checkpoint == "c1"


def test_workers_are_told_when_their_replacement_stands_ready() -> None:
    world = World()
    world.train()
    world.boots = False
    world.holder(follower(world)).fate.notice = a_notice(seconds_left=60.0)
    world.until(lambda: world.last(Intended).request.workers == 1)
    assert not world.heard(0, Preempted)[-1].replaced
    world.boot(world.last(Intended).request.token, 0)
    world.until(lambda: world.heard(0, Preempted)[-1].replaced)
    world.run(5.0)
    told = [one.replaced for one in world.heard(0, Preempted)]
    assert told == sorted(told), "and once is enough"
    assert told.count(True) == 1


def test_what_a_neighbour_has_of_a_leaving_machine_need_not_be_in_the_bucket_to_move_on() -> None:
    world = World()
    world.train()
    leaving, staying = world.holder(follower(world)), world.holder(1 - follower(world))
    leaving.crew.keeps_a_copy(follower(world), 3, staying.member.vault)
    world.run(1.0)
    leaving.fate.notice = a_notice(seconds_left=60.0)
    world.until(lambda: len(world.nodes) == 3)
    world.run(2.0)
    assert world.all_of(RoundClosed) == [], "that was saved before the notice"
    leaving.crew.keeps_a_copy(follower(world), 9, "10.9.9.9:7001")
    world.run(2.0)
    assert world.all_of(RoundClosed) == [], "and that is with nobody who stays"
    leaving.crew.keeps_a_copy(follower(world), 9, staying.member.vault)
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    assert world.last(RoundClosed).safe
    assert leaving.ranks == []
    assert world.view.checkpoints == ()


def test_what_was_saved_before_the_replacement_came_is_no_occasion_once_it_is_committed() -> None:
    """It was long on its way. Workers take another now that they know, and a neighbour gets that
    one at once."""
    world = World()
    world.train()
    for rank in (0, 1):
        world.say(rank, Files(0, msgspec.Raw(b"{}"), shares=True))
    name = world.heard(0, Named)[-1].name
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=60.0)
    world.until(lambda: world.heard(0, Preempted) and world.heard(0, Preempted)[-1].replaced)
    world.run(1.0)
    for rank in (0, 1):
        world.say(rank, Saved(0, name, 10, 120))
    world.until(lambda: world.view.checkpoints)
    world.run(2.0)
    assert world.all_of(RoundClosed) == [], "much may have been done since step 120"
    for rank in (0, 1):
        world.say(rank, Files(1, msgspec.Raw(b"{}"), shares=True))
    name = world.heard(0, Named)[-1].name
    for rank in (0, 1):
        world.say(rank, Saved(1, name, 10, 150))
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    assert world.last(RoundClosed).why == "saved after the notice, and replaced"
    assert world.view.round is not None
    assert world.view.round.checkpoint == name


def test_a_replacement_is_changed_over_to_once_it_is_warm_and_says_so() -> None:
    world = World()
    world.train()
    world.boots = False
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=60.0)
    world.until(lambda: world.last(Intended).request.workers == 1)
    cold = world.boot(world.last(Intended).request.token, 0)
    cold.crew.warm = False
    world.until(lambda: cold.me in {one.agent for one in cold.ledger.offers()})
    world.checkpoint(0, "c1")
    world.run(2.0)
    assert world.all_of(RoundClosed) == [], "to wait for its imports would cost everybody"
    cold.crew.warm = True
    world.run(0.2)
    world.checkpoint(1, "c2")
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    assert cold.ranks != []


def test_a_machine_that_left_in_time_is_given_up_by_the_round_after() -> None:
    world = World()
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=60.0)
    world.until(lambda: len(world.nodes) == 3)
    world.checkpoint(0, "c1")
    world.until(lambda: leaving.over)
    assert leaving.agent.given_up
    assert world.last(NodeLost).why == "it announced its end, and was replaced"
    assert world.all_of(RoundClosed)[1:] == [], "and nobody is disturbed"


def test_without_a_replacement_it_trains_until_the_last_moment() -> None:
    world = World()
    world.boots = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.train()
    leaving = world.holder(follower(world))
    leaving.fate.notice = a_notice(seconds_left=20.0)
    took_s = world.until(lambda: world.last(RoundClosed))
    assert took_s == pytest.approx(20.0, abs=0.5)
    assert world.last(RoundClosed).why == "the time the notice gave is over"


def test_workers_still_at_work_when_the_time_is_over_are_told_with_the_machines() -> None:
    world = World(limits=Limits(preemption=0))
    world.boots = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.train()
    assert follower(world) == 1
    world.holder(1).fate.notice = a_notice(seconds_left=5.0, deadline_ms=77)
    world.until(lambda: world.view.ended)
    ended = world.last(FitEnded)
    assert ended.blame is Blame.PREEMPTION
    assert ended.taken == Taken({"t-1/1": (1,)}, 77, timed_out=True)


def leaves_and_dies(world: World) -> None:
    """The machine that does not lead announces its end, and is gone a second later."""
    leaving = world.holder(follower(world))
    assert leaving is world.holder(1)
    leaving.fate.notice = a_notice(seconds_left=60.0, deadline_ms=77)
    world.until(lambda: world.last(Noticed))
    world.run(1.0)
    world.kill(leaving)


def test_with_relaxed_collectives_those_who_stay_save_without_the_machine_that_went() -> None:
    world = World(relax_collectives=True)
    world.train()
    leaves_and_dies(world)
    world.run(5.0)
    assert world.all_of(RoundClosed) == []
    world.say(0, Files(0, msgspec.Raw(b"{}"), "c1"))
    assert world.heard(0, Named)[-1].ranks == (0,), "nobody waits for rank 1"
    world.say(0, Saved(0, "c1", 10))
    world.until(lambda: world.last(RoundClosed))
    closed = world.last(RoundClosed)
    assert (closed.blame, closed.taken) == (Blame.PREEMPTION, Taken({"t-1/1": (1,)}, 77))
    world.until(lambda: world.training)
    assert world.view.round is not None
    assert world.view.round.checkpoint == "c1"


def test_with_relaxed_collectives_no_save_waits_for_a_part_that_went_with_its_machine() -> None:
    world = World(relax_collectives=True)
    world.train()
    for rank in (1, 0):
        world.say(rank, Files(0, msgspec.Raw(b"{}"), "c0"))
    world.say(0, Saved(0, "c0", 10))
    leaves_and_dies(world)
    world.say(0, Files(1, msgspec.Raw(b"{}"), "c1"), Saved(1, "c1", 10))
    assert world.until(lambda: world.last(RoundClosed)) < 10.0, "long before its time is over"
    assert [one.name for one in world.view.checkpoints] == ["c1"]


def test_with_grace_those_who_stay_finish_what_they_were_saving() -> None:
    world = World(limits=Limits(preemption_grace_s=30.0))
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "c1"))
    leaves_and_dies(world)
    world.run(5.0)
    assert world.all_of(RoundClosed) == []
    world.say(0, Saved(0, "c1", 10))
    world.until(lambda: world.last(RoundClosed))
    assert [kept.name for kept in world.view.checkpoints] == ["c1"]


def test_without_either_a_machine_that_goes_ends_its_round_at_once() -> None:
    world = World()
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "c1"))
    leaves_and_dies(world)
    assert world.until(lambda: world.last(RoundClosed)) < 1.0
    assert world.last(RoundClosed).blame is Blame.PREEMPTION


def test_an_error_of_those_who_stay_is_the_echo_of_the_machine_that_went() -> None:
    world = World(relax_collectives=True)
    world.train()
    leaves_and_dies(world)
    world.run(1.0)
    world.fail(0, "ConnectionError: closed by peer")
    world.until(lambda: world.last(RoundClosed))
    assert world.last(RoundClosed).blame is Blame.PREEMPTION


# --- the end -------------------------------------------------------------------------------------


def test_a_cancelled_run_ends_soon_and_its_workers_with_it() -> None:
    world = World()
    world.train()
    world.cancel()
    took_s = world.until(lambda: all(node.over for node in world.nodes.values()))
    assert took_s < 3.0
    assert world.last(FitEnded).outcome == "cancelled"
    assert not any(node.crew.busy for node in world.nodes.values())


def test_a_late_machine_finds_the_run_ended_and_leaves() -> None:
    world = World()
    world.train()
    world.finish(1)
    world.finish(0)
    world.until(lambda: world.view.ended)
    late = world.boot(Token("t-1"), 1)
    world.until(lambda: late.over)
    assert late.crew.rounds == []


# --- a store that fails now and then -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_where_every_call_to_the_store_may_fail(seed: int) -> None:
    dice = random.Random(seed)
    world = World(limits=ANY_FAILURES)
    world.store.moody = lambda: dice.random() < 0.3
    world.train()
    world.report(0)
    world.checkpoint(1, "c1", loss=0.5)
    world.until(lambda: world.view.latest_checkpoint)
    world.fail(1)
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    world.finish(1)
    world.finish(0, b"the result")
    world.until(lambda: world.view.ended)
    assert world.store.failed > 0
    assert [one.blame for one in world.all_of(RoundClosed)] == [Blame.WORKER]
    ended = world.last(FitEnded)
    assert ended.outcome == "finished"
    assert world.object_at(ended.result_key) == signed(ended.result_key, b"the result")


@pytest.mark.parametrize("trouble", [StorePermissionError, StoreError])
def test_whatever_a_store_complains_of_agents_live_on(trouble: type[StoreError]) -> None:
    world = World()
    world.train()
    world.store.trouble = trouble
    world.store.moody = lambda: True
    world.checkpoint(0, "c1")
    world.run(3.0)
    world.store.moody = lambda: False
    world.until(lambda: world.last(CheckpointCommitted))
    assert world.all_of(RoundClosed) == []


def test_what_a_store_complains_of_again_and_again_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World()
    world.train()
    node = world.leader
    world.store.moody = lambda: True
    for _ in range(5):
        node.tick(world.clock.now())
        world.clock.wait(1.0)
    told = capsys.readouterr().err.count("the store is moody")
    assert 1 <= told <= 3, "once by each part of a tick that needs it"


# --- a store that hangs --------------------------------------------------------------------------


def test_while_the_bucket_hangs_a_round_goes_on_and_then_everything_is_written_once() -> None:
    world = World()
    world.train()
    world.report(0)
    world.hang()
    for n in range(1, 30):
        world.report(n, loss=n)
        world.run(1.0)
    assert world.training
    world.checkpoint(30, "c1", loss=0.5)
    for rank in (0, 1):
        world.say(rank, Gather("barrier", 0))
    assert [len(world.heard(rank, Gathered)) for rank in (0, 1)] == [1, 1]
    world.run(5.0)
    assert world.all_of(CheckpointCommitted) == []
    world.come_back()
    world.until(lambda: world.last(CheckpointCommitted))
    world.run(20.0)
    assert [one.name for one in world.all_of(CheckpointCommitted)] == ["c1"]
    assert world.all_of(RoundClosed) == []
    assert len(world.all_of(LeaderElected)) == 2, "nobody was deposed for the bucket's silence"
    world.finish(1)
    world.finish(0)
    world.until(lambda: all(node.over for node in world.nodes.values()))
    keys_there = [key for (key, _) in world.store.list(".spotfit/reports")]
    lines = b"".join(world.object_at(key) for key in keys_there).splitlines()
    assert [msgspec.json.decode(line)["n"] for line in lines] == list(range(31))


def test_while_the_bucket_hangs_a_death_is_heard_at_once() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    peer = world.holder(0)
    world.hang()
    world.run(10.0)
    world.fail(1)
    assert not peer.crew.busy, "halted in the same moment"
    world.run(10.0)
    assert world.all_of(RoundClosed) == []
    world.come_back()
    took_s = world.until(lambda: world.training)
    assert took_s < 1.0
    closed = world.last(RoundClosed)
    assert closed.why == "rank 1 raised: ValueError: no"
    assert world.object_at(keys.failure(1, 1)) == signed(keys.failure(1, 1), b"pickle")
    assert len(world.all_of(RoundOpened)) == 2


@pytest.mark.parametrize("deeds", [True, False])
def test_what_hung_for_too_long_is_written_once_whether_it_arrived_or_not(*, deeds: bool) -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    world.hang()
    world.checkpoint(0, "c1", loss=0.5)
    world.run(2.0)
    for _ in range(3):
        world.give_up(deeds=deeds)
        world.run(5.0)
    assert world.training
    world.come_back()
    world.run(5.0)
    assert [one.name for one in world.all_of(CheckpointCommitted)] == ["c1"]
    assert world.all_of(RoundClosed) == []


def test_a_leader_that_goes_while_the_bucket_hangs_is_succeeded_when_it_is_back() -> None:
    world = World()
    world.train()
    world.checkpoint(0, "c1")
    old = world.leader
    world.hang()
    world.run(3.0)
    world.kill(old)
    world.run(10.0)
    assert len(world.all_of(LeaderElected)) == 2
    world.come_back()
    world.until(lambda: world.training)
    assert len(world.all_of(LeaderElected)) == 3
    assert world.leader is not old
    assert world.last(RoundClosed).blame is Blame.PREEMPTION


def test_a_result_on_its_way_holds_up_the_end_and_nobody_else() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    world.hang()
    world.finish(0, b"the result")
    world.run(10.0)
    assert world.training is False
    assert world.holder(1).ranks == [1], "it is not blamed on anybody"
    world.finish(1)
    world.come_back()
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).outcome == "finished"
    assert world.all_of(RoundClosed) == []
    assert world.object_at(keys.result(1, 0)) == signed(keys.result(1, 0), b"the result")


PATIENT_FOR_20_S = msgspec.structs.replace(TEMPO, orphan_s=20.0)


def test_who_reaches_neither_hub_nor_bucket_for_too_long_ends() -> None:
    world = World(tempo=PATIENT_FOR_20_S)
    world.train()
    alone = world.holder(follower(world))
    world.boots = False
    world.store.moody = lambda: True
    world.kill(world.holder(1 - follower(world)))
    took_s = world.until(lambda: alone.over)
    assert took_s == pytest.approx(20.0, abs=1.0)
    assert alone.agent.given_up
    assert not alone.crew.busy


def test_who_still_has_a_hub_does_not_end_however_long_the_bucket_is_away() -> None:
    world = World(tempo=PATIENT_FOR_20_S)
    world.train()
    world.store.moody = lambda: True
    world.run(30.0)
    assert not any(node.over for node in world.nodes.values())
    assert world.training


def test_a_machine_that_never_found_its_run_ends() -> None:
    world = World()
    lost = world.boot(Token("t-1"), 0)
    world.store.moody = lambda: True
    assert lost.agent.tick(100.0) is not None
    assert lost.agent.tick(100.0 + TEMPO.orphan_s) is not None
    assert lost.agent.tick(100.1 + TEMPO.orphan_s) is None


def test_a_result_that_cannot_be_kept_holds_up_the_end_and_not_the_agent() -> None:
    world = World()
    world.train()
    world.finish(1)
    node = world.holder(0)
    world.store.moody = lambda: True
    node.crew.say(0, Returned(0, b"precious"))
    node.crew.exit(0, clean=True)
    world.run(3.0)
    world.store.moody = lambda: False
    assert world.view.active
    world.until(lambda: world.view.ended)
    assert world.object_at(keys.result(1, 0)) == signed(keys.result(1, 0), b"precious")


def test_a_name_is_made_where_nobody_chose_one() -> None:
    world = World()
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}")))
    assert world.heard(0, Named)[0].name == "made-0"


# --- validations ---------------------------------------------------------------------------------


def validated(own_machine: bool | None = None) -> World:
    """A world in which a checkpoint is being validated."""
    world = World(validation=ValidationSpec(own_machine), tempo=BRIEF)
    world.train()
    world.checkpoint(0, "c1", asked=ValidationAsked(), loss=1)
    world.until(lambda: world.validating)
    return world


def test_a_checkpoint_is_validated_on_a_machine_of_its_own_which_is_let_go_in_the_end() -> None:
    world = validated()
    busy = world.validating
    assert busy is not None
    asked = world.last(Intended).request
    assert (asked.role, asked.workers, asked.of) == ("validate", 1, 1)
    assert busy.member.token == asked.token
    assert busy.ranks == []
    assert world.training, "nobody waits for it"
    busy.assessor.find(acc=0.5)
    world.until(lambda: world.heard(0, Judged) and world.heard(1, Judged))
    assert world.view.metrics_of("c1") == {"rank": 0, "loss": 1, "acc": 0.5}
    world.until(lambda: world.last(Released))
    assert world.last(Released).token == asked.token
    assert world.training


def test_beside_the_workers_it_survives_their_round_but_not_its_machine() -> None:
    world = validated(own_machine=False)
    beside = world.validating
    assert beside is world.leader
    world.fail(1)
    assert world.last(FitEnded) is None
    assert world.last(TrainingEnded).ended.outcome == "failed"
    world.until(lambda: len([n for n in world.nodes.values() if not n.over]) == 1)
    assert world.validating is beside
    beside.assessor.find(told="no")
    world.until(lambda: world.last(FitEnded))
    assert world.last(FitEnded) == world.last(TrainingEnded).ended
    assert world.all_of(ValidationEnded)[0].why == "no"


def test_a_new_leader_hears_what_its_predecessor_did_not() -> None:
    world = validated()
    busy = world.validating
    assert busy is not None
    dead = world.leader
    world.kill(dead)
    busy.assessor.find(acc=0.5)
    world.until(lambda: world.last(ValidationEnded))
    assert world.leader is not dead
    assert world.last(ValidationEnded).metrics == {"acc": 0.5}
    assert len(world.all_of(ValidationBegun)) == 1


def test_what_is_told_again_of_an_earlier_one_hides_nothing() -> None:
    world = validated()
    busy = world.validating
    assert busy is not None
    busy.assessor.find(acc=0.5)
    world.until(lambda: world.last(ValidationEnded))
    world.checkpoint(1, "c2", asked=ValidationAsked(), loss=1)
    world.until(lambda: world.validating)
    for attempt in (2, 1):  # the first anew, by a machine whose connection broke
        busy.net.send_up(Assessed(attempt, "validated", {"acc": attempt}))
    world.until(lambda: len(world.all_of(ValidationEnded)) == 2)
    assert world.last(ValidationEnded).metrics == {"acc": 2}


def test_one_whose_machine_is_lost_is_begun_again() -> None:
    world = validated()
    first = world.validating
    assert first is not None
    world.kill(first)
    world.until(lambda: world.validating)
    again = world.validating
    assert again is not None
    assert again.member.token != first.member.token
    assert [one.attempt for one in world.all_of(ValidationBegun)] == [1, 2]


def test_after_the_training_only_who_validates_stays_and_leads() -> None:
    world = validated()
    busy = world.validating
    assert busy is not None
    for rank in (0, 1):
        world.finish(rank, b"42" if rank == 0 else b"")
    world.until(lambda: [n for n in world.nodes.values() if not n.over] == [busy])
    assert world.leader is busy
    assert world.view.active
    busy.assessor.find(acc=0.5)
    world.until(lambda: busy.over)
    ended = world.last(FitEnded)
    assert (ended.outcome, ended.metrics) == ("finished", {"rank": 0, "loss": 1})
    assert world.object_at(ended.result_key) == signed(ended.result_key, b"42")
    assert not world.cloud.groups or all(group.let_go for group in world.view.groups.values())


def test_a_cancelled_run_waits_for_no_validation() -> None:
    world = validated()
    world.cancel()
    world.until(lambda: all(node.over for node in world.nodes.values()))
    assert world.last(FitEnded).outcome == "cancelled"
    assert world.all_of(ValidationEnded) == []
    assert [one.name for one in world.view.unvalidated] == ["c1"]
