"""An engine is created only in the process group of all workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.deepspeed import initialize
from spotfit.model.topology import Ranks
from spotfit.worker import local_session, training_api
from spotfit.worker.local_session import LocalSession


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSession]:
    """A session of one of two workers."""
    monkeypatch.setattr(local_session, "Ranks", lambda: Ranks(world_size=2))
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


def test_without_a_process_group_no_engine_is_created(session: LocalSession) -> None:
    with pytest.raises(ConfigError, match="of all 2 workers, but there is no group") as error:
        initialize()
    assert error.value.details["retryable"] is False


def test_outside_of_a_training_function_no_engine_is_created() -> None:
    with pytest.raises(SessionMisuseError, match=r"spotfit\.deepspeed\.initialize"):
        initialize()
