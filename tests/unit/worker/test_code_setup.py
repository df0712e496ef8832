"""open_code_bundle: reads and verifies the bundle from the node or the bucket."""

import json
from pathlib import Path
from typing import Any

import pytest

from spotfit.code.code_bundle import payload_key, upload_code_bundle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError, NotFoundError
from spotfit.security.run_key import RunKey
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN_ID
from spotfit.worker.code_setup import open_code_bundle

KEY = RunKey(b"k" * 32, RUN_ID)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(RootUrl.parse("memory://worker-bundle"))


@pytest.fixture
def bundle(store: MemoryStore) -> dict[str, Any]:
    packed = upload_code_bundle(lambda: 5, None, runtime_env=RuntimeEnv(), key=KEY, store=store)
    plain: dict[str, Any] = json.loads(encode(packed))
    return plain


def test_the_bundle_is_read_from_the_bucket(store: MemoryStore, bundle: dict[str, Any]) -> None:
    assert open_code_bundle(bundle, KEY, store, "").load_function().call() == 5


def test_the_copy_of_the_node_is_preferred(
    store: MemoryStore, bundle: dict[str, Any], tmp_path: Path
) -> None:
    key = payload_key(bundle["sha256"])
    (tmp_path / "code_bundle").mkdir()
    (tmp_path / "code_bundle" / bundle["sha256"]).write_bytes(store.get(key))
    store.delete(key)
    assert open_code_bundle(bundle, KEY, store, str(tmp_path)).load_function().call() == 5
    with pytest.raises(NotFoundError):
        open_code_bundle(bundle, KEY, store, "")


def test_a_modified_copy_is_rejected(
    store: MemoryStore, bundle: dict[str, Any], tmp_path: Path
) -> None:
    body = bytearray(store.get(payload_key(bundle["sha256"])))
    body[-1] ^= 1
    (tmp_path / "code_bundle").mkdir()
    (tmp_path / "code_bundle" / bundle["sha256"]).write_bytes(body)
    with pytest.raises(IntegrityError):
        open_code_bundle(bundle, KEY, store, str(tmp_path))
