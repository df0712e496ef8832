"""child_setup: process group, signals, RNG state, streams and socket paths."""

import os
import random
import signal
import sys
import tempfile
import weakref
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

from spotfit.fork_server import child_setup


def in_a_child(program: object) -> tuple[int, bytes]:
    """Run `program` in a forked child; return the wait status and the bytes it wrote."""
    reads, writes = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reads)
        try:
            program(parent, writes)  # type: ignore[operator]
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        output = pipe.read()
    return os.waitpid(child, 0)[1], output


def test_a_child_leads_a_new_group_in_the_same_session() -> None:
    def program(parent: int, pipe: int) -> None:
        child_setup.isolate_process(parent)
        alone = os.getpgrp() == os.getpid()
        os.write(pipe, f"{alone} {os.getsid(0)}".encode())

    assert in_a_child(program)[1] == f"True {os.getsid(0)}".encode()


def test_signals_have_their_default_handlers() -> None:
    def program(parent: int, _: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child_setup.isolate_process(parent)
        os.kill(os.getpid(), signal.SIGTERM)

    assert os.WTERMSIG(in_a_child(program)[0]) == signal.SIGTERM


def test_forked_children_have_different_random_numbers() -> None:
    def program(parent: int, pipe: int) -> None:
        child_setup.isolate_process(parent)
        os.write(pipe, str(random.random()).encode())

    random.seed(1)
    assert len({in_a_child(program)[1] for _ in range(3)}) == 3


def test_output_is_flushed_after_each_line() -> None:
    def program(_: int, pipe: int) -> None:
        sys.stdout = os.fdopen(1, "w", closefd=False)  # pytest has put its own there
        child_setup.redirect_streams(os.dup(pipe), os.dup(pipe))
        print("printed")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(program)[1].endswith(b"printed\n")


def test_finalizers_of_imports_are_not_inherited() -> None:
    class Finalized:
        pass

    instance = Finalized()
    finalizer = weakref.finalize(instance, print)

    def program(_: int, pipe: int) -> None:
        child_setup.drop_inherited_finalizers()
        os.write(pipe, str(finalizer.atexit).encode())

    assert in_a_child(program)[1] == b"False"
    finalizer.detach()


def listen_and_connect(parent: int, pipe: int) -> None:
    """Exchange a message as a DataLoader does with its workers."""
    child_setup.shorten_socket_paths()
    with Listener(family="AF_UNIX") as listener:
        if os.fork() == 0:
            with Client(listener.address) as client:
                client.send("hello")
            os._exit(0)
        with listener.accept() as connection:
            os.write(pipe, connection.recv().encode())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the short name is one of Linux")
def test_sockets_work_with_a_long_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert in_a_child(listen_and_connect)[1] == b"hello"
    assert list(deep.iterdir()) == []


def test_a_short_temporary_directory_is_unchanged() -> None:
    def program(parent: int, pipe: int) -> None:
        tempfile.tempdir = "/tmp"  # noqa: S108 - it is only read
        before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - in a process that is about to end
        child_setup.shorten_socket_paths()
        os.write(pipe, str(len(os.listdir("/dev/fd")) - before).encode())  # noqa: PTH208

    assert in_a_child(program)[1] == b"0"
