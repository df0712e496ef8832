"""Checkpoints of a run are listed, exported, and deleted after its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.client.stored_checkpoints import (
    CheckpointContent,
    CheckpointInfo,
    describe_checkpoint,
    export_checkpoint,
    list_checkpoints,
    remove_checkpoint,
)
from spotfit.core.errors import ConfigError, NotFoundError, RunNotFoundError
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitEnded, FitStarted
from spotfit.store.factory import open_store
from spotfit.testing.builders import RUN_ID, RUN_KEY, a_committed_checkpoint, a_spec, an_agent_id
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint
from tests.unit.checkpoint.snapshots import LARGE_PIECE_BYTES, random_bytes, upload_test_snapshot


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with a checkpoint of reported files, and two snapshots that share a tensor."""
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", RUN_KEY.to_text())
    url = str(tmp_path / "run")
    store = AuthenticatedStore(open_store(url), RUN_KEY)
    ledger = Ledger(store, RUN_ID, an_agent_id(0))
    save_checkpoint(store, tmp_path / "files", make_manifest("own"), x="1")
    frozen = random_bytes(1, LARGE_PIECE_BYTES)
    upload_test_snapshot(store, tmp_path / "s", "a", [frozen, random_bytes(2, 50)])
    upload_test_snapshot(store, tmp_path / "s", "b", [frozen, random_bytes(3, 50)], base="a")
    ledger.append(FitStarted(spec=a_spec(storage_url=url)), after=ledger.catch_up())
    saves: dict[str, dict[str, Any]] = {
        "own": {},
        "a": {"is_snapshot": True},  # entry of an early version, without a step
        "b": {"is_snapshot": True, "step": 5, "reason": "100 steps since the last save"},
    }
    for name, fields in saves.items():
        ledger.append(a_committed_checkpoint(name, **fields), after=ledger.catch_up())
    return url


def end(url: str) -> None:
    ledger = Ledger(AuthenticatedStore(open_store(url), RUN_KEY), RUN_ID, an_agent_id(0))
    ledger.append(FitEnded(outcome="finished", reason="all is done"), after=ledger.catch_up())


def test_all_checkpoints_are_described(url: str) -> None:
    own, _, latest = list_checkpoints(url)
    assert own == describe_checkpoint(url, "own") == CheckpointInfo("own", 0, {"loss": 1.0}, None)
    assert latest == CheckpointInfo("b", 0, {"loss": 1.0}, 5, "100 steps since the last save")
    assert describe_checkpoint(url, "") == latest._replace(
        content=CheckpointContent(5, 0, 1, 2, LARGE_PIECE_BYTES + 50, LARGE_PIECE_BYTES)
    )


def test_listing_reads_the_journal_and_only_missing_steps_from_checkpoints(url: str) -> None:
    store = open_store(url)
    for name in ("own", "a", "b"):
        for found in list(store.list(f".spotfit/manifests/{name}")):
            store.delete(found.key)
    own, old, latest = list_checkpoints(url)
    assert [own.read_error, latest.read_error] == ["", ""]
    assert "is missing" in old.read_error


def test_a_step_missing_in_the_journal_is_read(url: str) -> None:
    assert [info.step for info in list_checkpoints(url)] == [None, 5, 5]


def test_an_incomplete_checkpoint_has_a_read_error(url: str) -> None:
    open_store(url).delete("b/index-0.json")
    broken = describe_checkpoint(url, "b")
    assert "b/index-0.json" in broken.read_error
    assert isinstance(broken, CheckpointInfo)


def test_a_model_is_exported(url: str, tmp_path: Path) -> None:
    assert export_checkpoint(url, "", tmp_path / "out" / "m.safetensors") == "b"
    assert export_checkpoint(url, "a", tmp_path / "m.pt", full_state=True) == "a"
    model = torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert bytes(model["w1"].tolist()) == random_bytes(2, 50)
    assert (tmp_path / "out" / "m.safetensors").stat().st_size > LARGE_PIECE_BYTES


@pytest.mark.parametrize(
    ("name", "file", "everything", "reason"),
    [
        ("b", "", False, "is a directory"),
        ("b", "m.onnx", False, "does not select a file format"),
        ("b", "m.safetensors", True, "can contain only tensors"),
        ("b", "m.SAFETENSORS", True, "can contain only tensors"),
        ("own", "m.pt", False, "not a snapshot of a Checkpointer"),
    ],
)
def test_invalid_exports_are_refused(
    url: str, tmp_path: Path, name: str, file: str, *, everything: bool, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        export_checkpoint(url, name, tmp_path / file, full_state=everything)


def test_an_export_without_file_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="name of the output file is missing"):
        export_checkpoint(url, "b", Path())


@pytest.mark.parametrize("suffix", [".PT", ".SafeTensors"])
def test_suffixes_are_case_insensitive(url: str, tmp_path: Path, suffix: str) -> None:
    for name in (f"m{suffix}", f"m{suffix.lower()}"):
        export_checkpoint(url, "b", tmp_path / name)
    assert (tmp_path / f"m{suffix}").stat().st_size == (
        tmp_path / f"m{suffix.lower()}"
    ).stat().st_size


def test_a_deleted_checkpoint_is_missing_even_if_its_data_is_shared(url: str) -> None:
    end(url)
    store = open_store(url)
    handle = Checkpoint.from_store(store, "a")
    remove_checkpoint(url, "a")
    assert list(store.list("a")), "b shares it"
    with pytest.raises(ConfigError, match=r"Checkpoint a does not exist in"):
        handle.open_snapshot()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_unwritable_file_is_reported(url: str, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in the way").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: (File exists|Not a directory)"):
        export_checkpoint(url, "b", tmp_path / "in the way" / f"m{suffix}")


def test_a_checkpoint_is_found_by_its_requested_name(url: str, tmp_path: Path) -> None:
    ledger = Ledger(AuthenticatedStore(open_store(url), RUN_KEY), RUN_ID, an_agent_id(0))
    for n, name in ((2, "last@1-2"), (3, "last@1-3"), (4, "own@1-4")):
        save_checkpoint(ledger.store, tmp_path / name, make_manifest(name, report=n), x="1")
        ledger.append(a_committed_checkpoint(name, report_index=n), after=ledger.catch_up())
    assert describe_checkpoint(url, "last").name == "last@1-3"
    assert describe_checkpoint(url, "last@1-2").name == "last@1-2"
    assert describe_checkpoint(url, "own").name == "own", "exact names take precedence"


def test_a_missing_checkpoint_is_reported(url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no checkpoint c") as missing:
        describe_checkpoint(url, "c")
    assert missing.value.do == "Pass one of its checkpoints: own, a, b."
    with pytest.raises(RunNotFoundError):
        list_checkpoints(str(tmp_path / "nowhere"))


def test_a_checkpoint_is_deleted_only_after_the_end(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is active"):
        remove_checkpoint(url, "a")
    end(url)
    with pytest.raises(ConfigError, match="name of the checkpoint to delete is missing"):
        remove_checkpoint(url, "")
    assert remove_checkpoint(url, "a") == "a"
    assert [info.name for info in list_checkpoints(url)] == ["own", "b"]
    export_checkpoint(url, "b", tmp_path / "m.pt")
    assert remove_checkpoint(url, "b") == "b"
    assert not [found for found in open_store(url).list() if found.key.startswith(("a/", "b/"))]


def test_without_the_key_no_checkpoint_is_deleted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(url)
    monkeypatch.delenv("SPOTFIT_RUN_SECRET")
    with pytest.raises(ConfigError, match="a was not deleted: this computer has no key"):
        remove_checkpoint(url, "a")
    assert open_store(url).get("a/index-0.json")
