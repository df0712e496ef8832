"""The conductor: intent first, then the act, then its outcome; and asking twice is asking once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.control.conductor import Conductor
from spotfit.control.errands import Inline
from spotfit.control.scribe import Scribe
from spotfit.core.errors import QuotaError
from spotfit.core.ids import Token
from spotfit.ledger.run import Ledger
from spotfit.model.events import (
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    Released,
    Submitted,
    ValidationAsked,
)
from spotfit.model.group import GroupHandle, GroupStatus, NodeState, NodeStatus
from spotfit.model.spec import ValidationSpec
from spotfit.model.watch import Watch
from spotfit.policy.actions import Wait
from spotfit.provision.api import Refusal, Traits
from spotfit.store.api import Store
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, TOKEN, a_commit, a_request, a_spec, a_watch, an_agent
from tests.unit.control.paper import LAUNCH, PaperCloud, Slow, tokens

NOBODY = Watch(me=an_agent(0))


class Desk:
    """A leader's desk: its ledger, its cloud, its conductor, and what was written, in order."""

    def __init__(self, *, errands: Any = None, store: Store | None = None, **spec: Any) -> None:
        self.cloud = PaperCloud()
        self.events: list[Event] = []
        self.ledger = Ledger(store or MemoryStore(), RUN, an_agent(0))
        self.ledger.listen(lambda _slot, _body, entry: self.events.append(entry.event))
        self.errands = errands or Inline()
        if store is None:
            self.write(FitStarted(a_spec(**spec)), LeaderElected(an_agent(0), 1, None))
        else:
            self.ledger.catch_up()
        self.scribe = Scribe(self.ledger, Inline())
        self.scribe.go_on(0.0)
        self.conductor = Conductor(self.scribe, self.cloud, LAUNCH, self.errands, tokens())

    def write(self, *events: Event) -> None:
        for event in events:
            self.ledger.append(event, after=self.ledger.view)

    def steps(self, now: float = 0.0, watch: Watch = NOBODY) -> Wait:
        """As long as something changes."""
        again, wait = True, Wait(0, "")
        while again:
            again, wait = self.conductor.step(self.seeing(watch), now)
        return wait

    def seeing(self, watch: Watch) -> Watch:
        return replace(
            watch,
            statuses=self.conductor.statuses,
            refused_at=self.conductor.refused_at,
            validator_refused_at=self.conductor.validator_refused_at,
        )

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events[2:]]


def test_an_order_is_written_down_asked_for_and_its_outcome_written_down() -> None:
    desk = Desk()
    desk.steps()
    assert desk.kinds == ["Intended", "Submitted"]
    assert (desk.cloud.submits, desk.cloud.launches) == ([TOKEN], [LAUNCH])
    group = desk.ledger.view.groups[TOKEN]
    assert (group.plan.nodes, group.plan.body) == (2, {"run": LAUNCH.run_url})
    assert LAUNCH.secret.encode() not in b"".join(
        desk.ledger.store.get(found.key) for found in desk.ledger.store.list()
    )


def test_a_machine_for_validations_is_one_of_its_own_kind() -> None:
    desk = Desk(validation=ValidationSpec(resources={"GPU": 1.0}))
    asked = a_request(Token("t-w"))
    desk.write(
        Intended(asked, desk.cloud.plan(asked)),
        Submitted(asked.token, GroupHandle(asked.token, "local", "g")),
        a_commit("c1", validation=ValidationAsked()),
    )
    desk.cloud.answers = [Refusal("full")]
    desk.steps(7.0, a_watch(seats={}))
    (request,) = [one.request for one in desk.events[5:] if isinstance(one, Intended)]
    assert (request.role, request.workers, request.of) == ("validate", 1, 1)
    assert request.resources_per_worker == {"GPU": 1.0}
    assert (desk.conductor.validator_refused_at, desk.conductor.refused_at) == (7.0, None)


def test_who_died_after_the_intent_is_finished_by_a_successor_with_the_same_token() -> None:
    first = Desk(errands=Slow())  # they never end
    first.steps()
    assert first.kinds == ["Intended"]
    second = Desk(store=first.ledger.store)
    second.steps()
    assert second.kinds == ["Intended", "Submitted"]
    assert second.cloud.submits == [TOKEN]


def test_a_refusal_is_an_outcome_and_the_next_try_has_a_new_token() -> None:
    desk = Desk()
    desk.cloud.answers = [Refusal("no capacity")]
    wait = desk.steps(now=100.0)
    assert desk.kinds == ["Intended", "Refused"]
    assert wait.until == 101.0, "after one refusal it waits a second"
    desk.steps(now=101.0)
    assert desk.kinds[2:] == ["Intended", "Submitted"]
    assert desk.cloud.submits == [TOKEN, Token("t-2")]


@pytest.mark.parametrize("answer", [Refusal("not your region", final=True), QuotaError("0 of 0")])
def test_where_waiting_is_pointless_the_run_ends(answer: Any) -> None:
    desk = Desk()
    desk.cloud.answers = [answer]
    desk.steps()
    assert desk.kinds == ["Intended", "Refused", "FitEnded"]
    ended = desk.ledger.view.ended
    assert ended is not None
    assert ended.outcome == "failed"
    assert ended.why in ("not your region", "0 of 0")


def test_whether_the_cloud_heard_us_is_found_out_with_the_same_token() -> None:
    desk = Desk()
    desk.cloud.answers = [ConnectionError("reset"), ConnectionError("reset")]
    wait = desk.steps(now=0.0)
    assert desk.kinds == ["Intended"], "nothing is known, so nothing is written"
    assert wait.until == pytest.approx(0.2)
    desk.steps(now=0.1)
    assert desk.cloud.submits == [TOKEN], "looking again does not mean asking again"
    wait = desk.steps(now=0.2)
    assert wait.until == pytest.approx(0.6), "ever more rarely"
    desk.steps(now=wait.until)
    assert desk.kinds == ["Intended", "Submitted"]
    assert desk.cloud.submits == [TOKEN] * 3


def test_a_cloud_that_never_answers_is_asked_with_one_token_and_ever_longer_pauses() -> None:
    """Giving up would leave machines behind that it may have granted."""
    desk = Desk()
    desk.cloud.answers = [ConnectionError("reset")] * 99
    now = 0.0
    while now < 300:
        now = max(now + 0.1, desk.steps(now).until)
    assert desk.kinds == ["Intended"]
    assert set(desk.cloud.submits) == {TOKEN}
    assert 10 < len(desk.cloud.submits) < 25


def test_a_slow_cloud_is_asked_once_and_its_answer_taken_when_it_comes() -> None:
    slow = Slow()
    desk = Desk(errands=slow)
    for now in (0.0, 0.1, 0.2):
        wait = desk.steps(now)
        assert wait.why == "asking for 2 machines"
    assert desk.kinds == ["Intended"]
    slow.finish()
    desk.steps(0.3)
    assert desk.kinds == ["Intended", "Submitted"]
    assert desk.cloud.submits == [TOKEN]


def test_a_group_is_let_go_and_that_written_down() -> None:
    desk = Desk()
    desk.steps()
    desk.write(FitEnded("finished"))
    caretaker = Watch(me=an_agent(0), caretaker=True)
    desk.steps(watch=caretaker)
    assert desk.kinds[-1] == "Released"
    assert desk.cloud.cancelled == [TOKEN]
    assert desk.conductor.resting


def test_what_cannot_be_let_go_is_tried_again() -> None:
    desk = Desk()
    desk.steps()
    desk.write(FitEnded("finished"))
    desk.cloud.broken = ConnectionError("reset")
    caretaker = Watch(me=an_agent(0), caretaker=True)
    wait = desk.steps(now=5.0, watch=caretaker)
    assert (wait.until, desk.conductor.resting) == (7.0, False)
    assert wait.why == "cannot let t-1 go yet: ConnectionError: reset"
    desk.cloud.broken = None
    desk.steps(now=7.0, watch=caretaker)
    assert desk.ledger.view.groups[TOKEN].released


# --- looking -------------------------------------------------------------------------------------


def two_groups(errands: Any) -> Desk:
    """A desk with two groups granted."""
    desk = Desk(errands=errands)
    for n in (1, 2):
        request = a_request(Token(f"t-{n}"), 1)
        plan = desk.cloud.plan(request)
        handle = desk.cloud.submit(plan, LAUNCH)
        assert isinstance(handle, GroupHandle)
        desk.write(Intended(request, plan), Submitted(request.token, handle))
    return desk


def test_groups_are_looked_at_as_often_as_is_worth_its_while() -> None:
    desk = two_groups(Inline())
    for now in (0.0, 1.0, 9.9, 10.0):
        desk.conductor.observe(now, every_s=10.0)
    assert desk.cloud.observed == [Token("t-1"), Token("t-2")] * 2
    assert desk.conductor.statuses[TOKEN].nodes[0].state is NodeState.RUNNING


def test_when_something_happened_it_looks_at_once() -> None:
    desk = two_groups(Inline())
    desk.conductor.observe(0.0, every_s=10.0)
    desk.cloud.lose(TOKEN, 0)
    desk.conductor.observe_soon()
    desk.conductor.observe(0.1, every_s=10.0)
    assert desk.conductor.statuses[TOKEN].nodes[0].reason == "reclaimed"


def test_slow_answers_of_several_groups_do_not_chase_each_other() -> None:
    slow = Slow()
    desk = two_groups(slow)
    desk.conductor.observe(0.0, every_s=10.0)
    slow.finish("observe t-1")
    desk.conductor.observe(0.1, every_s=10.0)
    slow.finish("observe t-2")
    for now in (0.2, 0.3, 5.0):
        desk.conductor.observe(now, every_s=10.0)
    assert desk.cloud.observed == [Token("t-1"), Token("t-2")], "each once"
    assert desk.conductor.statuses.keys() == {Token("t-1"), Token("t-2")}


def test_a_status_is_as_old_as_the_backend_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    desk = two_groups(slow)
    monkeypatch.setattr(desk.cloud, "traits", Traits(told_late_s=3.0))
    desk.conductor.observe(10.0, every_s=10.0)
    slow.finish()
    desk.conductor.observe_soon()  # what is under way was asked before
    desk.conductor.observe(12.0, every_s=10.0)
    assert desk.conductor.seen == {Token("t-1"): 7.0, Token("t-2"): 7.0}
    desk.conductor.observe(12.5, every_s=10.0)
    slow.finish()
    desk.conductor.observe(13.0, every_s=10.0)
    assert desk.conductor.seen == {Token("t-1"): 9.5, Token("t-2"): 9.5}


def test_a_look_that_failed_says_nothing() -> None:
    desk = two_groups(Inline())
    desk.conductor.observe(0.0, every_s=10.0)
    before = desk.conductor.statuses
    desk.cloud.broken = ConnectionError("reset")
    desk.conductor.observe(10.0, every_s=10.0)
    assert desk.conductor.statuses is before


def test_why_a_group_waits_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = two_groups(Inline())
    waits = (NodeStatus(NodeState.WAITING),)
    for now, why in enumerate(["", "no room", "no room", "", "a quota", "a quota"]):
        status = GroupStatus(waits, why)
        monkeypatch.setattr(desk.cloud, "observe", lambda _, told=status: told)
        desk.conductor.observe(10.0 * now, every_s=5.0)
    told = [line for line in capsys.readouterr().err.splitlines() if "group.waits" in line]
    assert [("no room" in line, "a quota" in line) for line in told] == (
        [(True, False)] * 2 + [(False, True)] * 2
    ), "of each of two groups"


def test_what_was_let_go_is_not_looked_at() -> None:
    desk = two_groups(Inline())
    desk.write(Released(TOKEN))
    desk.conductor.observe(0.0, every_s=10.0)
    assert desk.cloud.observed == [Token("t-2")]


def test_nobody_is_seen_only_when_the_backend_says_so_of_every_group() -> None:
    desk = two_groups(Inline())
    seen = [desk.conductor.sees_nobody]
    for token in (Token("t-1"), Token("t-2")):
        desk.cloud.lose(token, 0)
        desk.conductor.observe_soon()
        desk.conductor.observe(0.0, every_s=10.0)
        seen.append(desk.conductor.sees_nobody)
    request = a_request(Token("t-3"), 1)
    desk.write(Intended(request, desk.cloud.plan(request)))
    seen.append(desk.conductor.sees_nobody)
    assert seen == [False, False, True, False], "before a look, one left, none, one asked for"


def test_when_a_group_was_first_seen_to_run_is_remembered() -> None:
    desk = two_groups(Inline())
    for now in (5.0, 50.0):
        desk.conductor.observe(now, every_s=10.0)
    assert desk.conductor.granted == {Token("t-1"): 5.0, Token("t-2"): 5.0}


def test_a_decision_that_lost_its_slot_is_judged_afresh() -> None:
    desk = Desk()
    rival = desk.ledger.another()
    rival.append(LeaderElected(an_agent(1), 2, "h:1"), after=rival.catch_up())
    again, _ = desk.conductor.step(a_watch(seats={}), 0.0)
    assert again
    assert desk.kinds == ["LeaderElected"], "no intent of a deposed leader is written"
    assert desk.cloud.submits == []
