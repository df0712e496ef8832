"""Validations: one at a time, in order, on a machine of their own where one is to be had."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    CheckpointDropped,
    FitEnded,
    LeaderElected,
    NodeLost,
    RankFailure,
    TrainingEnded,
    ValidationAsked,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import NodeState
from spotfit.model.spec import Keep, Tempo, ValidationSpec
from spotfit.model.view import View
from spotfit.model.watch import Seat, Watch
from spotfit.model.wire import Assessed
from spotfit.policy.actions import Action, Order, Release, Wait, Write
from spotfit.policy.conduct import conduct
from spotfit.testing.builders import (
    TOKEN,
    a_commit,
    a_group,
    a_member,
    a_notice,
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
OWN = Token("t-v")
V = AgentId("v")
TEMPO = Tempo(validator_patience_s=300.0, validator_idle_s=60.0)
C1 = a_commit("c1", validation=ValidationAsked())
C2 = a_commit("c2", report=1, validation=ValidationAsked())
MACHINE = a_group(token=OWN, nodes=1, role="validate")
BOTH = {TOKEN: a_group(), OWN: MACHINE}
ENDED = FitEnded("finished", metrics={"loss": 1.0}, result_key="r")


def a_run(own_machine: bool | None = None, **given: Any) -> View:
    """A round is open, and two checkpoints are to be validated."""
    spec = a_spec(validation=ValidationSpec(own_machine), tempo=TEMPO)
    usual = {"spec": spec, "checkpoints": (C1, C2), "unvalidated": (C1, C2), "round": a_round()}
    return a_view(**{**usual, **given})


def after_training(own_machine: bool | None = None, **given: Any) -> View:
    view = a_run(own_machine, **given)
    return replace(view, round=None, training_ended=ENDED)


def begun(agent: AgentId = V, token: Token = OWN, attempt: int = 1) -> ValidationBegun:
    return ValidationBegun("c1", C1.mark, attempt, agent, token, 0)


def validator(**given: Any) -> Seat:
    return a_seat(9, member=a_member(9, agent=V, token=OWN, node=0), **given)


def at_work(*more: Seat, **given: Any) -> Watch:
    """Both workers' machines are busy, `more` sit beside them; all was as it is for a moment."""
    busy = seats(a_seat(0, running=1), a_seat(1, running=1), *more)
    return a_watch(**{"seats": busy, "validation_at": NOW, "turned_at": NOW, **given})


def done(view: View, watch: Watch, now: float = NOW) -> Action:
    return conduct(view, watch, now)


# --- a machine of its own ------------------------------------------------------------------------


def test_while_something_is_to_be_validated_a_machine_is_asked_for() -> None:
    assert done(a_run(), at_work()) == Order(1, "2 checkpoints are to be validated", "validate")


@pytest.mark.parametrize(
    "view",
    [
        a_run(unvalidated=()),
        a_run(spec=a_spec(tempo=TEMPO)),
        a_run(groups={TOKEN: a_group(), OWN: a_group(token=OWN, nodes=1, role="validate")}),
    ],
    ids=["nothing to validate", "nothing to validate with", "one is on its way"],
)
def test_otherwise_none_is_asked_for(view: View) -> None:
    assert not isinstance(done(view, at_work()), Order)


def test_workers_get_their_machines_first() -> None:
    order = done(a_run(groups={}, round=None), a_watch(seats={}))
    assert order == Order(2, "2 of 2 workers have no machine")
    asked = a_run(groups={TOKEN: a_group(handle=None)}, round=None)
    assert not isinstance(done(asked, a_watch(seats={}, caretaker=True)), Order)


def test_a_machine_for_validations_holds_no_workers() -> None:
    short = a_run(groups={TOKEN: a_group(nodes=1), OWN: MACHINE}, round=None)
    order = done(short, a_watch(seats=seats(a_seat(0), validator()), validation_at=NOW))
    assert order == Order(1, "1 of 2 workers have no machine")


def test_what_is_next_is_begun_where_there_is_a_machine_for_it() -> None:
    action = done(a_run(groups=BOTH), at_work(validator()))
    assert action == Write(ValidationBegun("c1", "1-0", 1, V, OWN, 0, "on a machine of its own"))


def test_one_at_a_time() -> None:
    running = a_run(groups=BOTH, validation=begun(), attempts=1, tries=1)
    assert isinstance(done(running, at_work(validator())), Wait)


def test_a_machine_that_is_refused_is_done_without() -> None:
    refused = a_run(validator_refusals=1)
    action = done(refused, at_work(validator_refused_at=NOW))
    assert action == Write(ValidationBegun("c1", "1-0", 1, an_agent(0), TOKEN, 0, "beside workers"))


def test_the_market_is_asked_again_ever_more_rarely() -> None:
    running = a_run(validator_refusals=4, validation=begun(an_agent(0), TOKEN), tries=1)
    assert isinstance(done(running, at_work(validator_refused_at=NOW)), Wait)
    assert isinstance(done(running, at_work(validator_refused_at=NOW - 7.9)), Wait)
    assert isinstance(done(running, at_work(validator_refused_at=NOW - 8.0)), Order)


def test_patience_with_a_machine_that_does_not_come_has_an_end() -> None:
    view = a_run(groups=BOTH)
    wait = done(view, at_work())
    assert isinstance(wait, Wait)
    late = done(view, at_work(validation_at=NOW - 300.0))
    assert isinstance(late, Write)
    assert isinstance(late.event, ValidationBegun)
    assert late.event.agent == an_agent(0)


@pytest.mark.parametrize(
    ("own_machine", "refusals", "agent"),
    [(False, 0, an_agent(0)), (True, 5, None)],
    ids=["never", "only"],
)
def test_it_runs_where_it_was_told_to(own_machine: bool, refusals: int, agent: Any) -> None:
    view = a_run(own_machine, validator_refusals=refusals)
    action = done(view, at_work(validator_refused_at=NOW, validation_at=NOW - 1e4))
    found = action.event.agent if isinstance(action, Write) else None  # type: ignore[union-attr]
    assert found == agent


def test_the_leader_goes_before_its_peers_unless_it_leaves() -> None:
    both = seats(a_seat(0, running=1, since=9.0), a_seat(1, running=1))
    action = done(a_run(False), at_work(seats=both))
    assert isinstance(action, Write)
    assert action.event.agent == an_agent(0)  # type: ignore[union-attr]
    leaving = a_run(False, notices={an_agent(0): a_notice()}, noticed_slots={an_agent(0): 3})
    three = {TOKEN: a_group(nodes=3)}
    action = done(replace(leaving, groups=three), at_work(a_seat(2), led_since=NOW))
    assert isinstance(action, Write)
    assert action.event.agent == an_agent(1)  # type: ignore[union-attr]


def test_no_machine_at_all_fails_what_must_have_one() -> None:
    action = done(a_run(True, no_validators="no quota for it"), at_work())
    why = "no machine of its own can be had: no quota for it"
    assert action == Write(ValidationEnded("c1", "1-0", "failed", why=why))


def test_while_no_machine_is_even_asked_for_none_is_waited_for() -> None:
    """An elastic group that does not find all of its workers would wait for ever."""
    spec = a_spec(workers_min=2, workers_max=4, validation=ValidationSpec(), tempo=TEMPO)
    action = done(a_run(spec=spec, refusals=1), at_work(refused_at=NOW))
    assert isinstance(action, Write)
    assert action.event.agent == an_agent(0)  # type: ignore[union-attr]


def test_a_machine_that_cannot_be_made_ready_is_given_up_and_counted() -> None:
    failure = RankFailure(0, "raised", "Traceback\nShippingError: torch is not installed")
    action = done(a_run(groups=BOTH), at_work(validator(unable=failure)))
    why = "it cannot be made ready: ShippingError: torch is not installed"
    assert action == Write(NodeLost(OWN, 0, None, why))


# --- how it goes on ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        (
            Assessed(1, "validated", {"acc": 1}),
            ValidationEnded("c1", "1-0", "validated", {"acc": 1}),
        ),
        (Assessed(1, "failed", why="no"), ValidationEnded("c1", "1-0", "failed", why="no")),
        (Assessed(1, "timeout", why="long"), ValidationEnded("c1", "1-0", "timeout", why="long")),
    ],
    ids=["validated", "failed", "timeout"],
)
def test_what_came_of_it_is_written_down(told: Assessed, ended: ValidationEnded) -> None:
    running = a_run(groups=BOTH, validation=begun(), attempts=1, tries=1)
    assert done(running, at_work(validator(), assessed=told)) == Write(ended)


def test_an_answer_of_an_earlier_attempt_is_not_taken_for_this_one() -> None:
    running = a_run(groups=BOTH, validation=begun(attempt=2), attempts=2, tries=2)
    old = Assessed(1, "failed", why="no")
    assert isinstance(done(running, at_work(validator(), assessed=old)), Wait)


@pytest.mark.parametrize(
    "groups",
    [
        {TOKEN: a_group(), OWN: replace(MACHINE, lost=frozenset({0}), released=True)},
        {TOKEN: a_group(), OWN: replace(MACHINE, released=True)},
        {TOKEN: a_group()},
    ],
    ids=["its agent is lost", "its machine was let go", "and forgotten"],
)
def test_a_validation_whose_machine_is_gone_is_begun_elsewhere(groups: Any) -> None:
    running = a_run(False, groups=groups, validation=begun(), attempts=1)
    action = done(running, at_work())
    assert action == Write(ValidationBegun("c1", "1-0", 2, an_agent(0), TOKEN, 0, "beside workers"))


def test_a_validator_that_is_silent_is_given_up_like_any_machine() -> None:
    running = a_run(groups=BOTH, validation=begun(), attempts=1, tries=1)
    gone = at_work(led_since=NOW - 900.0)
    action = done(running, gone)
    assert isinstance(action, Write)
    assert action.event.agent == V  # type: ignore[union-attr]
    assert isinstance(done(running, at_work(led_since=NOW)), Wait), "it may still dial in"


def test_a_machine_that_comes_back_with_another_agent_has_lost_its_validation() -> None:
    running = a_run(groups=BOTH, validation=begun(), attempts=1, tries=1)
    another = a_seat(9, member=a_member(9, agent=AgentId("w"), token=OWN, node=0))
    action = done(running, at_work(another))
    assert isinstance(action, Write)
    assert isinstance(action.event, NodeLost)
    assert (action.event.agent, action.event.comes_back) == (V, True)
    told = replace(running, lost_agents=frozenset({V}))
    again = ValidationBegun("c1", "1-0", 2, AgentId("w"), OWN, 0, "on a machine of its own")
    assert done(told, at_work(another)) == Write(again)


def test_what_came_to_nothing_is_tried_again_with_a_pause() -> None:
    def after(tries: int, now: float) -> Action:
        running = a_run(groups=BOTH, validation=begun(attempt=tries), attempts=tries, tries=tries)
        unheard = Assessed(tries, "lost", why="the bucket failed")
        return done(running, at_work(validator(), assessed=unheard), now)

    assert isinstance(after(1, NOW), Write), "once at once"
    assert isinstance(after(3, NOW + 7.9), Wait)
    assert isinstance(after(3, NOW + 8.0), Write)
    given_up = after(20, NOW + 1e3)
    assert isinstance(given_up, Write)
    why = "it was begun 20 times, and came to nothing each time"
    assert given_up.event == ValidationEnded("c1", "1-0", "failed", why=why)


def test_a_checkpoint_that_is_to_be_validated_is_not_dropped() -> None:
    latest = a_commit("c3", report=2)
    spec = a_spec(validation=ValidationSpec(False), keep=Keep(last=1))
    view = a_run(spec=spec, checkpoints=(C1, C2, latest), unvalidated=(C2,))
    assert done(view, at_work()) == Write(CheckpointDropped("c1", "only the last 1 stay"))
    pending = a_run(spec=spec, checkpoints=(C2, latest), unvalidated=(C2,))
    action = done(pending, at_work())
    assert not isinstance(action, Write) or not isinstance(action.event, CheckpointDropped)


# --- letting go ----------------------------------------------------------------------------------


def test_a_machine_with_nothing_to_validate_is_kept_for_a_while_and_let_go() -> None:
    idle = a_run(groups=BOTH, unvalidated=())
    wait = done(idle, at_work(validator()))
    assert isinstance(wait, Wait)
    assert done(idle, at_work(validator()), NOW + 60.0) == Release(OWN)


def test_workers_that_find_no_machine_get_that_of_the_validations() -> None:
    lacking = a_run(
        groups={TOKEN: a_group(nodes=1), OWN: MACHINE},
        round=None,
        validation=begun(),
        tries=1,
        refusals=3,
    )
    watch = a_watch(seats=seats(a_seat(0), validator()), refused_at=NOW, validation_at=NOW)
    assert done(lacking, watch) == Release(OWN)
    assert isinstance(done(replace(lacking, refusals=2), watch), Wait)


def test_who_leads_does_not_let_its_own_machine_go() -> None:
    idle = a_run(groups=BOTH, unvalidated=(), round=None)
    alone = a_watch(me=V, seats=seats(validator()), validation_at=0.0)
    assert not isinstance(done(idle, alone), Release)


def test_the_lead_goes_where_the_workers_are() -> None:
    view = a_run(groups=BOTH, round=None, epoch=4)
    action = done(view, a_watch(me=V, seats=seats(validator(), a_seat(1))))
    assert action == Write(
        LeaderElected(an_agent(1), 5, a_member(1).hub, "the workers are elsewhere")
    )


# --- after the training --------------------------------------------------------------------------


def test_the_fit_ends_when_the_last_validation_has() -> None:
    returned = at_work(returned={0, 1}, metrics=ENDED.metrics, result_key="r")
    assert done(a_run(groups=BOTH, validation=begun(), tries=1), returned) == Write(
        TrainingEnded(ENDED)
    )
    assert done(a_run(unvalidated=()), returned) == Write(ENDED)
    assert done(after_training(unvalidated=()), a_watch()) == Write(ENDED)


def test_what_is_left_is_validated_by_the_machines_that_are_there() -> None:
    action = done(after_training(), a_watch(validation_at=NOW, turned_at=NOW))
    assert action == Write(ValidationBegun("c1", "1-0", 1, an_agent(0), TOKEN, 0, "beside workers"))


def test_a_machine_that_is_still_to_come_is_not_waited_for() -> None:
    running = after_training(groups=BOTH, validation=begun(an_agent(0), TOKEN), tries=1)
    assert done(running, a_watch(validation_at=NOW, turned_at=NOW)) == Release(OWN)


def test_the_lead_goes_to_the_machine_that_validates_and_the_others_are_let_go() -> None:
    running = after_training(groups=BOTH, validation=begun(), tries=1, epoch=1)
    both = seats(a_seat(0), validator())
    watch = a_watch(seats=both, validation_at=NOW, turned_at=NOW)
    assert done(running, watch) == Write(
        LeaderElected(V, 2, a_member(9).hub, "only validations are left")
    )
    led = replace(running, leader=LeaderElected(V, 2, a_member(9).hub))
    leaving = done(led, replace(watch, me=V))
    assert isinstance(leaving, Wait)
    assert leaving.why == "machines are leaving by themselves"
    assert done(led, replace(watch, me=V, seats=seats(validator()))) == Release(TOKEN)
    assert done(led, replace(watch, me=V), NOW + 15.0) == Release(TOKEN), "whether they did or not"


def test_the_machine_of_a_validation_stays_until_it_has_ended() -> None:
    other = Token("t-2")
    groups = {TOKEN: a_group(), other: a_group(token=other, nodes=1)}
    at = ValidationBegun("c1", C1.mark, 1, AgentId("b0"), other, 0)
    b0 = a_seat(5, member=a_member(5, agent=AgentId("b0"), token=other, node=0))
    running = after_training(groups=groups, validation=at, tries=1)
    watch = a_watch(seats=seats(a_seat(0), b0), validation_at=NOW, turned_at=NOW - 100.0)
    assert isinstance(done(running, watch), Wait)


def test_without_a_machine_one_is_asked_for_whoever_judges() -> None:
    nobody = after_training(groups={})
    order = Order(1, "2 checkpoints are to be validated", "validate")
    assert done(nobody, a_watch(seats={}, caretaker=True)) == order
    standing = after_training()
    assert isinstance(done(standing, a_watch(seats={}, caretaker=True)), Wait)
    gone = a_status(NodeState.GONE, NodeState.GONE)
    lost = done(standing, a_watch(seats={}, caretaker=True, statuses={TOKEN: gone}))
    assert isinstance(lost, Write), "whoever sees no agent has to know who is gone"


def test_where_no_machine_can_be_had_the_rest_is_left_to_the_next_fit() -> None:
    nobody = after_training(groups={}, no_validators="the account is closed")
    assert done(nobody, a_watch(seats={}, caretaker=True)) == Write(ENDED)


def test_no_round_follows_the_training() -> None:
    gone = replace(a_group(), lost=frozenset({0, 1}), released=True)
    view = after_training(False, groups={TOKEN: gone, OWN: MACHINE}, validation=begun(), tries=1)
    assert isinstance(done(view, at_work(validator(), me=V, seats=seats(validator()))), Wait)
