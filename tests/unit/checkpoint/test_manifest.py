"""A checkpoint is complete when all who promised files have told what they brought."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.manifest import (
    complete,
    manifest_of,
    manifests_of_all,
    newest_complete,
    ready_in,
)
from spotfit.core.codec import encode
from spotfit.ledger import keys
from spotfit.model.events import ValidationAsked
from spotfit.model.watch import Ready
from spotfit.store.memory import MemoryStore
from tests.unit.checkpoint.kept import part, saved

BOTH = (0, 1)


def test_all_parts_of_one_report_are_complete() -> None:
    assert complete([part(rank=0, ranks=BOTH), part(rank=1, ranks=BOTH)])
    assert complete([part(rank=2, ranks=(2,))])


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [part(rank=0, ranks=BOTH)],
        [part(rank=0, ranks=BOTH), part(rank=1, ranks=BOTH, report=1)],
        [part(rank=0, ranks=BOTH), part(rank=1, ranks=BOTH, round_number=2)],
        [part(rank=0, ranks=BOTH), part("other", rank=1, ranks=BOTH)],
        [part(rank=0, ranks=BOTH), part(rank=1, ranks=(1,))],
        [replace(part(rank=0, ranks=BOTH), step=5), replace(part(rank=1, ranks=BOTH), step=6)],
    ],
)
def test_parts_of_different_reports_are_not(parts: list[object]) -> None:
    assert not complete(parts)  # type: ignore[arg-type]


def test_a_successor_finds_what_its_predecessor_did_not_commit(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in BOTH:
        saved(store, tmp_path / str(rank), part("b", report=4, rank=rank, ranks=BOTH), x="12")
    saved(store, tmp_path / "half", part("half", report=5, rank=0, ranks=BOTH), x="1")
    saved(store, tmp_path / "old", part("old"), x="1")
    saved(store, tmp_path / "a", part("a", report=1), x="1")
    assert ready_in(store, known={"old"}) == [
        Ready("a", 1, 1, {"loss": 0.5}, (0,), 1),
        Ready("b", 1, 4, {"loss": 0.5}, BOTH, 4),
    ]


def test_whether_what_it_finds_is_to_be_validated_is_up_to_the_first_rank(tmp_path: Path) -> None:
    store, ranks = MemoryStore(), (2, 10)
    for rank in ranks:  # a listing has 10 before 2
        one = replace(part("c", rank=rank, ranks=ranks), validation=ValidationAsked({"rank": rank}))
        saved(store, tmp_path / str(rank), one, x="1")
    (ready,) = ready_in(store, known=())
    assert ready.validation == ValidationAsked({"rank": 2})


def test_a_successor_tells_why_it_was_saved_as_its_predecessor_would_have(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path / "c", replace(part("c"), why="an epoch has ended"), x="1")
    (ready,) = ready_in(store, known=())
    assert ready.why == "an epoch has ended"


def test_a_successor_tells_where_a_user_has_put_it(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank, at in ((10, "a"), (2, "b")):
        one = replace(part("c", rank=rank, ranks=(2, 10)), at=at)
        saved(store, tmp_path / at, one, x="1")
    (ready,) = ready_in(store, known=())
    assert ready.at == "b", "where whoever reads it looks"


def test_garbage_beside_manifests_is_passed_over(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("good"), x="1")
    store.put(f"{keys.MANIFESTS}good/notes.txt", b"hello")
    store.put(f"{keys.MANIFESTS}cut/1-0.json", b'{"name":"cu')
    store.put(f"{keys.MANIFESTS}binary/1-0.json", b"\xff\xfe")
    store.put(f"{keys.MANIFESTS}stray.json", b"{}")
    store.put(f"{keys.MANIFESTS}moved/1-0.json", encode(part("elsewhere")))
    assert [one.name for one in ready_in(store, known=())] == ["good"]


def test_of_a_name_used_in_two_rounds_the_newest_complete_counts() -> None:
    first = [part(rank=rank, ranks=BOTH) for rank in BOTH]
    second = [part(round_number=2)]
    third = [part(round_number=3, rank=1, ranks=BOTH)]
    assert newest_complete([*third, *first, *second]) == tuple(second)
    assert newest_complete(third) == ()


def test_many_manifests_are_read_as_surely_as_few(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in range(20):
        manifest = part(rank=rank, ranks=tuple(range(20)))
        store.put(keys.manifest("ck", 1, rank), encode(manifest))
    assert complete(manifests_of_all(store, ["ck"]))


def test_where_files_lie_is_the_name_unless_said() -> None:
    assert part("ck").folder == "ck"
    assert replace(part("ck"), at="models/best").folder == "models/best"


def test_one_rank_s_part_is_found_and_those_of_others_are_not_read(tmp_path: Path) -> None:
    store = CountsReads()
    for rank in (1, 11):
        saved(store, tmp_path / str(rank), part(rank=rank, ranks=(1, 11)), x="1")
    newest = saved(store, tmp_path / "new", part(round_number=2, rank=1), x="2")
    assert manifest_of(store, "ck", 1) == newest
    assert store.read == [keys.manifest("ck", 1, 1), keys.manifest("ck", 2, 1)]
    assert manifest_of(store, "ck", 0) is None


class CountsReads(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)
