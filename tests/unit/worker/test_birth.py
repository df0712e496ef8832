"""The first moments of a user process."""

import os
import random
import signal
import sys
import weakref

from spotfit.worker import birth


def in_a_child(live: object) -> tuple[int, bytes]:
    """Fork, live, and give the wait status and what was written to the pipe."""
    reads, writes = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reads)
        try:
            live(parent, writes)  # type: ignore[operator]
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


def test_it_is_a_group_of_its_own_in_its_node_s_session() -> None:
    def live(parent: int, pipe: int) -> None:
        birth.separate(parent)
        alone = os.getpgrp() == os.getpid()
        os.write(pipe, f"{alone} {os.getsid(0)}".encode())

    assert in_a_child(live)[1] == f"True {os.getsid(0)}".encode()


def test_it_answers_signals_like_any_program() -> None:
    def live(parent: int, _: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        birth.separate(parent)
        os.kill(os.getpid(), signal.SIGTERM)

    assert os.WTERMSIG(in_a_child(live)[0]) == signal.SIGTERM


def test_twins_throw_their_own_dice() -> None:
    def live(parent: int, pipe: int) -> None:
        birth.separate(parent)
        os.write(pipe, str(random.random()).encode())

    random.seed(1)
    assert len({in_a_child(live)[1] for _ in range(3)}) == 3


def test_a_line_is_out_when_it_ends() -> None:
    def live(_: int, pipe: int) -> None:
        sys.stdout = os.fdopen(1, "w", closefd=False)  # pytest has put its own there
        birth.take_streams(os.dup(pipe), os.dup(pipe))
        print("printed")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(live)[1].endswith(b"printed\n")


def test_what_an_import_wanted_to_do_at_exit_is_not_inherited() -> None:
    class Thing:
        pass

    thing = Thing()
    finalizer = weakref.finalize(thing, print)

    def live(_: int, pipe: int) -> None:
        birth.leave_inheritance()
        os.write(pipe, str(finalizer.atexit).encode())

    assert in_a_child(live)[1] == b"False"
    finalizer.detach()
