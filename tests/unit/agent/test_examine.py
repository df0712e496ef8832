"""What a process is doing is told by itself, by the kernel, and by py-spy where that is there."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.examine import LARGEST_BYTES, PATIENCE_S, examine, folder_of
from spotfit.host import process
from spotfit.testing.clock import ManualClock

ME = os.getpid()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    folder = folder_of(tmp_path)
    folder.mkdir()
    return folder


@pytest.fixture
def listening(folder: Path) -> Iterator[Path]:
    """This very process tells its stacks, as a worker would."""
    path = folder / f"{ME}.txt"
    with path.open("ab", buffering=0) as file:
        faulthandler.register(process.STACKS_SIGNAL, file=file, all_threads=True)
        yield path
        faulthandler.unregister(process.STACKS_SIGNAL)


def spy(tmp_path: Path, script: str) -> None:
    """A py-spy that does this."""
    path = tmp_path / "bin" / "py-spy"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)


def test_a_process_tells_the_stacks_of_its_threads(listening: Path) -> None:
    listening.write_text("what it told before\n")
    told = examine({3: ME}, folder_of(listening.parents[1]), ManualClock())
    assert told.keys() == {3}
    assert told[3].startswith(f"process {ME}, which the kernel says is running")
    assert "in test_a_process_tells_the_stacks_of_its_threads" in told[3]
    assert "what it told before" not in told[3]


def test_very_deep_stacks_are_cut(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "kill", lambda *_: listening.write_text("x" * 2 * LARGEST_BYTES))
    told = examine({0: ME}, listening.parent, ManualClock())
    assert told[0].count("x") == LARGEST_BYTES


def test_who_does_not_listen_is_not_sent_a_signal_that_would_kill_it(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    clock = ManualClock()
    told = examine({0: child.pid}, folder, clock)
    assert "It did not tell its stacks" in told[0]
    assert clock.now() >= PATIENCE_S
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_process_that_is_stopped_is_told_as_such(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert "which the kernel says is stopped" in examine({0: child.pid}, folder, ManualClock())[0]
    child.kill()
    child.wait()


def test_a_process_that_is_gone_is_told_as_such(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    told = examine({0: child.pid}, folder, ManualClock())
    assert "which the kernel says is gone" in told[0]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; print('frames of', sys.argv[1:])", "as py-spy sees it:\nframes of ['dump'"),
        ("import sys; sys.exit('Permission denied')", "as py-spy sees it:\nPermission denied"),
    ],
    ids=["may look", "may not"],
)
def test_py_spy_adds_what_it_sees(listening: Path, tmp_path: Path, script: str, told: str) -> None:
    spy(tmp_path, script)
    assert told in examine({0: ME}, listening.parent, ManualClock())[0]


def test_a_py_spy_that_cannot_be_run_spoils_nothing(listening: Path, tmp_path: Path) -> None:
    spy(tmp_path, "")
    (tmp_path / "bin" / "py-spy").write_text("#!/no/such/interpreter\n")
    told = examine({0: ME}, listening.parent, ManualClock())[0]
    assert "(py-spy: " in told
    assert "in test_a_py_spy_that_cannot_be_run_spoils_nothing" in told
