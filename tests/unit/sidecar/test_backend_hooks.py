"""ProcessBackendHookRunner: hooks run in order, a stuck one is killed, the first error is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotfit.core.errors import IntegrityError
from spotfit.model.leader_state import UserCodeError
from spotfit.protocol.agent_sidecar import CallWorkers, HookFinished, SidecarInit
from spotfit.protocol.worker_agent import CallResult
from spotfit.sidecar.backend_hooks import STUCK_HOOK_TIMEOUT_S, ProcessBackendHookRunner
from spotfit.testing.builders import RUN_ID
from tests.unit.sidecar.fake_process import FakeStarter


class HookRun:
    """A hook runner with fake processes and fake timers."""

    def __init__(self) -> None:
        self.starter = FakeStarter()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        init = SidecarInit(storage_url="memory://x", code_bundle={}, secret="secret", run_id=RUN_ID)
        self.hooks = ProcessBackendHookRunner(init, self.starter.start, self.call_later)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append((delay_s, callback))

    def fire_timers(self) -> None:
        timers, self.timers = self.timers, []
        for _, callback in timers:
            callback()

    def submit_on_start(self, round_number: int) -> None:
        self.hooks.submit("on_start", round_number, 2, {"CPU": 1})

    def received_hooks(self) -> list[str]:
        return [message.get("hook", message["type"]) for message in self.starter.latest.received]


def test_no_process_is_started_without_a_hook() -> None:
    run = HookRun()
    run.hooks.abandon_round(1)
    run.hooks.close()
    assert run.hooks.is_idle
    assert run.starter.processes == []


def test_a_hook_is_done_once_the_process_has_finished_it() -> None:
    run = HookRun()
    run.submit_on_start(1)
    run.hooks.submit("on_training_start", 1, 2, {})
    process = run.starter.latest
    assert run.received_hooks() == ["sidecar_init", "on_start", "on_training_start"]
    assert process.received[1]["resources_per_worker"] == {"CPU": 1}
    process.reply(HookFinished(hook="on_start", round=1))
    assert run.hooks.is_done("on_start", 1)
    assert not run.hooks.is_done("on_training_start", 1)
    assert not run.hooks.is_idle
    process.reply(HookFinished(hook="on_training_start", round=1))
    assert run.hooks.is_idle


def test_worker_calls_are_drained_once_and_results_are_delivered() -> None:
    run = HookRun()
    run.submit_on_start(1)
    call = CallWorkers(round=1, call_id=7, ranks=(0, 1), pickled_call=b"call")
    run.starter.latest.reply(call)
    assert run.hooks.drain_worker_calls() == [call]
    assert run.hooks.drain_worker_calls() == []
    run.hooks.deliver_call_result(
        1, 0, CallResult(call_id=7, pickled_value=b"value", traceback_text="Traceback")
    )
    assert run.starter.latest.received[-1] == {
        "type": "worker_call_result",
        "round": 1,
        "rank": 0,
        "call_id": 7,
        "pickled_value": "dmFsdWU=",
        "traceback_text": "Traceback",
    }


def test_the_first_error_is_kept() -> None:
    run = HookRun()
    run.submit_on_start(1)
    run.starter.latest.reply(
        HookFinished(hook="on_start", round=1, traceback_text="Traceback: first", pickle_key="f/1")
    )
    run.starter.latest.reply(
        HookFinished(hook="on_shutdown", round=1, traceback_text="Traceback: second")
    )
    error = UserCodeError(
        reason="the backend's on_start raised", traceback_text="Traceback: first", pickle_key="f/1"
    )
    assert run.hooks.user_code_error() == error
    assert run.hooks.is_idle


def test_a_process_that_dies_is_a_user_code_error_and_a_closed_one_is_not() -> None:
    run = HookRun()
    run.submit_on_start(1)
    closed = run.starter.latest
    run.hooks.close()
    closed.exit()
    assert closed.killed
    assert run.hooks.user_code_error() is None
    run.submit_on_start(2)
    run.starter.latest.exit("exited with code 3")
    error = run.hooks.user_code_error()
    assert error is not None
    assert error.traceback_text == "The backend hooks process exited with code 3."


def test_a_stuck_hook_of_an_abandoned_round_is_killed_and_later_hooks_are_resubmitted() -> None:
    run = HookRun()
    run.submit_on_start(1)
    run.hooks.abandon_round(1)
    run.hooks.submit("on_shutdown", 1, 2, {})
    run.submit_on_start(2)
    assert [delay_s for delay_s, _ in run.timers] == [STUCK_HOOK_TIMEOUT_S]
    run.fire_timers()
    first, second = run.starter.processes
    first.exit()
    assert first.killed
    assert run.received_hooks() == ["sidecar_init", "on_start"]
    assert second.received[1]["round"] == 2
    assert run.hooks.user_code_error() is None
    assert run.hooks.is_done("on_shutdown", 1), "dropped with its round"


def test_a_hook_that_finishes_within_the_timeout_is_not_killed() -> None:
    run = HookRun()
    run.submit_on_start(1)
    run.hooks.abandon_round(1)
    run.submit_on_start(2)
    run.starter.latest.reply(HookFinished(hook="on_start", round=1))
    run.fire_timers()
    assert len(run.starter.processes) == 1
    assert not run.starter.latest.killed


@pytest.mark.parametrize(("round_number", "rank"), [(1, 2), (1, -1), (7, 0)])
def test_a_call_of_a_worker_that_does_not_exist_is_rejected(round_number: int, rank: int) -> None:
    run = HookRun()
    run.submit_on_start(1)
    call = CallWorkers(round=round_number, call_id=0, ranks=(0, rank), pickled_call=b"")
    with pytest.raises(IntegrityError, match="It calls ranks"):
        run.starter.latest.reply(call)
    assert run.hooks.drain_worker_calls() == []
