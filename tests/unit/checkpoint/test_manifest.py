"""Manifests, and completeness of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.manifest import (
    combine_digests,
    is_complete,
    latest_manifest_of,
    manifest_digest,
    manifests_of_all,
    newest_complete_manifests,
    read_manifest,
)
from spotfit.core.codec import encode
from spotfit.ledger import keys
from spotfit.model.events import ValidationRequest
from spotfit.model.leader_state import ReadyCheckpoint
from spotfit.store.local import LocalStore, MemoryStore
from spotfit.store.transfer import FileRecord
from spotfit.store.url import RootUrl
from tests.unit.checkpoint.saved_checkpoints import make_manifest, ready_in_store, save_checkpoint
from tests.unit.store.faulty_stores import DamagedResponses

BOTH = (0, 1)


def test_the_manifests_of_all_ranks_are_complete() -> None:
    assert is_complete([make_manifest(rank=0, ranks=BOTH), make_manifest(rank=1, ranks=BOTH)])
    assert is_complete([make_manifest(rank=2, ranks=(2,))])


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [make_manifest(rank=0, ranks=BOTH)],
        [make_manifest(rank=0, ranks=BOTH), make_manifest(rank=1, ranks=BOTH, report=1)],
        [make_manifest(rank=0, ranks=BOTH), make_manifest(rank=1, ranks=BOTH, round_number=2)],
        [make_manifest(rank=0, ranks=BOTH), make_manifest("other", rank=1, ranks=BOTH)],
        [make_manifest(rank=0, ranks=BOTH), make_manifest(rank=1, ranks=(1,))],
        [
            replace(make_manifest(rank=0, ranks=BOTH), step=5),
            replace(make_manifest(rank=1, ranks=BOTH), step=6),
        ],
    ],
)
def test_manifests_of_different_reports_are_incomplete(parts: list[object]) -> None:
    assert not is_complete(parts)  # type: ignore[arg-type]


def test_ready_checkpoints_are_complete_and_unknown(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in BOTH:
        save_checkpoint(
            store, tmp_path / str(rank), make_manifest("b", report=4, rank=rank, ranks=BOTH), x="12"
        )
    save_checkpoint(
        store, tmp_path / "half", make_manifest("half", report=5, rank=0, ranks=BOTH), x="1"
    )
    save_checkpoint(store, tmp_path / "old", make_manifest("old"), x="1")
    save_checkpoint(store, tmp_path / "a", make_manifest("a", report=1), x="1")
    ready = ready_in_store(store, known_names={"old"})
    assert all(each.manifests_digest for each in ready)
    assert [replace(each, manifests_digest="") for each in ready] == [
        ReadyCheckpoint(
            name="a", round=1, report_index=1, metrics={"loss": 0.5}, ranks=(0,), size_bytes=1
        ),
        ReadyCheckpoint(
            name="b", round=1, report_index=4, metrics={"loss": 0.5}, ranks=BOTH, size_bytes=4
        ),
    ]


def test_the_first_rank_decides_about_validation(tmp_path: Path) -> None:
    store, ranks = MemoryStore(), (2, 10)
    for rank in ranks:  # a listing has 10 before 2
        one = replace(
            make_manifest("c", rank=rank, ranks=ranks),
            validation=ValidationRequest(fn_kwargs={"rank": rank}),
        )
        save_checkpoint(store, tmp_path / str(rank), one, x="1")
    (ready,) = ready_in_store(store, known_names=())
    assert ready.validation == ValidationRequest(fn_kwargs={"rank": 2})


def test_a_ready_checkpoint_has_the_reason_of_the_save(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(
        store, tmp_path / "c", replace(make_manifest("c"), reason="an epoch has ended"), x="1"
    )
    (ready,) = ready_in_store(store, known_names=())
    assert ready.reason == "an epoch has ended"


def test_a_ready_checkpoint_has_its_custom_folder(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank, at in ((10, "a"), (2, "b")):
        one = replace(make_manifest("c", rank=rank, ranks=(2, 10)), custom_folder=at)
        save_checkpoint(store, tmp_path / at, one, x="1")
    (ready,) = ready_in_store(store, known_names=())
    assert ready.custom_folder == "b", "readers look there"


def test_invalid_manifests_are_ignored(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("good"), x="1")
    store.put(f"{keys.MANIFESTS}good/notes.txt", b"hello")
    store.put(f"{keys.MANIFESTS}cut/1-0.json", b'{"name":"cu')
    store.put(f"{keys.MANIFESTS}binary/1-0.json", b"\xff\xfe")
    store.put(f"{keys.MANIFESTS}stray.json", b"{}")
    store.put(f"{keys.MANIFESTS}moved/1-0.json", encode(make_manifest("elsewhere")))
    assert [one.name for one in ready_in_store(store, known_names=())] == ["good"]


def test_a_manifest_is_read_again_if_its_first_read_is_damaged(tmp_path: Path) -> None:
    store = DamagedResponses()
    save_checkpoint(store, tmp_path, make_manifest("a"), x="1")
    assert [one.name for one in ready_in_store(store, known_names=())] == ["a"]


def test_the_newest_complete_round_of_a_name_counts() -> None:
    first = [make_manifest(rank=rank, ranks=BOTH) for rank in BOTH]
    second = [make_manifest(round_number=2)]
    third = [make_manifest(round_number=3, rank=1, ranks=BOTH)]
    assert newest_complete_manifests([*third, *first, *second]) == tuple(second)
    assert newest_complete_manifests(third) == ()


def test_many_manifests_are_read(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in range(20):
        manifest = make_manifest(rank=rank, ranks=tuple(range(20)))
        store.put(keys.manifest("ck", 1, rank), encode(manifest))
    assert is_complete(manifests_of_all(store, ["ck"]))


def test_the_folder_defaults_to_the_name() -> None:
    assert make_manifest("ck").folder == "ck"
    assert replace(make_manifest("ck"), custom_folder="models/best").folder == "models/best"


def test_latest_manifest_of_reads_one_rank_only(tmp_path: Path) -> None:
    store = CountingStore()
    for rank in (1, 11):
        save_checkpoint(store, tmp_path / str(rank), make_manifest(rank=rank, ranks=(1, 11)), x="1")
    newest = save_checkpoint(store, tmp_path / "new", make_manifest(round_number=2, rank=1), x="2")
    assert latest_manifest_of(store, "ck", 1) == newest
    assert store.read == [keys.manifest("ck", 1, 1), keys.manifest("ck", 2, 1)]
    assert latest_manifest_of(store, "ck", 0) is None


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)


def test_a_manifest_under_an_invalid_key_is_ignored(tmp_path: Path) -> None:
    """Other writers can create objects whose keys spotfit rejects."""
    store = LocalStore(RootUrl.parse(tmp_path))
    assert read_manifest(store, ".spotfit/manifests/.spotfit-part-x/1-0.json") is None


def test_the_digest_covers_the_report_and_its_files_only() -> None:
    part = replace(make_manifest(), files=(FileRecord("a", 1, "0" * 64),))
    digest = manifest_digest(part)
    assert digest == manifest_digest(replace(part, metrics={"loss": 2.0}, reason="other"))
    others = (
        replace(part, report_index=9),
        replace(part, step=3),
        replace(part, custom_folder="b"),
        replace(part, files=(FileRecord("a", 1, "1" * 64),)),
        replace(part, files=(FileRecord("a", 1, "0" * 64, "source"),)),
    )
    assert digest not in map(manifest_digest, others)


def test_the_digest_of_a_checkpoint_needs_those_of_all_ranks() -> None:
    assert combine_digests({0: "a", 1: "b"}) == combine_digests({1: "b", 0: "a"}) != ""
    assert combine_digests({0: "b", 1: "a"}) != combine_digests({0: "a", 1: "b"})
    assert combine_digests({0: "a", 1: ""}) == combine_digests({}) == ""
