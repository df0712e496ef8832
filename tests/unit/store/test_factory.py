import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.store.factory import credentials_for_nodes, open_store, reopen_store
from spotfit.store.local import LocalStore, MemoryStore
from spotfit.store.objects import ObjectStore
from spotfit.store.url import RootUrl


def test_the_scheme_chooses_the_store(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path), LocalStore)
    assert isinstance(open_store("memory://x"), MemoryStore)
    for scheme in ("s3", "gs", "az"):
        assert isinstance(open_store(f"{scheme}://bucket/x"), ObjectStore)


def test_a_store_can_be_reopened_by_its_url(tmp_path: Path) -> None:
    for text in (str(tmp_path), "s3://bucket/x?region=eu-west-1", "memory://x/y"):
        assert open_store(open_store(text).url).url == open_store(RootUrl.parse(text)).url


def test_explicit_credentials_are_passed_to_nodes_but_not_in_the_url() -> None:
    keys = {"access_key_id": "a", "secret_access_key": "hush"}
    given = open_store("s3://bucket/runs", credentials=keys).subtree("run")
    assert "hush" not in given.url
    assert "hush" not in repr(given)
    for store in (given, reopen_store(given), pickle.loads(pickle.dumps(given))):
        assert isinstance(store, ObjectStore)
        assert store.credentials == keys
    assert json.loads(credentials_for_nodes(given)) == {"s3://bucket ": keys}


def test_without_credentials_nothing_is_passed_to_nodes(tmp_path: Path) -> None:
    for text in (str(tmp_path), "memory://x", "s3://bucket"):
        assert credentials_for_nodes(open_store(text)) == ""


def test_an_invalid_address_is_rejected() -> None:
    with pytest.raises(ConfigError):
        open_store("s5://bucket")


def test_no_driver_is_loaded_before_a_bucket_is_used(tmp_path: Path) -> None:
    script = f"""
import sys
from spotfit.store.factory import open_store
open_store({str(tmp_path)!r}).put("a", b"")
open_store("memory://x").put("a", b"")
open_store("s3://bucket")
assert not {{"obstore", "boto3", "fsspec", "pyarrow"}} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
