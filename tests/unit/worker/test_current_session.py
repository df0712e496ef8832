"""The current session of a process."""

from __future__ import annotations

import contextlib
import threading

import pytest

from spotfit.core.errors import SessionMisuseError
from spotfit.worker import current_session
from spotfit.worker.local_session import LocalSession


def test_use_session_restores_the_outer_session() -> None:
    outer, inner = LocalSession("outer"), LocalSession("inner")
    with current_session.use_session(outer):
        with contextlib.suppress(KeyError), current_session.use_session(inner):
            assert current_session.require_session("x") is inner
            raise KeyError
        assert current_session.require_session("x") is outer
    with pytest.raises(SessionMisuseError):
        current_session.require_session("x")


def test_the_session_is_visible_in_every_thread() -> None:
    session = LocalSession("run")
    current_session.set_session(session)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(current_session.require_session("x")))
    thread.start()
    thread.join()
    current_session.clear_session()
    assert found == [session]
    with pytest.raises(SessionMisuseError, match="`x` cannot be used outside"):
        current_session.require_session("x")
