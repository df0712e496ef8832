"""The current session of a process."""

from __future__ import annotations

import contextlib
import threading

import pytest

from spotfit.core.errors import SessionMisuseError
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


def test_use_session_restores_the_outer_session() -> None:
    outer, inner = LocalSession("outer"), LocalSession("inner")
    with training_api.use_session(outer):
        with contextlib.suppress(KeyError), training_api.use_session(inner):
            assert training_api.require_session("x") is inner
            raise KeyError
        assert training_api.require_session("x") is outer
    with pytest.raises(SessionMisuseError):
        training_api.require_session("x")


def test_the_session_is_visible_in_every_thread() -> None:
    session = LocalSession("run")
    training_api.set_session(session)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(training_api.require_session("x")))
    thread.start()
    thread.join()
    training_api.clear_session()
    assert found == [session]
    with pytest.raises(SessionMisuseError, match="`x` cannot be used outside"):
        training_api.require_session("x")
