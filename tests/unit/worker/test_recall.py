"""A group goes on from the newest state that all of its ranks can read."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.relay import LANE
from spotfit.checkpoint.saved import InMemory, Opened, Saved, Wanted, at_once, open_saved
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Piece, write_index
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.frameworks.torch.launched import LaunchedGroup
from spotfit.host.clocks import SystemClock
from spotfit.model.ranks import Ranks
from spotfit.store.memory import MemoryStore
from spotfit.worker.handover import IN_MEMORY
from spotfit.worker.local import LocalSession
from spotfit.worker.local_snapshots import LocalSnapshots
from spotfit.worker.recall import Gather, Judge, Planned, Recall
from tests.unit.checkpoint.snapshots import BIG, brought, bytes_of, filled
from tests.unit.frameworks.torch.ranks import on_ranks


class Shelf:
    """What a run has saved, by name; None is no snapshot, an error is damage."""

    def __init__(self, memory: Saved | None = None, **kept: Saved | IntegrityError | None) -> None:
        self.memory = memory
        self.kept = kept
        self.mistrusted: list[str] = []
        self.begun_from = next(iter(kept), None)

    def open_memory(self) -> Saved | None:
        return self.memory

    def open(self, name: str) -> Saved | None:
        found = self.kept[name]
        if isinstance(found, IntegrityError):
            raise found
        return found

    def reopen(self, opened: Opened) -> Saved | None:
        return self.memory if opened.name == IN_MEMORY else self.open(opened.name)

    def earlier(self) -> list[str]:
        return [*self.kept][1:]

    def committed(self) -> list[str]:
        return [*self.kept]

    def mistrust(self, name: str) -> None:
        self.mistrusted.append(name)


@pytest.fixture
def a_state(tmp_path: Path) -> Callable[[str], Saved]:
    def state(name: str) -> Saved:
        segment = filled(tmp_path / name.replace(" ", "-"), [b"a tensor"])
        return Saved([InMemory(Segment.open(segment))], name)

    return state


class Yielding(SystemClock):
    """Lets the others work instead of waiting."""

    def wait(self, seconds: float) -> None:
        os.sched_yield()


def found_in(
    shelf: Any,
    *,
    broken: tuple[str, ...] = (),
    told: str | None = None,
    saved_since: bool = False,
    judge: Judge = lambda _: None,
) -> str | None:
    """Where all is read but what is `broken`; another rank finds what it has `told` of."""

    def plan(saved: Saved) -> Planned:
        if saved.name in broken:
            raise IntegrityError(f"{saved.name} is torn")
        return Planned([])

    def gathered(mine: Any) -> list[Any]:
        return [mine, told] if mine is None or isinstance(mine, str) else [mine]

    context = LocalSession("run").context
    recall = Recall(shelf, context, gather=gathered, broadcast=lambda mine: mine, clock=Yielding())
    found = recall.newest(plan, judge, saved_since=saved_since)
    return found.name if found else None


def test_memory_comes_first_and_then_the_latest_checkpoint(
    a_state: Callable[[str], Saved],
) -> None:
    kept = {"b": a_state("b"), "a": a_state("a")}
    assert found_in(Shelf(a_state(IN_MEMORY), **kept)) == IN_MEMORY
    assert found_in(Shelf(**kept)) == "b"
    assert found_in(Shelf()) is None


def test_what_the_round_began_from_is_passed_over_once_it_has_saved(
    a_state: Callable[[str], Saved],
) -> None:
    shelf = Shelf(a_state(IN_MEMORY), c=a_state("c"), b=a_state("b"))
    shelf.begun_from = "b"
    assert found_in(shelf, saved_since=True) == "c"


def test_damage_leads_to_an_earlier_one_and_is_remembered(
    a_state: Callable[[str], Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = Shelf(a_state(IN_MEMORY), c=IntegrityError("gone"), b=a_state("b"), a=a_state("a"))
    assert found_in(shelf, broken=(IN_MEMORY, "b")) == "a"
    assert shelf.mistrusted == ["c", "b"]
    assert capsys.readouterr().err.count("checkpoint.broken") == 3


def test_one_rank_that_cannot_read_is_enough(a_state: Callable[[str], Saved]) -> None:
    with pytest.raises(IntegrityError, match="can be read any more"):
        found_in(Shelf(b=a_state("b")), told="a byte is wrong")


def test_reports_of_the_users_own_are_passed_over(a_state: Callable[[str], Saved]) -> None:
    assert found_in(Shelf(b=None, a=a_state("a"))) == "a"


def test_without_a_checkpoint_torn_memory_means_to_begin(a_state: Callable[[str], Saved]) -> None:
    assert found_in(Shelf(a_state(IN_MEMORY)), broken=(IN_MEMORY,)) is None


# --- several ranks of a machine ------------------------------------------------------------------

RANKS = 2
BODIES = [[bytes_of(10 * rank + n, BIG + n) for n in range(3)] for rank in range(RANKS)]
"""Of each rank."""

WHOLE = {*BODIES[0], *BODIES[1], bytes_of(100, BIG), bytes_of(101, BIG)}
"""Of the first checkpoint."""


class Counting(MemoryStore):
    """Which objects were asked for, and how often; and what lay in shared memory then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.shared: set[str] = set()
        self._segments = folder / "segments"

    def get(self, key: str) -> bytes:
        self.asked[key] += 1
        self.shared |= {path.suffix for path in self._segments.glob("*")}
        return super().get(key)


class Desk(LocalSnapshots):
    """One rank's, of a run that has committed these checkpoints."""

    def __init__(self, rank: int, folder: Path, store: MemoryStore, names: list[str]) -> None:
        super().__init__(Ranks(rank, RANKS, rank, RANKS), lambda value: value, lambda *_: None)
        self.__dict__["_root"] = folder
        self.__dict__["_store"] = store
        self._names = names

    @property
    def begun_from(self) -> str | None:
        return self._names[0] if self._names else None

    def earlier(self) -> Iterator[str]:
        yield from self._names[1:]

    def open(self, name: str) -> Saved | None:
        return open_saved(self._store, name)


class Said:
    """How much each rank tells all others, and how much one tells all of them."""

    def __init__(self) -> None:
        self.gathered_bytes: list[int] = []
        self.broadcast_bytes: list[int] = []

    def to_all(self, mine: Any) -> Any:
        self.gathered_bytes.append(len(pickle.dumps(mine)))
        return mine

    def once(self, mine: Any) -> Any:
        self.broadcast_bytes.append(len(pickle.dumps(mine)))
        return mine


def saved_by_all(folder: Path, *names: str) -> Counting:
    """Each checkpoint holds other bytes than those before."""
    store = Counting(folder)
    for nth, name in enumerate(names):
        for rank in range(RANKS):
            bodies = [*BODIES[rank], bytes_of(100 + 2 * nth + rank, BIG)]
            brought(store, folder, name, bodies, rank=rank, world_size=RANKS)
    store.asked.clear()
    return store


def read_by_all(
    store: MemoryStore,
    folder: Path,
    names: list[str],
    said: Said | None = None,
    *,
    unfit: ConfigError | None = None,
    judge: Judge = lambda _: None,
) -> list[tuple[str, set[bytes]]]:
    """Of each rank: what it goes on from, and what it has read.

    `unfit` is what the second one finds.
    """
    said = said or Said()

    def work(rank: int, gather: Gather) -> tuple[str, set[bytes]]:
        got: dict[tuple[int, Piece], bytes] = {}

        def put(saver: int, piece: Piece, body: memoryview) -> None:
            got[saver, piece] = bytes(body)

        def plan(saved: Saved) -> Planned:
            if unfit is not None and rank == 1:
                raise unfit
            wanted = (
                Wanted(index.rank, piece, at_once(piece, partial(put, index.rank, piece)))
                for index in saved.indices
                for piece in index.pieces
            )
            return Planned(saved.orders(wanted), rank)

        context = LocalSession("run", LaunchedGroup(Ranks(rank, RANKS, rank, RANKS))).context
        desk = Desk(rank, folder, store, names)
        recall = Recall(
            desk,
            context,
            gather=lambda mine: gather(said.to_all(mine)),
            broadcast=lambda mine: gather(said.once(mine))[0],
            clock=Yielding(),
        )
        saved = recall.newest(plan, judge)
        return saved.name if saved else "", set(got.values())

    return on_ranks(RANKS, work)


def test_each_object_is_read_by_one_of_them(tmp_path: Path) -> None:
    store = saved_by_all(tmp_path, "a")
    assert read_by_all(store, tmp_path, ["a"]) == [("a", WHOLE)] * RANKS
    assert set(store.asked.values()) == {1}
    assert store.shared == {LANE}, "who frees what the killed have left knows it by that"
    assert list(tmp_path.glob("segments/*")) == [], "the lanes are gone"


def test_what_is_as_big_as_the_state_has_chunks_is_told_by_one_rank_only(tmp_path: Path) -> None:
    said = Said()
    store = saved_by_all(tmp_path, "a")
    read_by_all(store, tmp_path, ["a"], said)
    indices_bytes = sum(one.size_bytes for one in store.list("a") if "index" in one.key)
    assert max(said.broadcast_bytes) >= indices_bytes
    assert max(said.gathered_bytes) < indices_bytes


@pytest.mark.parametrize("harm", ["chunk", "index"])
def test_where_one_finds_damage_all_take_the_one_before(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = saved_by_all(tmp_path, "a", "b")
    broken = max(
        (found for found in store.list("b") if harm in found.key), key=lambda one: one.size_bytes
    ).key
    store.put(broken, store.get(broken)[:-1] + b"?")
    found = read_by_all(store, tmp_path, ["b", "a"])
    assert [name for name, _ in found] == ["a"] * RANKS
    assert [read >= WHOLE for _, read in found] == [True] * RANKS
    assert broken in capsys.readouterr().err


def test_with_nothing_left_to_read_it_is_said(tmp_path: Path) -> None:
    store = saved_by_all(tmp_path, "a")
    for found in list(store.list("a/chunks")):
        store.delete(found.key)
    with pytest.raises(IntegrityError, match="can be read any more"):
        read_by_all(store, tmp_path, ["a"])


def test_what_does_not_fit_one_rank_is_refused_by_all_and_not_read(tmp_path: Path) -> None:
    store = saved_by_all(tmp_path, "b", "a")
    with pytest.raises(ConfigError, match="another model"):
        read_by_all(store, tmp_path, ["b", "a"], unfit=ConfigError("It is of another model."))
    assert not [key for key in store.asked if "chunks" in key]
    assert list(tmp_path.glob("segments/*")) == [], "the lanes are gone"


def test_all_ranks_judge_how_it_fits_before_any_reads(tmp_path: Path) -> None:
    told: list[list[int]] = []

    def judge(fits: Sequence[int]) -> None:
        told.append([*fits])
        raise ConfigError("No rank has a place for all of it.")

    store = saved_by_all(tmp_path, "a")
    with pytest.raises(ConfigError, match="No rank has a place"):
        read_by_all(store, tmp_path, ["a"], judge=judge)
    assert told == [[0, 1]] * RANKS
    assert not [key for key in store.asked if "chunks" in key]


def test_a_state_that_is_broken_is_passed_over_though_it_fits_nobody(
    a_state: Callable[[str], Saved],
) -> None:
    def judge(fits: Sequence[Any]) -> None:
        judged.append(len(fits))

    judged: list[int] = []
    shelf = Shelf(b=a_state("b"), a=a_state("a"))
    assert found_in(shelf, broken=("b",), judge=judge) == "a"
    assert judged == [1]


def test_a_run_without_checkpoints_begins(tmp_path: Path) -> None:
    assert read_by_all(Counting(tmp_path), tmp_path, []) == [("", set())] * RANKS


def test_one_rank_looks_through_memory_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is a call of another machine, and there are as many parts as ranks."""
    segments = [
        filled(tmp_path / f"{rank}", BODIES[rank], rank=rank, world_size=RANKS)
        for rank in range(RANKS)
    ]
    looked: list[Desk] = []
    told: list[Opened] = []

    def in_memory() -> Saved:
        return Saved([InMemory(Segment.open(path)) for path in segments], IN_MEMORY)

    def look(desk: Desk) -> Saved:
        looked.append(desk)
        return in_memory()

    def again(_: Desk, opened: Opened) -> Saved:
        told.append(opened)
        return in_memory()

    monkeypatch.setattr(Desk, "open_memory", look)
    monkeypatch.setattr(Desk, "reopen", again)
    found = read_by_all(MemoryStore(), tmp_path, [])
    everything = {body for bodies in BODIES for body in bodies}
    assert found == [(IN_MEMORY, everything)] * RANKS
    assert len(looked) == 1
    indices = tuple(("", write_index(index)) for index in in_memory().indices)
    assert told == [Opened(IN_MEMORY, indices)] * RANKS
