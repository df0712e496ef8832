"""One session a process, and none before and after."""

from __future__ import annotations

import threading

import pytest

from spotfit.core.errors import SessionMisuseError
from spotfit.worker import current
from spotfit.worker.local import LocalSession


def test_a_session_is_there_between_enter_and_leave_in_every_thread() -> None:
    session = LocalSession("run")
    current.enter(session)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(current.current("x")))
    thread.start()
    thread.join()
    current.leave()
    assert found == [session]
    with pytest.raises(SessionMisuseError, match="`x` cannot be used outside"):
        current.current("x")
