"""HookCallExecutor: executes calls at gates and during training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfit.code.function_pickle import unpickle
from spotfit.core.errors import ShippingError
from spotfit.host.system import SystemClock
from spotfit.protocol.worker_agent import AtGate, CallFunction, CallResult, OpenGate, ToWorker
from spotfit.worker import agent_connection
from spotfit.worker.agent_connection import HookCallExecutor, Inbox, execute_call, pickle_payload
from tests.unit.worker.agent_end import FakeAgentConnection


@pytest.fixture
def agent() -> Iterator[FakeAgentConnection]:
    with contextlib.closing(FakeAgentConnection()) as agent:
        yield agent


def make_call(number: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CallFunction:
    return CallFunction(
        call_id=number, pickled_call=pickle_payload((fn, args, kwargs), what="call")
    )


def make_executor(agent: FakeAgentConnection, *, hooks: bool = True) -> HookCallExecutor:
    executors: list[HookCallExecutor] = []

    def deliver(frame: ToWorker) -> None:
        assert isinstance(frame, CallFunction | OpenGate)
        executors[0].on_message(frame)

    executors.append(
        HookCallExecutor(
            agent.connection, Inbox(agent.connection, deliver, SystemClock()), has_hooks=hooks
        )
    )
    return executors[0]


def values(results: list[CallResult]) -> list[Any]:
    return [unpickle(one.pickled_value, description="result") for one in results]


# --- a single call -------------------------------------------------------------------------------


def test_a_call_returns_the_value_of_the_function() -> None:
    result = execute_call(make_call(7, lambda a, b=0: a + b, 3, b=4))
    assert (result.call_id, result.traceback_text) == (7, None)
    assert values([result]) == [7]


@pytest.mark.parametrize(
    ("fn", "kind"),
    [(lambda: os.environ["NO_SUCH"], KeyError), (lambda: sys.exit(3), SystemExit)],
    ids=["an exception", "an exit"],
)
def test_a_call_returns_the_exception_of_the_function(
    fn: Callable[[], Any], kind: type[BaseException]
) -> None:
    result = execute_call(make_call(1, fn))
    assert result.traceback_text is not None
    assert kind.__name__ in result.traceback_text
    assert isinstance(unpickle(result.pickled_value, description="result"), kind)


def test_a_result_that_cannot_be_sent_is_reported_as_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpicklable = execute_call(make_call(1, threading.Lock))
    assert unpicklable.traceback_text is not None
    assert "lock" in unpicklable.traceback_text
    big = make_call(1, lambda: "x" * 2000)
    monkeypatch.setattr(agent_connection, "MAX_PAYLOAD_BYTES", 1000)
    too_big = execute_call(big)
    assert too_big.traceback_text is not None
    assert "The pickled result of a worker call has 2.0 KiB" in too_big.traceback_text


def test_a_call_that_is_too_large_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_connection, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(ShippingError, match="The pickled call of a worker call has"):
        pickle_payload((print, ("x" * 2000,), {}), what="call")


def test_a_call_that_cannot_be_unpickled_is_reported_as_an_error() -> None:
    result = execute_call(CallFunction(call_id=1, pickled_call=b"not a pickle"))
    assert result.traceback_text is not None
    assert "worker call of a backend hook could not be loaded" in result.traceback_text


# --- gates ---------------------------------------------------------------------------------------


def test_without_hooks_no_gate_is_waited_for(agent: FakeAgentConnection) -> None:
    calls = make_executor(agent, hooks=False)
    calls.wait_for_phase("setup")
    calls.serve_in_background()
    calls.wait_for_phase("leave")
    assert agent.receive() == []


def test_calls_are_executed_in_order_while_waiting_at_a_gate(agent: FakeAgentConnection) -> None:
    calls = make_executor(agent)
    agent.send(
        make_call(0, lambda: "first"), make_call(1, lambda: "second"), OpenGate(phase="setup")
    )
    calls.wait_for_phase("setup")
    present, *results = agent.receive()
    assert present == AtGate(phase="setup")
    assert values([one for one in results if isinstance(one, CallResult)]) == ["first", "second"]


def test_a_gate_that_is_open_is_not_waited_for(agent: FakeAgentConnection) -> None:
    calls = make_executor(agent)
    agent.send(OpenGate(phase="setup"), OpenGate(phase="train"))
    calls.wait_for_phase("setup")
    calls.wait_for_phase("train")
    assert agent.receive() == [AtGate(phase="setup"), AtGate(phase="train")]


def test_during_training_calls_are_executed_in_a_background_thread(
    agent: FakeAgentConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_lost = threading.Event()

    def block() -> None:
        agent_lost.set()
        threading.Event().wait()

    monkeypatch.setattr(
        agent_connection, "_exit_with_group", block
    )  # which would exit the test process
    calls = make_executor(agent)
    calls.serve_in_background()
    agent.send(make_call(0, lambda: threading.current_thread().name), OpenGate(phase="leave"))
    calls.wait_for_phase("leave")
    results: list[CallResult] = []
    while not results:
        results = agent.receive_of_type(CallResult)
    assert values(results) == ["spotfit-hook-calls"]
    agent.close()
    assert agent_lost.wait(30.0)
