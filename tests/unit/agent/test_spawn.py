"""A process in an interpreter of its own: started, told apart, reaped."""

import sys

import pytest

from spotfit.agent.child import Child
from spotfit.agent.loop import Loop
from spotfit.agent.spawn import Spawner
from spotfit.agent.zygote import Breed
from tests.unit.agent.wires import Skipping, turns_until


def test_its_end_is_told_and_nothing_is_left_to_reap() -> None:
    loop, ends, lines = Loop(Skipping()), [], []
    child = Child(
        loop,
        heard=lambda _: None,
        printed=lambda stream, text: lines.append((stream, text)),
        ended=lambda how, _: ends.append(how),
    )
    spawner = Spawner(loop)
    spawner.bear("audience", Breed("none"), child)
    assert spawner.left == 1
    child.kill()
    turns_until(loop, lambda: bool(ends) and not spawner.left)
    assert ends == ["was killed by SIGKILL"]
    loop.close()


def test_an_interpreter_that_is_not_there_is_told_at_once() -> None:
    loop = Loop(Skipping())
    child = Child(loop, heard=print, printed=print, ended=print)
    with pytest.raises(OSError, match="no-python"):
        Spawner(loop).bear("worker", Breed("none", sys.executable + "/no-python"), child)
    child.reaped(9)
    loop.close()
