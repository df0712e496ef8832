"""Debris: what was begun and not committed is found when its round is over, and only ours goes."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.debris import (
    PATIENCE_ROUNDS,
    abandoned,
    begun_among,
    discard,
    note,
    undeleted,
)
from spotfit.checkpoint.save import record
from spotfit.ledger import keys
from spotfit.store.memory import MemoryStore
from tests.unit.checkpoint.kept import part, saved


def remaining(store: MemoryStore) -> list[str]:
    return [found.key for found in store.list()]


# --- what is found -------------------------------------------------------------------------------


def test_a_name_is_abandoned_when_a_later_round_has_begun() -> None:
    store = MemoryStore()
    note(store, "made-1", 1, made=True)
    note(store, "made-2", 2, made=True)
    assert abandoned(store, kept=(), before=1) == ()
    assert abandoned(store, kept=(), before=2) == ("made-1",)
    assert abandoned(store, kept=("made-1",), before=3) == ("made-2",)


def test_of_what_was_dropped_that_is_left_of_which_anything_tells(tmp_path: Path) -> None:
    store = MemoryStore()
    note(store, "noted", 3, made=False)
    for name in ("told", "kept"):
        saved(store, tmp_path / name, part(name), x="1")
    assert undeleted(store, ("told", "gone", "noted")) == ("noted", "told")


def test_what_the_present_round_writes_to_is_not_abandoned(tmp_path: Path) -> None:
    store = MemoryStore()
    note(store, "c", 1, made=True)
    saved(store, tmp_path, part("c", round_number=4), x="1")
    assert abandoned(store, kept=(), before=4) == ()
    assert abandoned(store, kept=(), before=5) == ("c",)


def test_a_name_that_a_user_chose_has_time_to_be_used_again() -> None:
    """The next round saves the same step once more, and replaces what is there."""
    store = MemoryStore()
    note(store, "step-10", 1, made=False)
    assert abandoned(store, kept=(), before=1 + PATIENCE_ROUNDS) == ()
    assert abandoned(store, kept=(), before=2 + PATIENCE_ROUNDS) == ("step-10",)
    note(store, "step-10", 4, made=False)
    assert abandoned(store, kept=(), before=2 + PATIENCE_ROUNDS) == ()


def test_what_was_dropped_is_not_waited_for(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("c", round_number=1), x="1")
    assert abandoned(store, kept=(), before=2, dropped=("c",)) == ("c",)


def test_a_name_of_which_no_note_tells_is_taken_for_a_chosen_one(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("c", round_number=1), x="1")
    assert abandoned(store, kept=(), before=2) == ()
    assert abandoned(store, kept=(), before=2 + PATIENCE_ROUNDS) == ("c",)


def test_what_lies_there_and_is_nothing_of_ours_is_passed_over() -> None:
    store = MemoryStore()
    for key in ("notes.txt", "c/notes.txt", "c/1.other"):
        store.put(f"{keys.MANIFESTS}{key}", b"")
    assert abandoned(store, kept=(), before=99) == ()


def test_every_name_is_known_of_which_anything_is_left(tmp_path: Path) -> None:
    store = MemoryStore()
    note(store, "noted", 1, made=False)
    saved(store, tmp_path, part("saved"), x="1")
    store.put(f"{keys.MANIFESTS}notes.txt", b"")
    assert begun_among(remaining(store)) == {"noted", "saved"}


# --- what is deleted -----------------------------------------------------------------------------


def test_half_an_upload_goes_and_neighbours_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    note(store, "c-1", 1, made=True)
    store.put("c-1/half", b"x")
    saved(store, tmp_path, part("c-10"), x="1")
    store.put("c-1.txt", b"mine")
    discard(store, "c-1")
    assert remaining(store) == [keys.manifest("c-10", 1, 0), "c-1.txt", "c-10/x"]
    discard(store, "c-1")


def test_what_only_manifests_tell_of_goes_too(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("c", ranks=(0, 1)), x="1")
    discard(store, "c")
    assert remaining(store) == []


def test_what_users_wrote_by_themselves_stays() -> None:
    store = MemoryStore()
    store.put("models/best/x", b"1")
    record(store, replace(part("c"), at="models/best"))
    store.put("mine/x", b"1")
    record(store, replace(part("mine"), at="mine"))
    store.put("unknown/x", b"1")
    for name in ("c", "mine", "unknown"):
        discard(store, name)
    assert remaining(store) == ["mine/x", "models/best/x", "unknown/x"]
