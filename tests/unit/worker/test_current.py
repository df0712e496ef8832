"""One session a process, and none before and after."""

from __future__ import annotations

import contextlib
import threading

import pytest

from spotfit.core.errors import SessionMisuseError
from spotfit.worker import current
from spotfit.worker.local import LocalSession


def test_a_session_within_a_session_gives_way_to_the_outer_one() -> None:
    outer, inner = LocalSession("outer"), LocalSession("inner")
    with current.entered(outer):
        with contextlib.suppress(KeyError), current.entered(inner):
            assert current.current("x") is inner
            raise KeyError
        assert current.current("x") is outer
    with pytest.raises(SessionMisuseError):
        current.current("x")


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
