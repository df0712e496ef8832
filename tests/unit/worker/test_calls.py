"""Calls of a backend's hooks: made while a stage is waited for, or beside the function."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfit.core.errors import ShippingError
from spotfit.host.clocks import SystemClock
from spotfit.model.wire import Call, Outcome, Present, Proceed, ToWorker
from spotfit.ship.function import unpickled
from spotfit.worker import calls as room
from spotfit.worker import talk
from spotfit.worker.calls import Calls, outcome_of, packed
from spotfit.worker.inbox import Inbox
from tests.unit.worker.agent_end import AgentEnd


@pytest.fixture
def agent() -> Iterator[AgentEnd]:
    with contextlib.closing(AgentEnd()) as agent:
        yield agent


def a_call(number: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    return Call(number, packed((fn, args, kwargs), what="call"))


def some_calls(agent: AgentEnd, *, hooks: bool = True) -> Calls:
    made: list[Calls] = []

    def take(frame: ToWorker) -> None:
        assert isinstance(frame, Call | Proceed)
        made[0].take(frame)

    made.append(Calls(agent.talk, Inbox(agent.talk, take, SystemClock()), hooks=hooks))
    return made[0]


def values(outcomes: list[Outcome]) -> list[Any]:
    return [unpickled(one.value, what="answer") for one in outcomes]


# --- one call ------------------------------------------------------------------------------------


def test_a_call_is_answered_with_what_it_returns() -> None:
    outcome = outcome_of(a_call(7, lambda a, b=0: a + b, 3, b=4))
    assert (outcome.call, outcome.raised) == (7, None)
    assert values([outcome]) == [7]


@pytest.mark.parametrize(
    ("fn", "kind"),
    [(lambda: os.environ["NO_SUCH"], KeyError), (lambda: sys.exit(3), SystemExit)],
    ids=["an exception", "an exit"],
)
def test_what_it_raises_is_an_answer_too(fn: Callable[[], Any], kind: type[BaseException]) -> None:
    outcome = outcome_of(a_call(1, fn))
    assert outcome.raised is not None
    assert kind.__name__ in outcome.raised
    assert isinstance(unpickled(outcome.value, what="answer"), kind)


def test_what_cannot_travel_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    unpicklable = outcome_of(a_call(1, threading.Lock))
    assert unpicklable.raised is not None
    assert "lock" in unpicklable.raised
    big = a_call(1, lambda: "x" * 2000)
    monkeypatch.setattr(room, "LARGEST_BYTES", 1000)
    too_big = outcome_of(big)
    assert too_big.raised is not None
    assert "The answer takes 2.0 KiB" in too_big.raised


def test_what_cannot_travel_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LARGEST_BYTES", 1000)
    with pytest.raises(ShippingError, match="The call takes"):
        packed((print, ("x" * 2000,), {}), what="call")


def test_a_call_that_cannot_be_loaded_is_told() -> None:
    outcome = outcome_of(Call(1, b"not a pickle"))
    assert outcome.raised is not None
    assert "call of a backend's hook could not be loaded" in outcome.raised


# --- stages --------------------------------------------------------------------------------------


def test_without_hooks_nothing_is_waited_for(agent: AgentEnd) -> None:
    calls = some_calls(agent, hooks=False)
    calls.wait_to("form")
    calls.serve()
    calls.wait_to("leave")
    assert agent.heard() == []


def test_while_a_stage_is_waited_for_calls_are_made_in_order(agent: AgentEnd) -> None:
    calls = some_calls(agent)
    agent.say(a_call(0, lambda: "first"), a_call(1, lambda: "second"), Proceed("form"))
    calls.wait_to("form")
    present, *outcomes = agent.heard()
    assert present == Present("form")
    assert values([one for one in outcomes if isinstance(one, Outcome)]) == ["first", "second"]


def test_a_stage_that_was_allowed_is_not_waited_for_again(agent: AgentEnd) -> None:
    calls = some_calls(agent)
    agent.say(Proceed("form"), Proceed("train"))
    calls.wait_to("form")
    calls.wait_to("train")
    assert agent.heard() == [Present("form"), Present("train")]


def test_beside_the_function_calls_are_made_by_a_thread_of_their_own(
    agent: AgentEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = threading.Event()

    def stay() -> None:
        alone.set()
        threading.Event().wait()

    monkeypatch.setattr(talk, "_end", stay)  # or it would end this very process
    calls = some_calls(agent)
    calls.serve()
    agent.say(a_call(0, lambda: threading.current_thread().name), Proceed("leave"))
    calls.wait_to("leave")
    outcomes: list[Outcome] = []
    while not outcomes:
        outcomes = agent.heard_of(Outcome)
    assert values(outcomes) == ["spotfit-calls"]
    agent.close()
    assert alone.wait(30.0)
