"""CheckpointerCallback outside of a fit; within one it is tested in tests/frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.lightning.checkpointer_callback import CheckpointerHooks
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


def test_it_is_created_in_a_training_function() -> None:
    with pytest.raises(SessionMisuseError):
        CheckpointerHooks()


def test_before_the_fit_there_is_no_checkpointer(session: LocalSession) -> None:
    callback = CheckpointerHooks()
    with pytest.raises(ConfigError, match="only after Trainer"):
        callback.checkpointer  # noqa: B018
    assert callback.restored is None


def test_a_trainer_that_only_validates_needs_no_checkpointer(session: LocalSession) -> None:
    callback = CheckpointerHooks()
    callback.on_validation_end(SimpleNamespace(sanity_checking=False), None)
    callback.teardown(SimpleNamespace(), None, "validate")
