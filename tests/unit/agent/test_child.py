"""One user process as its agent holds it: the last word comes last, and it always comes."""

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from spotfit.agent import child as children
from spotfit.agent.child import Child
from spotfit.agent.loop import Loop
from spotfit.host.frames import framed
from tests.unit.agent.wires import Skipping, turns_until


class Heard:
    """All that a child tells, in order."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def frames(self, frames: list[bytes]) -> None:
        self.all += frames

    def line(self, stream: str, text: str) -> None:
        self.all.append((stream, text))

    def end(self, how: str, _clean: bool) -> None:
        self.all.append(how)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(Skipping())
    yield loop
    loop.close()


def _was_killed(heard: Heard) -> bool:
    return bool(heard.all == ["was killed by SIGKILL"])


def a_child(loop: Loop) -> tuple[Child, Heard]:
    heard = Heard()
    return Child(loop, heard=heard.frames, printed=heard.line, ended=heard.end), heard


def bear(child: Child, live: Callable[[socket.socket], object]) -> int:
    """Fork a process that holds the child's ends and lives like that."""
    talk, out, err = child.descriptors
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(out, out + 1)
        os.closerange(err, err + 1)
        try:
            live(socket.socket(fileno=talk))
        finally:
            os._exit(7)
    os.setpgid(pid, pid)
    child.born(pid)
    return pid


def reap(child: Child, pid: int) -> None:
    child.reaped(os.waitpid(pid, 0)[1])


def test_everything_it_said_comes_before_its_end(loop: Loop) -> None:
    child, heard = a_child(loop)

    def live(talk: socket.socket) -> None:
        os.write(1, b"a line\nhalf a line")
        talk.sendall(framed(b"one") + framed(b"two"))
        os.kill(os.getpid(), 9)

    reap(child, bear(child, live))
    turns_until(loop, lambda: bool(heard.all) and heard.all[-1] == "was killed by SIGKILL")
    assert set(heard.all[:-1]) == {b"one", b"two", ("out", "a line"), ("out", "half a line")}
    assert len(heard.all) == 5


def test_its_death_is_seen_even_if_nobody_tells(loop: Loop) -> None:
    child, heard = a_child(loop)
    pid = bear(child, lambda _: os._exit(3))
    turns_until(loop, lambda: heard.all == ["exited with code 3"])
    os.waitpid(pid, 0)


def test_a_grandchild_in_its_group_goes_with_it(loop: Loop) -> None:
    child, heard = a_child(loop)

    def live(_: socket.socket) -> None:
        if os.fork() == 0:
            os.read(os.pipe()[0], 1)  # for ever, holding the pipes
        os._exit(0)

    reap(child, bear(child, live))
    turns_until(loop, lambda: heard.all == ["exited with code 0"])


def test_a_grandchild_that_fled_holds_nobody_up(loop: Loop) -> None:
    child, heard = a_child(loop)
    told, tells = os.pipe()

    def live(_: socket.socket) -> None:
        fled = os.fork()
        if fled == 0:
            os.setsid()
            os.write(tells, f"{os.getpid()}\n".encode())
            os.read(os.pipe()[0], 1)
        os.read(told, 0)
        os._exit(0)

    pid = bear(child, live)
    fugitive = int(os.read(told, 100))
    reap(child, pid)
    assert heard.all == []
    assert isinstance(loop.clock, Skipping)
    loop.clock.skipped += 1.1
    loop.turn(0)
    assert heard.all == ["exited with code 0"]
    os.kill(fugitive, 9)
    os.close(told)
    os.close(tells)


def test_who_is_killed_before_birth_dies_at_birth(loop: Loop) -> None:
    child, heard = a_child(loop)
    child.kill()
    reap(child, bear(child, lambda talk: talk.recv(1)))
    turns_until(loop, lambda: heard.all == ["was killed by SIGKILL"])


def test_an_end_that_was_ordered_is_told_apart_from_one_it_gave_cause_for(loop: Loop) -> None:
    for for_cause in (False, True):
        child, heard = a_child(loop)
        pid = bear(child, lambda talk: talk.recv(1))
        child.kill(for_cause=for_cause)
        reap(child, pid)
        turns_until(loop, partial(_was_killed, heard))
        assert child.ordered is not for_cause


def test_what_is_sent_before_birth_is_read_after(loop: Loop) -> None:
    child, heard = a_child(loop)
    child.send(b"x" * 1_000_000)

    def live(talk: socket.socket) -> None:
        left = 1_000_004
        while left:
            left -= len(talk.recv(left))
        os._exit(0)

    pid = bear(child, live)
    turns_until(loop, lambda: heard.all == ["exited with code 0"])
    os.waitpid(pid, 0)


def test_a_process_that_sends_garbage_is_killed(loop: Loop) -> None:
    child, heard = a_child(loop)

    def live(talk: socket.socket) -> None:
        talk.sendall(b"\xff" * 100)
        os.read(os.pipe()[0], 1)

    pid = bear(child, live)
    turns_until(loop, lambda: heard.all == ["was killed by SIGKILL"])
    os.waitpid(pid, 0)
    assert not child.ordered, "it failed; nobody wanted it gone"


def test_a_process_that_never_reads_is_killed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_QUEUE_LIMIT_BYTES", 1000)
    child, heard = a_child(loop)
    pid = bear(child, lambda _: os.read(os.pipe()[0], 1))
    child.send(b"x" * 10_000_000)
    turns_until(loop, lambda: heard.all == ["was killed by SIGKILL"])
    os.waitpid(pid, 0)
    assert not child.ordered


def test_an_endless_line_is_cut(loop: Loop) -> None:
    child, heard = a_child(loop)
    reap_me = bear(child, lambda _: os.write(1, b"x" * 60_000))
    turns_until(loop, lambda: "exited with code 7" in heard.all)
    os.waitpid(reap_me, 0)
    assert heard.all[0] == ("out", "x" * 60_000)
