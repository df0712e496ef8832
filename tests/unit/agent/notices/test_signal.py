"""SIGTERM becomes a notice, and wakes whoever sleeps."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from spotfit.agent.notices.signal import SignalNotice


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_a_notice() -> None:
    woken: list[bool] = []
    source = SignalNotice(lambda: woken.append(True))
    assert source.poll(0) is None
    os.kill(os.getpid(), signal.SIGTERM)
    notice = source.poll(0)
    assert notice is not None
    assert notice.reason == "SIGTERM"
    assert woken == [True]


def test_how_long_a_machine_stays_after_it_may_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_SIGNAL_GRACE_S", "25s")
    source = SignalNotice(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    notice = source.poll(0)
    assert notice is not None
    assert notice.seconds_left == 25.0
    assert notice.deadline_ms > 0


def test_in_another_thread_it_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=SignalNotice, args=(print,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
