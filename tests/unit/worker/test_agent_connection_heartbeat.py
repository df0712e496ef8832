"""Heartbeats, and stack dumps on a signal."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.host import process
from spotfit.protocol.worker_agent import FromWorker, WorkerHeartbeat
from spotfit.worker import agent_connection


class FakeConnection:
    """Records some messages, then blocks the heartbeat thread."""

    def __init__(self, count: int) -> None:
        self.received: list[FromWorker] = []
        self._count = count
        self.done = threading.Event()

    def send(self, message: FromWorker) -> None:
        self.received.append(message)
        if len(self.received) == self._count:
            self.done.set()
            threading.Event().wait()  # a daemon thread: it ends with the process


@pytest.fixture
def _unregister() -> Iterator[None]:
    yield
    faulthandler.unregister(process.STACK_DUMP_SIGNAL)


@pytest.mark.usefixtures("_unregister")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the file stays open
def test_heartbeats_are_sent_by_a_daemon_thread(tmp_path: Path) -> None:
    connection = FakeConnection(3)
    thread = agent_connection.start_heartbeat(
        connection,  # type: ignore[arg-type]  # it only sends
        interval_s=0.001,
        stacks_dir=tmp_path / "stacks",
    )
    assert connection.done.wait(30.0)
    assert connection.received == [WorkerHeartbeat()] * 3
    assert thread.daemon


_DUMPS_ITS_STACKS = """
import signal, sys
from pathlib import Path
from spotfit.host import process
from spotfit.worker import agent_connection

class Connection:
    def send(self, message): pass

def train():
    signal.raise_signal(process.STACK_DUMP_SIGNAL)

agent_connection.start_heartbeat(Connection(), interval_s=0.001, stacks_dir=Path(sys.argv[1]))
train()
"""


def test_stacks_are_dumped_on_the_signal(tmp_path: Path) -> None:
    # In its own process: a dump contains at most 100 threads, and other tests leave threads.
    subprocess.run([sys.executable, "-c", _DUMPS_ITS_STACKS, str(tmp_path)], check=True)
    (dump,) = tmp_path.glob("*.txt")
    stacks = dump.read_text()
    assert "in train" in stacks
    assert "in send_heartbeats" in stacks
