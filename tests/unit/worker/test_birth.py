"""The first moments of a user process."""

import os
import random
import signal
import sys
import tempfile
import weakref
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

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


def listens(parent: int, pipe: int) -> None:
    """As a data loader's worker does, for whom its child dials in."""
    birth.shorten_socket_paths()
    with Listener(family="AF_UNIX") as listener:
        if os.fork() == 0:
            with Client(listener.address) as dialled:
                dialled.send("hello")
            os._exit(0)
        with listener.accept() as heard:
            os.write(pipe, heard.recv().encode())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the short name is one of Linux")
def test_processes_meet_however_long_the_name_of_the_temporary_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert in_a_child(listens)[1] == b"hello"
    assert list(deep.iterdir()) == []


def test_a_short_name_is_left_alone() -> None:
    def live(parent: int, pipe: int) -> None:
        tempfile.tempdir = "/tmp"  # noqa: S108 - it is only read
        before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - in a process that is about to end
        birth.shorten_socket_paths()
        os.write(pipe, str(len(os.listdir("/dev/fd")) - before).encode())  # noqa: PTH208

    assert in_a_child(live)[1] == b"0"
