"""Processes: how they ended in words, and nobody of a group or session is forgotten."""

import os
import signal
import subprocess
import sys

import pytest

from spotfit.host import process


@pytest.mark.parametrize(
    ("status", "how", "clean"),
    [
        (0, "exited with code 0", True),
        (3 << 8, "exited with code 3", False),
        (signal.SIGKILL, "was killed by SIGKILL", False),
        (signal.SIGSEGV | 0x80, "was killed by SIGSEGV", False),
    ],
)
def test_how_it_ended_in_words(status: int, how: str, clean: bool) -> None:
    assert process.how_it_ended(status) == (how, clean)


def test_the_kernel_says_what_a_process_does() -> None:
    assert process.state_of(os.getpid()).startswith("running")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert process.state_of(gone.pid) == "dead"
    gone.wait()
    assert process.state_of(gone.pid) == ""


def test_killing_what_is_gone_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process.kill(gone.pid)
    process.kill_group(gone.pid)


def test_a_session_is_killed_whatever_groups_it_has_formed() -> None:
    script = (
        "import os, subprocess, sys, signal\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'],"
        " process_group=0)\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    with leader.stdout:
        assert leader.stdout.readline() == b"up\n"
        assert len(process.session_members(leader.pid)) == 2
        process.kill_session(leader.pid)
        assert leader.wait(10) == -signal.SIGKILL
        assert leader.stdout.read() == b""  # the other one held the pipe, too


def test_a_zombie_tells_its_status_and_a_living_process_does_not() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.ended(child) == 3 << 8
    assert process.exists(child)
    os.waitpid(child, 0)
    assert process.ended(child) is None
    assert not process.exists(child)
    assert process.ended(os.getpid()) is None


def test_whose_parent_is_gone_already_ends_at_once() -> None:
    child = os.fork()
    if child == 0:
        process.die_with_parent(parent=1 << 22)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGKILL


def test_threads_are_counted_as_the_kernel_counts() -> None:
    assert process.thread_count() >= 1
    assert process.has_thread(os.getpid())
    assert not process.has_thread(1 << 22)
