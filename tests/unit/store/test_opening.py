import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.store.local import LocalStore
from spotfit.store.memory import MemoryStore
from spotfit.store.objects import ObjectStore
from spotfit.store.opening import keys_for_machines, open_store, reopened
from spotfit.store.url import RootUrl


def test_the_scheme_chooses_the_store(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path), LocalStore)
    assert isinstance(open_store("memory://x"), MemoryStore)
    for scheme in ("s3", "gs", "az"):
        assert isinstance(open_store(f"{scheme}://bucket/x"), ObjectStore)


def test_a_store_is_opened_again_by_its_url(tmp_path: Path) -> None:
    for text in (str(tmp_path), "s3://bucket/x?region=eu-west-1", "memory://x/y"):
        assert open_store(open_store(text).url).url == open_store(RootUrl.parse(text)).url


def test_credentials_that_were_given_go_along_but_not_in_the_address() -> None:
    keys = {"access_key_id": "a", "secret_access_key": "hush"}
    given = open_store("s3://bucket/runs", keys=keys).under("run")
    assert "hush" not in given.url
    assert "hush" not in repr(given)
    for store in (given, reopened(given), pickle.loads(pickle.dumps(given))):
        assert isinstance(store, ObjectStore)
        assert store.keys == keys
    assert json.loads(keys_for_machines(given)) == {"s3://bucket ": keys}


def test_where_nothing_was_given_nothing_goes_along(tmp_path: Path) -> None:
    for text in (str(tmp_path), "memory://x", "s3://bucket"):
        assert keys_for_machines(open_store(text)) == ""


def test_nonsense_is_refused_at_once() -> None:
    with pytest.raises(ConfigError):
        open_store("s5://bucket")


def test_no_driver_is_loaded_before_a_bucket_is_used(tmp_path: Path) -> None:
    story = f"""
import sys
from spotfit.store.opening import open_store
open_store({str(tmp_path)!r}).put("a", b"")
open_store("memory://x").put("a", b"")
open_store("s3://bucket")
assert not {{"obstore", "boto3", "fsspec", "pyarrow"}} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", story], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
