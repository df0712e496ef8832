"""Processes: exit descriptions, states, sessions and parent death."""

import os
import signal
import subprocess
import sys

import pytest

from spotfit.host import process
from tests.unit.host.descriptors import no_free_descriptors


@pytest.mark.parametrize(
    ("status", "how", "clean"),
    [
        (0, "exited with code 0", True),
        (3 << 8, "exited with code 3", False),
        (signal.SIGKILL, "was killed by SIGKILL", False),
        (signal.SIGSEGV | 0x80, "was killed by SIGSEGV", False),
    ],
)
def test_exit_descriptions(status: int, how: str, clean: bool) -> None:
    assert process.describe_exit(status) == (how, clean)


def test_the_state_of_a_process_is_described() -> None:
    assert process.describe_state(os.getpid()).startswith("running")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert process.describe_state(gone.pid) == "dead"
    gone.wait()
    assert process.describe_state(gone.pid) == ""


def test_killing_an_ended_process_is_ignored() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process.kill(gone.pid)
    process.kill_group(gone.pid)


def test_a_session_contains_all_its_process_groups() -> None:
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
        members = process.session_members(leader.pid)
        assert len(members) == 2
        for pid in members:
            process.kill(pid)
        assert leader.wait(10) == -signal.SIGKILL


def test_only_a_zombie_has_a_wait_status() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.zombie_wait_status(child) == 3 << 8
    assert process.exists(child)
    os.waitpid(child, 0)
    assert process.zombie_wait_status(child) is None
    assert not process.exists(child)
    assert process.zombie_wait_status(os.getpid()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_zombie_is_ending() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.is_ending(child)
    os.waitpid(child, 0)
    assert not process.is_ending(child)
    assert not process.is_ending(os.getpid())


# Recorded while the kernel freed the memory of a killed process: flags are PF_EXITING and others.
STAT_OF_KILLED = "R 7 12 12 0 -1 {flags} 3 0 0 0 4 2 0 0 20 0 1 0 99 0 0 18446744073709551615"


@pytest.mark.parametrize(("flags", "is_ending"), [(0x400044, True), (0x400040, False)])
def test_a_process_that_runs_no_code_any_more_is_ending(
    flags: int, is_ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = STAT_OF_KILLED.format(flags=flags).split()
    monkeypatch.setattr(process, "_read_stat", lambda _pid: fields)
    assert process.is_ending(12) is is_ending


def test_a_process_whose_parent_has_ended_exits_at_once() -> None:
    child = os.fork()
    if child == 0:
        process.die_with_parent(parent=1 << 22)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGKILL


@pytest.mark.parametrize("is_hanging", [True, False])
def test_a_process_ends_although_a_thread_hangs(is_hanging: bool) -> None:
    program = (
        "import atexit, sys, threading\n"
        "from spotfit.host.process import limit_exit\n"
        "atexit.register(print, 'exited')\n"
        f"threading.Thread(target=threading.Event().wait, daemon={not is_hanging}).start()\n"
        f"sys.exit(limit_exit(7, timeout_s={0.1 if is_hanging else 1000.0}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "" if is_hanging else "exited\n")


def test_thread_count_is_positive() -> None:
    assert process.thread_count() >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is raised on Linux only")
def test_children_keep_the_descriptor_limit_before_it_was_raised() -> None:
    program = """
import resource, subprocess, sys
from spotfit.host import process
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
process.raise_descriptor_limit()
print(process.descriptor_limit())
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
process.restore_descriptor_limit(child.pid)
print(resource.prlimit(child.pid, resource.RLIMIT_NOFILE))
child.communicate()
process.restore_descriptor_limit(child.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["200", "(100, 200)"]


def test_the_state_of_a_process_is_unknown_without_free_descriptors() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    with no_free_descriptors():
        unknown = process.zombie_wait_status(gone.pid)
    assert (unknown, process.zombie_wait_status(gone.pid)) == (None, 0)
    gone.wait()
