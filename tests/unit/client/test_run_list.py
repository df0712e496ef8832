"""Runs below a storage path are found and summarized without listing their objects."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from spotfit.client.run_list import ListedRun, list_runs
from spotfit.core.codec import encode
from spotfit.core.errors import StoreError
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitEnded, FitStarted, JournalEvent, LeaderElected, RoundOpened
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    RUN_KEY,
    a_committed_checkpoint,
    a_round,
    a_spec,
    an_agent_id,
)

LEADER = an_agent_id(0)


@pytest.fixture(params=["directory", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    is_directory = request.param == "directory"
    return str(tmp_path / "runs") if is_directory else f"memory://{uuid.uuid4().hex}/runs"


def write_run(root: str, name: str, *events: JournalEvent, store: Store | None = None) -> None:
    store = store or open_store(f"{root}/{name}")
    ledger = Ledger(store, RUN_ID, LEADER, wall_ms=lambda: 1_700_000_000_000)
    for event in (FitStarted(spec=a_spec(name=name, storage_url=store.url)), *events):
        ledger.append(event, after=ledger.catch_up())


def test_all_runs_are_listed_by_name_with_their_state(root: str) -> None:
    saved = a_committed_checkpoint("step-5", is_snapshot=True, step=5)
    write_run(root, "b", RoundOpened(round=a_round()), saved)
    write_run(root, "a", FitEnded(outcome="failed", reason="no", metrics={"step": 7}))
    write_run(root, "a-1")
    open_store(root).put("data/train.bin", b"no run")
    open_store(root).put("notes.txt", b"no folder")
    runs = {run.name: run for run in list_runs(root)}
    assert {name: run.state for name, run in runs.items()} == {
        "a": "failed",
        "a-1": "waiting",
        "b": "running",
    }
    assert (runs["b"].step, runs["b"].checkpoint) == (5, "step-5")
    assert (runs["a"].step, runs["a"].reason) == (7, "no")
    assert runs["b"].started_at_ms == 1_700_000_000_000
    assert (runs["b"].ended_at_ms, runs["a"].ended_at_ms) == (0, 1_700_000_000_000)
    assert (runs["b"].run_id, runs["b"].provisioner) == (RUN_ID, "local")
    assert runs["a"].url == open_store(f"{root}/a").url


def test_the_step_of_an_active_run_is_the_last_reported_one(root: str) -> None:
    store = open_store(f"{root}/a")
    elected = LeaderElected(leader=LEADER, epoch=1, coordinator_address="h:1")
    write_run(root, "a", elected, RoundOpened(round=a_round()))
    report = {"round": 1, "report_index": 0, "checkpoint": None, "metrics": {"step": 12}}
    store.put(keys.reports(LEADER, 0), encode(report) + b"\n")
    [run] = list_runs(root)
    assert run.step == 12


def test_a_damaged_journal_is_listed_as_unreadable(root: str) -> None:
    write_run(root, "b")
    open_store(f"{root}/a").put(keys.entry(0), b"{")
    first, second = list_runs(root)
    assert (first.name, first.state, second.state) == ("a", "unreadable", "waiting")
    assert "cannot be decoded" in first.reason


def test_a_forged_time_is_no_error_of_the_list(root: str) -> None:
    write_run(root, "a")
    body = open_store(f"{root}/a").get(keys.entry(0))
    forged = body.replace(b"1700000000000", b"9" * 400)
    open_store(f"{root}/b").put(keys.entry(0), forged)
    assert [run.state for run in list_runs(root)] == ["waiting", "unreadable"]


def test_keys_that_no_run_writes_do_not_repeat_a_folder(root: str) -> None:
    write_run(root, "a")
    write_run(root, "a0")
    open_store(root).put("a/\U0010ffff\U0010ffff", b"sorted behind all other characters")
    assert [run.name for run in islice(list_runs(root), 3)] == ["a", "a0"]


def test_a_run_is_verified_with_its_key(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(root, "a", store=AuthenticatedStore(open_store(f"{root}/a"), RUN_KEY))
    [without_key] = list_runs(root)
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", RUN_KEY.to_text())
    [with_key] = list_runs(root)
    assert (without_key.is_verified, with_key.is_verified) == (False, True)
    assert without_key.state == with_key.state == "waiting"


def test_the_directory_of_a_run_lists_this_run(root: str) -> None:
    write_run(root, "a")
    [run] = list_runs(f"{root}/a")
    assert (run.name, run.state) == ("a", "waiting")


def test_a_path_without_runs_has_none(root: str) -> None:
    assert list(list_runs(root)) == []


def test_a_file_as_storage_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file cannot be listed: Not a directory"):
        list(list_runs(tmp_path / "file"))


def test_the_objects_of_a_run_in_a_bucket_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    root = f"memory://{uuid.uuid4().hex}/runs"
    for name in ("a", "b"):
        write_run(root, name, FitEnded(outcome="finished"))
        for n in range(100):
            open_store(f"{root}/{name}").put(f"checkpoint/{n}", b"")
    listed: list[ObjectInfo] = []
    list_objects = MemoryStore.list

    def recorded(self: MemoryStore, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        for info in list_objects(self, prefix, after=after):
            listed.append(info)
            yield info

    monkeypatch.setattr(MemoryStore, "list", recorded)
    runs: list[ListedRun] = list(list_runs(root))
    assert len(runs) == 2
    assert len(listed) == 2, "the first object of each folder"
