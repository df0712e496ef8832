"""A shift: a round is entered once, its workers' words are passed on, and their end is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.ports import FromAgent
from spotfit.agent.shift import Shift
from spotfit.core.codec import decoder, encode
from spotfit.ledger import keys
from spotfit.model.cadence import Endings, Market, Odds
from spotfit.model.events import Blame, RankFailure
from spotfit.model.holding import Part, State
from spotfit.model.view import View
from spotfit.model.wire import (
    Committed,
    Copied,
    Delivered,
    Ended,
    FromWorker,
    Join,
    Proceed,
    Raised,
    Report,
    Returned,
    Running,
    Stacks,
    Stopped,
    Unable,
    Unwell,
    Up,
)
from spotfit.testing.builders import (
    RUN,
    a_commit,
    a_member,
    a_notice,
    a_round,
    a_spec,
    a_view,
    an_agent,
)
from spotfit.testing.clock import ManualClock
from tests.unit.agent.world import FakeCrew, FakeNet, FakeWorkplace, MoodyStore, Wire, signed
from tests.unit.control.paper import LAUNCH

HUB = a_member(0).hub
WIDE = [a_member(0, slots=2), a_member(1, slots=2)]
OPEN = a_view(round=a_round(3, members=WIDE))
CLOSED = a_view(last_round=a_round(3, members=WIDE))
A_REPORT = Report(0, msgspec.Raw(b"{}"))
_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class Node:
    """a1 with two workers, connected to the hub of a0."""

    def __init__(self) -> None:
        wire = Wire()
        self.hub, self.net = FakeNet(wire, a_member(0)), FakeNet(wire, a_member(1))
        self.net.dial(HUB, Join(RUN, a_member(1), 0))
        self.hub.events()
        self.crew, self.store = FakeCrew(), MoodyStore()
        self.clock = ManualClock(100.0)
        self.shift = Shift(
            me=an_agent(1),
            crew=self.crew,
            net=self.net,
            store=self.store,
            workplace=FakeWorkplace(None),  # type: ignore[arg-type]  # it asks the world nothing
            launch=LAUNCH,
            devices=("cuda:0", "cuda:1"),
            scratch="/scratch",
        )

    def follow(self, view: View, hub: str | None = HUB) -> None:
        self.shift.follow(view, hub)

    def hear(self) -> list[Any]:
        """What the leader is told after a look at the crew."""
        self.clock.wait(1.0)
        self.shift.hear(self.clock.now())
        return self.told()

    def told(self) -> list[Any]:
        return [one.message for one in self.hub.events() if isinstance(one, FromAgent)]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def working(node: Node) -> Node:
    """In round 3, with ranks 2 and 3."""
    node.follow(OPEN)
    return node


def in_up(message: Any) -> list[FromWorker]:
    assert isinstance(message, Up)
    return [_frames.decode(frame) for frame in message.frames]


def test_how_workers_are_is_told_to_the_leader(working: Node) -> None:
    working.crew.miss(3, 601.0)
    working.shift.examine(3, 7)
    told = working.hear()
    assert told[0] == Unwell(3, 3, 601.0)
    assert told[1:] == [Stacks(3, 7, rank, f"at work ({rank})") for rank in (2, 3)]


def test_a_round_that_is_not_ours_is_not_looked_into(working: Node) -> None:
    working.shift.examine(2, 7)
    assert working.hear() == []


def hooked(hooks: bool) -> Node:
    """In round 3 of a run whose backend has hooks, or not; the function of rank 2 has returned."""
    node = Node()
    node.follow(replace(OPEN, spec=a_spec(hooks=hooks)))
    node.crew.say(2, Returned(0))
    node.hear()
    return node


@pytest.mark.parametrize("hooks", [True, False])
def test_who_is_still_to_be_called_after_it_returned_is_missed_when_it_dies(hooks: bool) -> None:
    node = hooked(hooks)
    node.crew.exit(2, "was killed by SIGKILL")
    assert [type(one) for one in node.hear()] == [Ended] * hooks


def test_who_was_told_to_leave_may_end_as_it_likes() -> None:
    node = hooked(True)
    node.shift.pass_down(3, None, Proceed("leave"), OPEN)
    assert node.crew.received[2] == [Proceed("leave")]
    node.crew.exit(2, "was killed by SIGKILL")
    assert node.hear() == []


# --- what the journal orders ---------------------------------------------------------------------


def test_a_round_is_entered_with_everything_its_workers_need(node: Node) -> None:
    spec = a_spec(framework="torch", framework_options={"backend": "gloo"}, log_level="DEBUG")
    commit = a_commit("c1", metrics={"loss": 0.5})
    round_ = a_round(3, members=WIDE, checkpoint="c1")
    node.follow(a_view(spec=spec, round=round_, checkpoints=(commit,)))
    assert node.crew.rounds == [3]
    start = node.crew.workers[3]
    assert (start.rank, start.local_rank, start.node_rank) == (3, 1, 1)
    assert (start.world_size, start.local_world_size) == (4, 2)
    assert (start.checkpoint, start.checkpoint_metrics) == ("c1", {"loss": 0.5})
    assert not start.snapshots, "that is a report of the user's own"
    assert (start.framework, start.framework_options) == ("torch", {"backend": "gloo"})
    assert (start.devices, start.scratch, start.secret) == (
        ("cuda:0", "cuda:1"),
        "/scratch",
        "secret",
    )
    assert msgspec.json.decode(bytes(start.spec)) == msgspec.json.decode(encode(spec))


def test_workers_are_told_whether_any_checkpoint_is_a_snapshot(node: Node) -> None:
    commits = (a_commit("c1", snapshot=True), a_commit("c2"))
    node.follow(a_view(round=a_round(3, members=WIDE, checkpoint="c2"), checkpoints=commits))
    assert node.crew.workers[3].snapshots


def test_workers_are_told_what_their_group_has_to_expect(node: Node) -> None:
    market = Market(life_s=7200.0, notice_s=30.0)
    endings = Endings().with_end(600.0, saved=True)
    spec, round_ = a_spec(market=market), a_round(3, members=WIDE)
    node.follow(a_view(spec=spec, round=round_, endings=endings, group_age_s=50.0))
    assert node.crew.workers[3].odds == Odds(market, 2, endings, 50.0)


def test_what_lies_in_memory_is_told_with_the_last_worker_and_the_next_round_begins_with_it(
    working: Node,
) -> None:
    state = State(3, 9)
    working.crew.held = (Part(state, 2, 4),)
    working.crew.halt()
    assert working.hear() == [Stopped(3, held=working.crew.held)]
    assert working.shift.held == working.crew.held, "and to whoever leads next"
    both = [replace(one, vault=f"{one.host}:9") for one in WIDE]
    holders = ((an_agent(0),), (an_agent(1),))
    working.follow(a_view(round=a_round(4, members=both, memory=state, holders=holders)))
    start = working.crew.workers[3]
    assert (start.memory, start.elsewhere) == (state, ("10.0.0.0:9", ""))
    assert start.copies_to == "10.0.0.0:9", "the next of the ring keeps copies"


def test_copies_go_to_another_when_their_keeper_is_about_to_leave(node: Node) -> None:
    three = [replace(a_member(n), vault=f"v{n}:9") for n in (1, 0, 2)]
    round_ = a_round(4, members=three)
    node.follow(a_view(round=round_))
    (start,) = node.crew.workers.values()
    assert (start.copies_to, node.crew.copies_to) == ("v0:9", [])
    leaving = {an_agent(0): a_notice()}
    node.follow(a_view(round=round_, notices=leaving))
    node.follow(a_view(round=round_, notices=leaving))
    assert node.crew.copies_to == ["v2:9"], "once"
    node.follow(a_view(round=round_, notices={**leaving, an_agent(2): a_notice()}))
    assert node.crew.copies_to == ["v2:9", ""]


def test_a_copy_that_is_kept_is_told_to_the_leader(working: Node) -> None:
    working.crew.keeps_a_copy(2, 9, "10.0.0.0:9")
    assert working.hear() == [Copied(3, 2, 9, "10.0.0.0:9")]


def test_a_round_is_entered_once(working: Node) -> None:
    working.follow(OPEN)
    for rank in (2, 3):
        working.crew.exit(rank)
    working.hear()
    working.follow(OPEN)
    assert working.crew.rounds == [3]


@pytest.mark.parametrize(
    ("view", "hub"),
    [
        (CLOSED, HUB),
        (a_view(round=a_round(3, members=[a_member(0), a_member(2)])), HUB),
        (OPEN, None),
        (OPEN, "10.9.9.9:7000"),
        (replace(OPEN, leader=None), HUB),
    ],
    ids=["none is open", "no place in it", "not connected", "another hub", "nobody leads"],
)
def test_when_no_round_is_entered(node: Node, view: View, hub: str | None) -> None:
    node.follow(view, hub)
    assert node.crew.rounds == []


def test_what_the_journal_closed_is_ended(working: Node) -> None:
    working.follow(CLOSED)
    assert not working.shift.busy
    assert working.hear() == [Stopped(3)]


def test_the_next_round_waits_for_the_workers_of_the_last(working: Node) -> None:
    working.crew.immortal = True
    following = a_view(round=a_round(4, members=WIDE))
    working.follow(following)
    assert working.crew.rounds == [3]
    working.crew.immortal = False
    working.follow(following)
    assert working.hear() == [Stopped(3)]
    working.follow(following)
    assert working.crew.rounds == [3, 4]


# --- what outlives the workers -------------------------------------------------------------------


def test_who_still_uploads_says_so_and_says_when_it_is_done(working: Node) -> None:
    working.crew.carrying = 3
    working.follow(CLOSED)
    told = [working.hear(), working.shift.carrying, working.hear()]
    assert told == [[Stopped(3, carrying=True)], 3, []]
    working.crew.carrying = None
    told = [working.hear(), working.shift.carrying, working.hear()]
    assert told == [[Delivered(3)], None, []]


def test_nothing_is_uploaded_for_a_round_that_the_next_has_replaced(working: Node) -> None:
    without_us = a_view(round=a_round(4, members=[a_member(0), a_member(2)]))
    working.crew.carrying = 3
    seen = []
    for view in (OPEN, CLOSED, without_us):
        working.follow(view)
        seen.append(working.crew.carrying)
    assert seen == [3, 3, None]


# --- what the leader orders ----------------------------------------------------------------------


def test_a_halt_ends_the_round_before_the_journal_says_so(working: Node) -> None:
    working.shift.halt(3)
    assert working.hear() == [Stopped(3)], "how they ended is our own doing"


def test_a_halt_that_comes_after_the_last_worker_is_gone_does_not_hide_what_memory_holds(
    working: Node,
) -> None:
    working.crew.held = (Part(State(3, 9), 2, 4),)
    working.crew.halt()
    first = working.hear()
    working.shift.halt(3)
    assert working.told() == first == [Stopped(3, held=working.crew.held)]


def test_a_round_halted_before_it_was_entered_never_is(node: Node) -> None:
    node.shift.halt(3)
    assert node.told() == [Stopped(3)]
    node.follow(OPEN)
    assert node.crew.rounds == []


def test_words_go_down_to_one_or_to_all_and_only_in_their_round(working: Node) -> None:
    word = Committed("c1", {})
    working.shift.pass_down(3, 2, word, OPEN)
    assert working.crew.received == {2: [word], 3: []}
    working.shift.pass_down(3, None, word, OPEN)
    assert working.crew.received == {2: [word, word], 3: [word]}
    working.shift.pass_down(2, None, word, OPEN)
    working.shift.pass_down(3, 0, word, OPEN)
    assert working.crew.received == {2: [word, word], 3: [word]}


# --- what the workers say ------------------------------------------------------------------------


def test_words_are_passed_on_as_they_are(working: Node) -> None:
    working.crew.say(2, Running(), A_REPORT)
    (up,) = working.hear()
    assert (up.round, up.rank) == (3, 2)
    assert in_up(up) == [Running(), A_REPORT]


def test_an_exception_is_told_and_kept(working: Node) -> None:
    working.crew.say(2, A_REPORT, Raised("Traceback", b"pickle"))
    working.crew.exit(2, "exited with code 1")
    told = working.hear()
    assert RankFailure(2, "raised", "Traceback", keys.failure(3, 2)) in [
        one.failure for one in told if isinstance(one, Ended)
    ]
    assert len([one for one in told if isinstance(one, Ended)]) == 1, "told once"
    assert [in_up(one) for one in told if isinstance(one, Up)] == [[A_REPORT]]
    assert working.store.get(keys.failure(3, 2)) == signed(keys.failure(3, 2), b"pickle")


def test_an_exception_that_could_not_be_pickled_has_no_key(working: Node) -> None:
    working.crew.say(2, Raised("Traceback"))
    assert working.hear() == [Ended(3, 2, RankFailure(2, "raised", "Traceback"))]


def test_why_a_worker_could_not_be_prepared_is_passed_on_with_the_blame(working: Node) -> None:
    working.crew.say(
        2,
        Raised("no room", b"", Blame.PLATFORM),
    )
    working.crew.say(3, Raised("no such package", b"", Blame.WORKER, final=True))
    assert [one.failure for one in working.hear()] == [
        RankFailure(2, "raised", "no room", blame=Blame.PLATFORM),
        RankFailure(3, "raised", "no such package", blame=Blame.WORKER, final=True),
    ]


def test_that_nothing_can_be_started_here_is_kept_then_told(node: Node) -> None:
    node.crew.spoil(Raised("no such package", b"pickle", Blame.WORKER, final=True))
    node.store.moody = lambda: True
    assert (node.hear(), node.shift.unable) == ([], None)
    node.store.moody = lambda: False
    key = keys.machine_failure(an_agent(1))
    failure = RankFailure(0, "raised", "no such package", key, Blame.WORKER, final=True)
    assert node.hear() == [Unable(failure)]
    assert node.shift.unable == failure, "whoever leads next is told when we join"
    assert node.store.get(key) == signed(key, b"pickle")


def test_what_rank_0_returns_is_kept_before_anybody_hears_of_it() -> None:
    node = Node()
    node.follow(a_view(round=a_round(3, members=[a_member(1), a_member(0)])))
    node.crew.say(0, A_REPORT, Returned(1, b"result"))
    node.crew.exit(0, clean=True)
    node.store.moody = lambda: True
    (up,) = node.hear()
    assert in_up(up) == [A_REPORT]
    assert node.hear() == []
    node.store.moody = lambda: False
    up, stopped = node.hear()
    assert in_up(up) == [Returned(1)], "the value itself takes no wire"
    assert stopped == Stopped(3)
    assert node.store.get(keys.result(3, 0)) == signed(keys.result(3, 0), b"result")


def test_what_other_ranks_return_is_not_kept(working: Node) -> None:
    working.crew.say(2, Returned(0, b"mine"))
    (up,) = working.hear()
    assert in_up(up) == [Returned(0)]
    assert list(working.store.list()) == []


@pytest.mark.parametrize(
    ("how", "clean", "told"),
    [
        ("was killed by SIGSEGV", False, "The worker of rank 2 was killed by SIGSEGV."),
        (
            "exited with code 0",
            True,
            "The worker of rank 2 exited with code 0 before its function had returned.",
        ),
    ],
)
def test_a_worker_that_ends_without_a_word_has_died(
    working: Node, how: str, clean: bool, told: str
) -> None:
    working.crew.exit(2, how, clean=clean)
    assert working.hear() == [Ended(3, 2, RankFailure(2, "died", told))]


def test_a_worker_that_had_returned_may_end_as_it_likes(working: Node) -> None:
    working.crew.say(2, Returned(0))
    working.crew.exit(2, "was killed by SIGSEGV")
    (up,) = working.hear()
    assert in_up(up) == [Returned(0)]


def test_what_dies_of_our_hand_has_not_failed(working: Node) -> None:
    working.shift.stop()
    assert working.hear() == [Stopped(3)]


def test_a_worker_that_fell_just_before_we_struck_has_failed(working: Node) -> None:
    working.crew.exit(2, "was killed by SIGSEGV")
    working.shift.stop()
    ended, stopped = working.hear()
    assert ended.failure.told == "The worker of rank 2 was killed by SIGSEGV."
    assert stopped == Stopped(3)


def test_stopped_is_told_when_the_last_is_gone(working: Node) -> None:
    working.crew.say(2, Returned(0))
    working.crew.exit(2, clean=True)
    working.crew.say(3, Returned(0))
    assert Stopped(3) not in working.hear()
    working.crew.exit(3, clean=True)
    assert working.hear() == [Stopped(3)]
    assert working.hear() == []
