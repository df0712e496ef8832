"""dump_stacks: kernel state, Python stacks and the output of py-spy."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.hang_detector import DUMP_TIMEOUT_S, MAX_DUMP_BYTES, dump_stacks, stacks_dir
from spotfit.host import process
from spotfit.testing.builders import ManualClock

PID = os.getpid()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    directory = stacks_dir(tmp_path)
    directory.mkdir()
    return directory


@pytest.fixture
def registered(directory: Path) -> Iterator[Path]:
    """Register the stack dump signal in this process, as a worker does."""
    path = directory / f"{PID}.txt"
    with path.open("ab", buffering=0) as file:
        faulthandler.register(process.STACK_DUMP_SIGNAL, file=file, all_threads=True)
        yield path
        faulthandler.unregister(process.STACK_DUMP_SIGNAL)


def write_py_spy(tmp_path: Path, script: str) -> None:
    """Install a fake py-spy that runs this script."""
    path = tmp_path / "bin" / "py-spy"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)


def test_the_stacks_of_all_threads_are_dumped(registered: Path) -> None:
    registered.write_text("stacks of an earlier dump\n")
    dumps = dump_stacks({3: PID}, stacks_dir(registered.parents[1]), ManualClock())
    assert dumps.keys() == {3}
    assert dumps[3].startswith(f"process {PID}, kernel state: running")
    assert "in test_the_stacks_of_all_threads_are_dumped" in dumps[3]
    assert "stacks of an earlier dump" not in dumps[3]


def test_long_stacks_are_truncated(registered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "kill", lambda *_: registered.write_text("x" * 2 * MAX_DUMP_BYTES))
    dumps = dump_stacks({0: PID}, registered.parent, ManualClock())
    assert dumps[0].count("x") == MAX_DUMP_BYTES


def test_a_process_without_a_handler_is_not_signalled(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    clock = ManualClock()
    dumps = dump_stacks({0: child.pid}, directory, clock)
    assert "No Python stacks" in dumps[0]
    assert clock.now() >= DUMP_TIMEOUT_S
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_stopped_process_is_described(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert "kernel state: stopped" in dump_stacks({0: child.pid}, directory, ManualClock())[0]
    child.kill()
    child.wait()


def test_a_missing_process_is_described(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dumps = dump_stacks({0: child.pid}, directory, ManualClock())
    assert "kernel state: no such process" in dumps[0]


@pytest.mark.parametrize(
    ("script", "dumps"),
    [
        (
            "import sys; print('frames of', sys.argv[1:])",
            "py-spy dump --native:\nframes of ['dump'",
        ),
        (
            "import sys; sys.exit('Permission denied')",
            "py-spy dump --native:\nPermission denied",
        ),
    ],
    ids=["permitted", "denied"],
)
def test_the_output_of_py_spy_is_appended(
    registered: Path, tmp_path: Path, script: str, dumps: str
) -> None:
    write_py_spy(tmp_path, script)
    assert dumps in dump_stacks({0: PID}, registered.parent, ManualClock())[0]


def test_a_py_spy_that_cannot_be_executed_does_not_affect_the_stacks(
    registered: Path, tmp_path: Path
) -> None:
    write_py_spy(tmp_path, "")
    (tmp_path / "bin" / "py-spy").write_text("#!/no/such/interpreter\n")
    dumps = dump_stacks({0: PID}, registered.parent, ManualClock())[0]
    assert "py-spy failed: " in dumps
    assert "in test_a_py_spy_that_cannot_be_executed_does_not_affect_the_stacks" in dumps
