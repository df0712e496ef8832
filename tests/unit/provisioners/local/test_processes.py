"""Process identity, detached processes and termination."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spotfit_provisioners.local import processes
from spotfit_provisioners.local.processes import ProcessIdentity, current_process, find_process
from tests.unit.localsim.live.local_cloud_harness import wait_for_exit

WAIT = [sys.executable, "-c", "input()"]


def test_process_identity_is_pid_and_start_time() -> None:
    me = current_process()
    assert me.is_alive
    assert me.pid == os.getpid()
    assert not ProcessIdentity(me.pid, "1").is_alive


@pytest.mark.parametrize("text", ["", "12", "12-", "-12", "x-1"])
def test_invalid_text_is_not_a_process(text: str) -> None:
    assert ProcessIdentity.parse(text) is None


def test_process_identity_round_trips() -> None:
    assert ProcessIdentity.parse(str(current_process())) == current_process()


def test_zombie_is_not_alive() -> None:
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE) as child:
        assert find_process(child.pid) is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert find_process(child.pid) is None


def test_kill_includes_descendants(tmp_path: Path) -> None:
    """Includes a grandchild in another session."""
    result = tmp_path / "output"
    os.mkfifo(result)
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(result)]) as parent:
        grandchild = int(result.read_text())
        assert grandchild in processes.descendant_pids(os.getpid())
        found = find_process(parent.pid)
        assert found is not None
        processes.kill_process_tree(found)
        wait_for_exit(grandchild)
    processes.kill_process_tree(found)  # a second call has no effect


def test_detached_process_is_no_child_and_gets_no_signals(tmp_path: Path) -> None:
    output = tmp_path / "output"
    script = "import os, sys; print(os.getppid(), repr(sys.stdin.read()), os.environ['FLAVOUR'])"
    started = processes.start_detached(
        [sys.executable, "-c", script],
        environment={"FLAVOUR": "sweet", "PATH": os.defpath},
        directory=tmp_path,
        output=output,
    )
    if started is not None:  # it may have ended
        wait_for_exit(started.pid)
    parent, received, flavour = output.read_text().split()
    assert int(parent) != os.getpid()
    assert received == "''"
    assert flavour == "sweet"


def test_detached_process_reads_its_pipe_to_the_end(tmp_path: Path) -> None:
    output = tmp_path / "output"
    read_end, write_end = os.pipe()
    started = processes.start_detached(
        [sys.executable, "-c", "import sys; print(sys.stdin.read())"],
        environment={"PATH": os.defpath},
        directory=tmp_path,
        output=output,
        stdin=read_end,
    )
    os.close(read_end)
    os.write(write_end, b"hello")
    os.close(write_end)
    assert started is not None
    wait_for_exit(started.pid)
    assert output.read_text() == "hello\n"


def test_a_killed_process_has_ended_when_the_call_returns() -> None:
    script = "import sys; data = bytearray(200_000_000); print('up', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    found = processes.find_process(child.pid)
    assert found is not None
    processes.kill_process_tree(found)
    assert not found.is_alive
    child.communicate()
