"""Tests of the SIGTERM notice source."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from spotfit.agent.notices.local_sources import SignalNoticeSource


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_a_notice() -> None:
    woken: list[bool] = []
    source = SignalNoticeSource(lambda: woken.append(True))
    assert source.poll(0) is None
    os.kill(os.getpid(), signal.SIGTERM)
    notice = source.poll(0)
    assert notice is not None
    assert notice.reason == "SIGTERM"
    assert woken == [True]


def test_the_grace_period_sets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_SIGNAL_GRACE_S", "25s")
    source = SignalNoticeSource(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    notice = source.poll(0)
    assert notice is not None
    assert notice.seconds_left == 25.0
    assert notice.deadline_ms > 0


def test_in_another_thread_no_handler_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=SignalNoticeSource, args=(print,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
