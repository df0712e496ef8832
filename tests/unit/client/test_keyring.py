"""Run keys are stored for their owner only."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.client import keyring as keyring_module
from spotfit.client.keyring import RunKeyring
from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.host import machine
from spotfit.ledger import keys
from spotfit.model.events import FitStarted
from spotfit.security.object_mac import ObjectMac
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN_ID, a_spec, an_entry

KEY = RunKey(b"k" * 32, RUN_ID)
URL = "/runs/mine"


def test_a_created_key_is_found_by_other_processes(tmp_path: Path) -> None:
    created = RunKeyring(tmp_path / "keys").create(RUN_ID, url=URL)
    assert RunKeyring(tmp_path / "keys").find(RUN_ID) == created
    assert RunKeyring(tmp_path / "keys").find(RunId("f" * 32)) is None


def test_every_run_has_a_different_key(tmp_path: Path) -> None:
    keyring = RunKeyring(tmp_path)
    assert keyring.create(RUN_ID, url=URL) != keyring.create(RunId("f" * 32), url=URL)


def test_only_the_owner_can_read_the_key(tmp_path: Path) -> None:
    directory = tmp_path / "home" / "keys"
    RunKeyring(directory).create(RUN_ID, url=URL)
    assert stat.S_IMODE((directory / RUN_ID).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_environment_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunKeyring(tmp_path).create(RUN_ID, url=URL)
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", KEY.to_text())
    assert RunKeyring(tmp_path).find(RUN_ID) == KEY


def test_the_environment_applies_only_to_the_run_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id that is looked up was read from a bucket."""
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", KEY.to_text())
    assert RunKeyring(tmp_path).find(RUN_ID) is None
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    assert RunKeyring(tmp_path).find(RunId("f" * 32)) is None


def test_keys_are_stored_in_spotfit_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path))
    RunKeyring().create(RUN_ID, url=URL)
    assert (tmp_path / "keys" / RUN_ID).is_file()


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "a/b", ""])
def test_a_run_id_with_a_path_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="The run's id"):
        RunKeyring(tmp_path).find(RunId(run_id))


def states_of(keyring: RunKeyring, *, age_s: float = 2 * 3600.0) -> list[tuple[str, str]]:
    """The states of the keys `age_s` after their addresses were recorded."""
    return [(key.state, key.detail) for key in keyring.list_keys(now=time.time() + age_s)]


def test_a_key_is_used_while_its_run_exists(tmp_path: Path) -> None:
    keyring, run = RunKeyring(tmp_path / "keys"), tmp_path / "runs" / "mine"
    keyring.create(RUN_ID, url=str(run))
    entry = an_entry(FitStarted(spec=a_spec()))
    open_store(run).put(keys.entry(0), encode(entry))
    assert states_of(keyring) == [("used", "the run exists")]


def test_a_key_is_unused_once_the_folder_of_its_run_is_deleted(tmp_path: Path) -> None:
    keyring, runs = RunKeyring(tmp_path / "keys"), tmp_path / "runs"
    keyring.create(RUN_ID, url=str(runs / "mine"))
    open_store(runs).put("other/model", b"")
    assert states_of(keyring) == [("unused", "its folder was deleted")]


def test_the_key_of_a_fit_that_is_starting_is_not_unused(tmp_path: Path) -> None:
    """The key is stored before the first object of the run."""
    keyring, runs = RunKeyring(tmp_path / "keys"), tmp_path / "runs"
    keyring.create(RUN_ID, url=str(runs / "mine"))
    open_store(runs).put("other/model", b"")
    detail = "fit() was called less than an hour ago"
    assert states_of(keyring, age_s=60.0) == [("unknown", detail)]


def test_the_folder_above_a_run_is_looked_up_on_the_same_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: dict[str, MemoryStore] = {}

    def open_memory(url: str | RootUrl) -> MemoryStore:
        return servers.setdefault(str(url), MemoryStore())

    monkeypatch.setattr(keyring_module, "open_store", open_memory)
    options = "?endpoint_override=minio:9000&scheme=http"
    open_memory(f"s3://bucket/runs{options}").put("other/model", b"")
    keyring = RunKeyring(tmp_path)
    keyring.create(RUN_ID, url=f"s3://bucket/runs/mine{options}")
    assert states_of(keyring) == [("unused", "its folder was deleted")]


def test_a_key_is_kept_while_files_of_its_run_are_left(tmp_path: Path) -> None:
    keyring, run = RunKeyring(tmp_path / "keys"), tmp_path / "runs" / "mine"
    keyring.create(RUN_ID, url=str(run))
    open_store(run).put("checkpoint_1/model", b"")
    assert states_of(keyring) == [("used", "its folder has files, but no journal")]


def test_a_key_whose_storage_is_not_mounted_is_not_unused(tmp_path: Path) -> None:
    keyring, runs = RunKeyring(tmp_path / "keys"), tmp_path / "runs"
    keyring.create(RUN_ID, url=str(runs / "mine"))
    runs.mkdir()
    assert states_of(keyring) == [("unknown", f"{runs} is empty or cannot be reached")]


def test_a_key_without_the_address_of_its_run_is_not_unused(tmp_path: Path) -> None:
    keyring = RunKeyring(tmp_path)
    keyring.create(RUN_ID, url=URL)
    (tmp_path / f"{RUN_ID}.url").unlink()
    assert states_of(keyring) == [("unknown", "it was stored by an earlier version")]
    keyring.record_url(RUN_ID, URL)
    assert [key.url for key in keyring.list_keys(now=time.time())] == [URL]


def test_a_key_is_used_while_its_run_is_at_an_earlier_address(tmp_path: Path) -> None:
    """The folder that `fit()` was called with later was a copy, or forged."""
    keyring, runs = RunKeyring(tmp_path / "keys"), tmp_path / "runs"
    keyring.create(RUN_ID, url=str(runs / "mine"))
    open_store(runs / "mine").put(keys.entry(0), encode(an_entry(FitStarted(spec=a_spec()))))
    keyring.record_url(RUN_ID, str(runs / "copy"))
    assert [(key.state, key.url) for key in keyring.list_keys(now=time.time())] == [
        ("used", str(runs / "mine"))
    ]
    open_store(runs).delete(f"mine/{keys.entry(0)}")
    open_store(runs).put("other/model", b"")
    assert states_of(keyring) == [("unused", "its folder was deleted")]


def test_a_key_of_a_directory_of_another_computer_is_not_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computers may share the home directory, and have other files at the same path."""
    keyring, runs = RunKeyring(tmp_path / "keys"), tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(machine, "hostname", lambda: "node-1")
        keyring.create(RUN_ID, url=str(runs / "mine"))
    open_store(runs).put("other/model", b"")
    assert states_of(keyring) == [("unknown", "it is a directory of node-1")]


def test_the_storage_of_a_bucket_is_looked_up_on_the_same_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_recorded(url: str) -> Store:
        opened.append(url)
        return MemoryStore()

    monkeypatch.setattr(keyring_module, "open_store", open_recorded)
    keyring = RunKeyring(tmp_path)
    server = "?endpoint_override=localhost:9000&scheme=http"
    keyring.create(RUN_ID, url=f"s3://bucket/runs/mine{server}")
    parent = f"s3://bucket/runs{server}"
    assert states_of(keyring) == [("unknown", f"{parent} is empty or cannot be reached")]
    assert opened[-1] == parent


@pytest.mark.parametrize(
    ("has_key", "expected"),
    [
        (True, ("unused", "another run was started in its folder")),
        (False, ("unknown", "its folder has a run that this user did not start")),
    ],
)
def test_a_key_is_unused_once_this_user_has_started_another_run_in_its_folder(
    tmp_path: Path, has_key: bool, expected: tuple[str, str]
) -> None:
    keyring, store, other = RunKeyring(tmp_path / "keys"), open_store(tmp_path / "run"), "f" * 32
    keyring.create(RUN_ID, url=store.url)
    key = keyring.create(RunId(other), url=URL) if has_key else RunKey(b"x" * 32, RunId(other))
    entry = replace(an_entry(FitStarted(spec=a_spec())), run_id=RunId(other))
    store.put(keys.entry(0), ObjectMac(key).add(keys.entry(0), encode(entry)))
    assert expected in states_of(keyring)


def test_other_files_are_no_keys(tmp_path: Path) -> None:
    RunKeyring(tmp_path).create(RUN_ID, url=URL)
    for name in (".DS_Store", "a file~"):
        (tmp_path / name).touch()
    assert len(states_of(RunKeyring(tmp_path))) == 1


def test_a_removed_key_leaves_no_file(tmp_path: Path) -> None:
    keyring = RunKeyring(tmp_path)
    keyring.create(RUN_ID, url=URL)
    keyring.remove(RUN_ID)
    assert list(tmp_path.iterdir()) == []
