"""ProcessCallbackRunner: calls are counted, the first error is kept."""

from collections.abc import Callable

import msgspec
import pytest

from spotfit.core.errors import IntegrityError
from spotfit.fork_server.child_process import ChildProcess
from spotfit.host.event_loop import EventLoop
from spotfit.model.leader_state import UserCodeError
from spotfit.protocol.agent_sidecar import CallbackFinished, SidecarInit
from spotfit.sidecar.callbacks import ProcessCallbackRunner
from spotfit.testing.builders import RUN_ID
from tests.unit.agent.transports import SkippableClock
from tests.unit.sidecar.fake_process import FakeStarter

OnFramesFn = Callable[[list[bytes]], None]
OnExitFn = Callable[[str, bool], None]


def make_runner() -> tuple[ProcessCallbackRunner, FakeStarter]:
    starter = FakeStarter()
    init = SidecarInit(storage_url="memory://x", code_bundle={}, secret="secret", run_id=RUN_ID)
    return ProcessCallbackRunner(init, starter.start), starter


def test_no_process_is_started_without_a_call() -> None:
    runner, starter = make_runner()
    assert runner.is_idle
    runner.close()
    assert starter.processes == []


def test_the_runner_is_idle_once_every_call_has_finished() -> None:
    runner, starter = make_runner()
    runner.send_report([msgspec.Raw(b'{"loss":1}')], "c1")
    runner.send_failure({}, {1: "it broke"})
    process = starter.latest
    assert process.received_types == ["sidecar_init", "call_after_report", "call_after_exception"]
    process.reply(CallbackFinished())
    idle_after_one = runner.is_idle
    process.reply(CallbackFinished())
    assert (idle_after_one, runner.is_idle) == (False, True)
    assert runner.user_code_error() is None


def test_the_first_error_is_kept_and_makes_the_runner_idle() -> None:
    runner, starter = make_runner()
    for _ in range(3):
        runner.send_report([], None)
    starter.latest.reply(CallbackFinished(traceback_text="Traceback: first", pickle_key="f/1"))
    starter.latest.reply(CallbackFinished(traceback_text="Traceback: second"))
    assert runner.user_code_error() == UserCodeError(
        reason="a callback raised", traceback_text="Traceback: first", pickle_key="f/1"
    )
    assert runner.is_idle


def test_a_process_that_dies_is_a_user_code_error() -> None:
    runner, starter = make_runner()
    runner.send_report([], None)
    starter.latest.exit("was killed by SIGKILL")
    error = runner.user_code_error()
    assert error is not None
    assert error.traceback_text == "The callbacks process was killed by SIGKILL."


def test_close_kills_the_process_without_an_error() -> None:
    runner, starter = make_runner()
    runner.send_report([], None)
    runner.close()
    starter.latest.exit()
    assert starter.latest.killed
    assert runner.user_code_error() is None


def test_an_answer_to_a_call_that_was_not_made_is_rejected() -> None:
    runner, starter = make_runner()
    runner.send_report([], None)
    starter.latest.reply(CallbackFinished())
    with pytest.raises(IntegrityError, match="a call that was not made"):
        starter.latest.reply(CallbackFinished())
    assert runner.is_idle


def test_a_report_that_is_too_large_for_a_frame_is_a_user_code_error() -> None:
    loop, children = EventLoop(SkippableClock()), list[ChildProcess]()

    def start(on_frames: OnFramesFn, on_exit: OnExitFn) -> ChildProcess:
        children.append(ChildProcess(loop, on_messages=on_frames, on_line=print, on_exit=on_exit))
        return children[-1]

    init = SidecarInit(storage_url="memory://x", code_bundle={}, secret="secret", run_id=RUN_ID)
    runner = ProcessCallbackRunner(init, start)
    metrics = msgspec.Raw(b'{"a":"%b"}' % (b"x" * (8 * 2**20 - 10)))
    runner.send_report([metrics] * 9, None)
    error = runner.user_code_error()
    assert error is not None
    assert error.reason == "a report is too large for the callbacks"
    assert "exceeds the limit" in error.traceback_text
    children[0].discard()
    loop.close()
