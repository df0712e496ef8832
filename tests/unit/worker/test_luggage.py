"""Luggage in a user process: the node's copy serves as well as the bucket's, and no better."""

import json
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError, NotFoundError
from spotfit.ship.environment import RuntimeEnv
from spotfit.ship.luggage import function_key, pack
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN
from spotfit.worker.luggage import open_luggage

KEY = RunKey(b"k" * 32, RUN)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(RootUrl.parse("memory://worker-luggage"))


@pytest.fixture
def luggage(store: MemoryStore) -> dict[str, Any]:
    packed = pack(lambda: 5, None, runtime_env=RuntimeEnv(), key=KEY, store=store)
    told: dict[str, Any] = json.loads(encode(packed))
    return told


def test_it_comes_from_the_bucket(store: MemoryStore, luggage: dict[str, Any]) -> None:
    assert open_luggage(luggage, KEY, store, "").shipped().call() == 5


def test_the_node_s_copy_spares_the_bucket(
    store: MemoryStore, luggage: dict[str, Any], tmp_path: Path
) -> None:
    key = function_key(luggage["sha256"])
    (tmp_path / "luggage").mkdir()
    (tmp_path / "luggage" / luggage["sha256"]).write_bytes(store.get(key))
    store.delete(key)
    assert open_luggage(luggage, KEY, store, str(tmp_path)).shipped().call() == 5
    with pytest.raises(NotFoundError):
        open_luggage(luggage, KEY, store, "")


def test_a_copy_that_was_changed_is_not_loaded(
    store: MemoryStore, luggage: dict[str, Any], tmp_path: Path
) -> None:
    body = bytearray(store.get(function_key(luggage["sha256"])))
    body[-1] ^= 1
    (tmp_path / "luggage").mkdir()
    (tmp_path / "luggage" / luggage["sha256"]).write_bytes(body)
    with pytest.raises(IntegrityError):
        open_luggage(luggage, KEY, store, str(tmp_path))
