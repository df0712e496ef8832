"""Spawner: new interpreters are started and reaped."""

import sys

import pytest

from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import RuntimeKey, Spawner
from spotfit.host.event_loop import EventLoop
from tests.unit.agent.transports import SkippableClock, run_loop_until


def test_the_exit_is_reported_and_the_child_is_reaped() -> None:
    loop, ends, lines = EventLoop(SkippableClock()), [], []
    child = ChildProcess(
        loop,
        on_messages=lambda _: None,
        on_line=lambda stream, text: lines.append((stream, text)),
        on_exit=lambda how, _: ends.append(how),
    )
    spawner = Spawner(loop)
    spawner.spawn("callbacks", RuntimeKey("none"), child)
    assert spawner.live_count == 1
    child.kill()
    run_loop_until(loop, lambda: bool(ends) and not spawner.live_count)
    assert ends == ["was killed by SIGKILL"]
    loop.close()


def test_a_missing_interpreter_raises() -> None:
    loop = EventLoop(SkippableClock())
    child = ChildProcess(loop, on_messages=print, on_line=print, on_exit=print)
    with pytest.raises(OSError, match="no-python"):
        Spawner(loop).spawn("worker", RuntimeKey("none", sys.executable + "/no-python"), child)
    child.on_reaped(9)
    loop.close()
