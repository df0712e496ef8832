"""The setup of sidecar programs: the connection to the agent, and stored exceptions."""

from __future__ import annotations

import socket
import threading

import pytest

from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import TransientStoreError
from spotfit.protocol import framing
from spotfit.protocol.agent_sidecar import RunHook, UploadDone
from spotfit.security.run_key import RunKey
from spotfit.sidecar.process_setup import SidecarConnection, store_exception
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID

KEY = RunKey(b"k" * 32, RUN_ID)


def test_a_connection_exchanges_messages_until_the_agent_closes_it() -> None:
    agent, sidecar = socket.socketpair()
    connection = SidecarConnection(sidecar.detach(), decoder(RunHook))
    framing.write_frame(agent, encode(RunHook(hook="on_start", round=1, world_size=2)))
    assert connection.receive() == RunHook(hook="on_start", round=1, world_size=2)
    connection.send(UploadDone(job_id=1, size_bytes=10))
    assert framing.read_frame(agent) == encode(UploadDone(job_id=1, size_bytes=10))
    agent.close()
    assert connection.receive() is None
    connection._socket.close()


def test_a_stored_exception_can_be_loaded_with_the_run_key() -> None:
    store = MemoryStore()
    name = store_exception(KeyError("lr"), store, KEY)
    assert name is not None
    assert isinstance(load_sealed_pickle(lambda: store.get(name), KEY, purpose=name), KeyError)


def test_equal_exceptions_share_one_object() -> None:
    store = MemoryStore()
    errors = (KeyError("a"), KeyError("a"), KeyError("b"))
    assert len({store_exception(error, store, KEY) for error in errors}) == 2


def refuse(_key: str, _body: bytes) -> None:
    raise TransientStoreError("no answer")


@pytest.mark.parametrize("problem", ["it cannot be pickled", "the bucket refuses"])
def test_an_exception_that_cannot_be_stored_has_no_key(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, error = MemoryStore(), ValueError("odd")
    if problem == "it cannot be pickled":
        error.args = (threading.Lock(),)
    else:
        monkeypatch.setattr(store, "put", refuse)
    assert store_exception(error, store, KEY) is None
