"""Signs of life: a word now and then, and stacks on a signal."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.host import process
from spotfit.model.wire import Alive, FromWorker
from spotfit.worker import pulse


class Listener:
    """Hears a few words, and lets the thread go."""

    def __init__(self, count: int) -> None:
        self.heard: list[FromWorker] = []
        self._count = count
        self.done = threading.Event()

    def send(self, frame: FromWorker) -> None:
        self.heard.append(frame)
        if len(self.heard) == self._count:
            self.done.set()
            threading.Event().wait()  # a daemon: nobody waits for it


@pytest.fixture
def _put_back() -> Iterator[None]:
    yield
    faulthandler.unregister(process.STACKS_SIGNAL)


@pytest.mark.usefixtures("_put_back")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the file stays open
def test_it_says_that_it_lives_and_tells_its_stacks(tmp_path: Path) -> None:
    listener = Listener(3)
    thread = pulse.begin(listener, every_s=0.001, folder=tmp_path / "stacks")  # type: ignore[arg-type]  # it only sends
    assert listener.done.wait(30.0)
    assert listener.heard == [Alive()] * 3
    assert thread.daemon
    os.kill(os.getpid(), process.STACKS_SIGNAL)
    told = (tmp_path / "stacks" / f"{os.getpid()}.txt").read_text()
    assert "in test_it_says_that_it_lives_and_tells_its_stacks" in told
    assert "in _beat" in told
