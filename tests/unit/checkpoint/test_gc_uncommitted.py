"""Deletion of uploads that were never committed."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.gc import (
    ABANDONED_GRACE_ROUNDS,
    checkpoint_names_in,
    delete_uncommitted,
    find_abandoned,
    partially_deleted,
    write_name_marker,
)
from spotfit.checkpoint.writer import save_existing_files
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_KEY
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint


def remaining(store: MemoryStore) -> list[str]:
    return [found.key for found in store.list()]


# --- scan ----------------------------------------------------------------------------------------


def test_a_generated_name_is_abandoned_in_the_next_round() -> None:
    store = MemoryStore()
    write_name_marker(store, "made-1", 1, generated=True)
    write_name_marker(store, "made-2", 2, generated=True)
    assert find_abandoned(store, retained=(), before_round=1) == ()
    assert find_abandoned(store, retained=(), before_round=2) == ("made-1",)
    assert find_abandoned(store, retained=("made-1",), before_round=3) == ("made-2",)


def test_dropped_checkpoints_with_remains_are_partially_deleted(tmp_path: Path) -> None:
    store = MemoryStore()
    write_name_marker(store, "noted", 3, generated=False)
    for name in ("saved", "kept"):
        save_checkpoint(store, tmp_path / name, make_manifest(name), x="1")
    assert partially_deleted(store, ("saved", "gone", "noted")) == ("noted", "saved")


def test_names_of_the_current_round_are_not_abandoned(tmp_path: Path) -> None:
    store = MemoryStore()
    write_name_marker(store, "c", 1, generated=True)
    save_checkpoint(store, tmp_path, make_manifest("c", round_number=4), x="1")
    assert find_abandoned(store, retained=(), before_round=4) == ()
    assert find_abandoned(store, retained=(), before_round=5) == ("c",)


def test_a_chosen_name_is_abandoned_after_the_grace_rounds() -> None:
    """The next round may save the same step again under that name."""
    store = MemoryStore()
    write_name_marker(store, "step-10", 1, generated=False)
    assert find_abandoned(store, retained=(), before_round=1 + ABANDONED_GRACE_ROUNDS) == ()
    assert find_abandoned(store, retained=(), before_round=2 + ABANDONED_GRACE_ROUNDS) == (
        "step-10",
    )
    write_name_marker(store, "step-10", 4, generated=False)
    assert find_abandoned(store, retained=(), before_round=2 + ABANDONED_GRACE_ROUNDS) == ()


def test_a_dropped_name_has_no_grace_rounds(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("c", round_number=1), x="1")
    assert find_abandoned(store, retained=(), before_round=2, dropped=("c",)) == ("c",)


def test_a_name_without_marker_counts_as_chosen(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("c", round_number=1), x="1")
    assert find_abandoned(store, retained=(), before_round=2) == ()
    assert find_abandoned(store, retained=(), before_round=2 + ABANDONED_GRACE_ROUNDS) == ("c",)


def test_foreign_objects_are_ignored() -> None:
    store = MemoryStore()
    for key in ("notes.txt", "c/notes.txt", "c/1.other"):
        store.put(f"{keys.MANIFESTS}{key}", b"")
    assert find_abandoned(store, retained=(), before_round=99) == ()


def test_checkpoint_names_include_all_remains(tmp_path: Path) -> None:
    store = MemoryStore()
    write_name_marker(store, "noted", 1, generated=False)
    save_checkpoint(store, tmp_path, make_manifest("saved"), x="1")
    store.put(f"{keys.MANIFESTS}notes.txt", b"")
    assert checkpoint_names_in(remaining(store)) == {"noted", "saved"}


# --- deletion ------------------------------------------------------------------------------------


def test_a_partial_upload_is_deleted_and_other_checkpoints_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    write_name_marker(store, "c-1", 1, generated=True)
    store.put("c-1/half", b"x")
    save_checkpoint(store, tmp_path, make_manifest("c-10"), x="1")
    store.put("c-1.txt", b"custom")
    delete_uncommitted(store, "c-1")
    assert remaining(store) == [keys.manifest("c-10", 1, 0), "c-1.txt", "c-10/x"]
    delete_uncommitted(store, "c-1")


def test_files_without_name_marker_are_deleted(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("c", ranks=(0, 1)), x="1")
    delete_uncommitted(store, "c")
    assert remaining(store) == []


def test_files_written_by_users_stay() -> None:
    store = MemoryStore()
    store.put("models/best/x", b"1")
    save_existing_files(store, replace(make_manifest("c"), custom_folder="models/best"))
    store.put("custom/x", b"1")
    save_existing_files(store, replace(make_manifest("custom"), custom_folder="custom"))
    store.put("unknown/x", b"1")
    for name in ("c", "custom", "unknown"):
        delete_uncommitted(store, name)
    assert remaining(store) == ["custom/x", "models/best/x", "unknown/x"]


def test_a_name_marker_of_the_internal_folder_deletes_nothing_else() -> None:
    store = MemoryStore()
    store.put(".spotfit/journal/0.json", b"1")
    write_name_marker(store, ".spotfit", 1, generated=True)
    delete_uncommitted(store, ".spotfit")
    assert remaining(store) == [".spotfit/journal/0.json"]


def test_a_forged_name_marker_deletes_nothing() -> None:
    name = "own-folder"
    plain = MemoryStore()
    plain.put(f"{name}/file", b"x")
    plain.put(keys.name_marker(name, 1, generated=True), b"")
    store = AuthenticatedStore(plain, RUN_KEY)
    assert find_abandoned(store, retained=(), before_round=2) == (name,)
    delete_uncommitted(store, name)
    assert remaining(plain) == [f"{name}/file"]
    write_name_marker(store, name, 1, generated=True)
    delete_uncommitted(store, name)
    assert remaining(plain) == [], "an authentic one deletes the files"
