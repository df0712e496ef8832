"""A group restores the newest state that all of its ranks can read."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.format import TensorPiece, encode_index
from spotfit.checkpoint.node_sharing import RING_SUFFIX
from spotfit.checkpoint.reader import (
    MemoryShardReader,
    ReadRequest,
    SavedState,
    SavedStateDescriptor,
    open_committed_snapshot,
    whole_piece_sink,
)
from spotfit.checkpoint.restore_candidates import (
    AllGatherFn,
    CheckCompatibilityFn,
    RestorePlan,
    RestoreSelector,
)
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.snapshot_channel import IN_MEMORY_NAME
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.frameworks.torch.torchrun_group import LauncherGroup
from spotfit.host.system import SystemClock
from spotfit.model.topology import Ranks
from spotfit.store.local import MemoryStore
from spotfit.worker.local_session import LocalSession, LocalSnapshotChannel
from tests.unit.checkpoint.snapshots import (
    LARGE_PIECE_BYTES,
    random_bytes,
    upload_test_snapshot,
    write_segment,
)
from tests.unit.frameworks.torch.ranks import run_on_ranks


class SavedStates:
    """Saved states by name; None is a checkpoint without snapshot, an error is corruption."""

    def __init__(
        self, memory: SavedState | None = None, **kept: SavedState | IntegrityError | None
    ) -> None:
        self.memory = memory
        self.kept = kept
        self.marked_corrupt: list[str] = []
        self.initial_checkpoint = next(iter(kept), None)

    def open_in_memory(self) -> SavedState | None:
        return self.memory

    def open_checkpoint(self, name: str) -> SavedState | None:
        found = self.kept[name]
        if isinstance(found, IntegrityError):
            raise found
        return found

    def reopen(self, opened: SavedStateDescriptor) -> SavedState | None:
        return self.memory if opened.name == IN_MEMORY_NAME else self.open_checkpoint(opened.name)

    def earlier_checkpoints(self) -> list[str]:
        return [*self.kept][1:]

    def committed_checkpoints(self) -> list[str]:
        return [*self.kept]

    def mark_corrupt(self, name: str) -> None:
        self.marked_corrupt.append(name)


@pytest.fixture
def make_state(tmp_path: Path) -> Callable[[str], SavedState]:
    def state(name: str) -> SavedState:
        segment = write_segment(tmp_path / name.replace(" ", "-"), [b"a tensor"])
        return SavedState([MemoryShardReader(ShmSegment.open(segment))], name)

    return state


class Yielding(SystemClock):
    """Yields to the other threads instead of waiting."""

    def wait(self, seconds: float) -> None:
        os.sched_yield()


def restore_from(
    saved_states: Any,
    *,
    broken: tuple[str, ...] = (),
    other_error: str | None = None,
    saved_since: bool = False,
    judge: CheckCompatibilityFn = lambda _: None,
) -> str | None:
    """Restore with one rank that cannot read `broken`, while another rank reports `other_error`."""

    def plan(saved: SavedState) -> RestorePlan:
        if saved.name in broken:
            raise IntegrityError(f"{saved.name} is torn")
        return RestorePlan([])

    def gathered(value: Any) -> list[Any]:
        return [value, other_error] if value is None or isinstance(value, str) else [value]

    context = LocalSession("run").context
    selector = RestoreSelector(
        saved_states, context, all_gather=gathered, broadcast=lambda value: value, clock=Yielding()
    )
    found = selector.read_newest(plan, judge, has_saved=saved_since)
    return found.name if found else None


def test_candidates_are_memory_and_then_the_latest_checkpoint(
    make_state: Callable[[str], SavedState],
) -> None:
    kept = {"b": make_state("b"), "a": make_state("a")}
    assert restore_from(SavedStates(make_state(IN_MEMORY_NAME), **kept)) == IN_MEMORY_NAME
    assert restore_from(SavedStates(**kept)) == "b"
    assert restore_from(SavedStates()) is None


def test_after_a_save_the_latest_checkpoint_is_restored(
    make_state: Callable[[str], SavedState],
) -> None:
    saved_states = SavedStates(make_state(IN_MEMORY_NAME), c=make_state("c"), b=make_state("b"))
    saved_states.initial_checkpoint = "b"
    assert restore_from(saved_states, saved_since=True) == "c"


def test_a_corrupt_checkpoint_is_marked_and_an_earlier_one_restored(
    make_state: Callable[[str], SavedState], capsys: pytest.CaptureFixture[str]
) -> None:
    saved_states = SavedStates(
        make_state(IN_MEMORY_NAME), c=IntegrityError("gone"), b=make_state("b"), a=make_state("a")
    )
    assert restore_from(saved_states, broken=(IN_MEMORY_NAME, "b")) == "a"
    assert saved_states.marked_corrupt == ["c", "b"]
    assert capsys.readouterr().err.count("checkpoint.corrupt") == 3


def test_an_error_of_one_rank_rejects_the_candidate(
    make_state: Callable[[str], SavedState],
) -> None:
    with pytest.raises(IntegrityError, match="None of this run's checkpoints can be read"):
        restore_from(SavedStates(b=make_state("b")), other_error="a byte is wrong")


def test_checkpoints_of_user_files_are_skipped(make_state: Callable[[str], SavedState]) -> None:
    assert restore_from(SavedStates(b=None, a=make_state("a"))) == "a"


def test_corrupt_memory_without_checkpoints_restores_nothing(
    make_state: Callable[[str], SavedState],
) -> None:
    assert restore_from(SavedStates(make_state(IN_MEMORY_NAME)), broken=(IN_MEMORY_NAME,)) is None


# --- several ranks per node ----------------------------------------------------------------------

RANKS = 2
BODIES = [
    [random_bytes(10 * rank + n, LARGE_PIECE_BYTES + n) for n in range(3)] for rank in range(RANKS)
]
"""Bodies of each rank."""

WHOLE = {
    *BODIES[0],
    *BODIES[1],
    random_bytes(100, LARGE_PIECE_BYTES),
    random_bytes(101, LARGE_PIECE_BYTES),
}
"""Contents of the first checkpoint."""


class CountingStore(MemoryStore):
    """Counts the requests per object, and lists the shared memory at the time of a request."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.request_counts: Counter[str] = Counter()
        self.shared: set[str] = set()
        self._segments = folder / "segments"

    def get(self, key: str) -> bytes:
        self.request_counts[key] += 1
        self.shared |= {path.suffix for path in self._segments.glob("*")}
        return super().get(key)


class RankChannel(LocalSnapshotChannel):
    """The channel of one rank in a run with these committed checkpoints."""

    def __init__(self, rank: int, folder: Path, store: MemoryStore, names: list[str]) -> None:
        super().__init__(
            Ranks(world_rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS),
            lambda value: value,
            lambda *_: None,
        )
        self.__dict__["_root"] = folder
        self.__dict__["_store"] = store
        self._names = names

    @property
    def initial_checkpoint(self) -> str | None:
        return self._names[0] if self._names else None

    def earlier_checkpoints(self) -> Iterator[str]:
        yield from self._names[1:]

    def open_checkpoint(self, name: str) -> SavedState | None:
        return open_committed_snapshot(self._store, name)


class Traffic:
    """Bytes that ranks gather, and bytes that rank 0 broadcasts."""

    def __init__(self) -> None:
        self.gathered_bytes: list[int] = []
        self.broadcast_bytes: list[int] = []

    def record_gathered(self, value: Any) -> Any:
        self.gathered_bytes.append(len(pickle.dumps(value)))
        return value

    def record_broadcast(self, value: Any) -> Any:
        self.broadcast_bytes.append(len(pickle.dumps(value)))
        return value


def saved_by_all(folder: Path, *names: str) -> CountingStore:
    """Save checkpoints with different bytes."""
    store = CountingStore(folder)
    for nth, name in enumerate(names):
        for rank in range(RANKS):
            bodies = [*BODIES[rank], random_bytes(100 + 2 * nth + rank, LARGE_PIECE_BYTES)]
            upload_test_snapshot(store, folder, name, bodies, rank=rank, world_size=RANKS)
    store.request_counts.clear()
    return store


def read_by_all(
    store: MemoryStore,
    folder: Path,
    names: list[str],
    traffic: Traffic | None = None,
    *,
    mismatch: ConfigError | None = None,
    judge: CheckCompatibilityFn = lambda _: None,
) -> list[tuple[str, set[bytes]]]:
    """Return of each rank the restored checkpoint and the bytes read.

    `mismatch` is the error that the second rank raises.
    """
    traffic = traffic or Traffic()

    def work(rank: int, gather: AllGatherFn) -> tuple[str, set[bytes]]:
        got: dict[tuple[int, TensorPiece], bytes] = {}

        def put(saver: int, piece: TensorPiece, body: memoryview) -> None:
            got[saver, piece] = bytes(body)

        def plan(saved: SavedState) -> RestorePlan:
            if mismatch is not None and rank == 1:
                raise mismatch
            wanted = (
                ReadRequest(
                    index.rank, piece, whole_piece_sink(piece, partial(put, index.rank, piece))
                )
                for index in saved.indices
                for piece in index.pieces
            )
            return RestorePlan(saved.plan_reads(wanted), rank)

        context = LocalSession(
            "run",
            LauncherGroup(
                Ranks(world_rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
            ),
        ).context
        channel = RankChannel(rank, folder, store, names)
        selector = RestoreSelector(
            channel,
            context,
            all_gather=lambda value: gather(traffic.record_gathered(value)),
            broadcast=lambda value: gather(traffic.record_broadcast(value))[0],
            clock=Yielding(),
        )
        saved = selector.read_newest(plan, judge)
        return saved.name if saved else "", set(got.values())

    return run_on_ranks(RANKS, work)


def test_each_object_is_read_once_per_node(tmp_path: Path) -> None:
    store = saved_by_all(tmp_path, "a")
    assert read_by_all(store, tmp_path, ["a"]) == [("a", WHOLE)] * RANKS
    assert set(store.request_counts.values()) == {1}
    assert store.shared == {RING_SUFFIX}, "the prefix identifies rings of killed processes"
    assert list(tmp_path.glob("segments/*")) == [], "the rings are removed"


def test_indices_are_broadcast_and_not_gathered(tmp_path: Path) -> None:
    traffic = Traffic()
    store = saved_by_all(tmp_path, "a")
    read_by_all(store, tmp_path, ["a"], traffic)
    indices_bytes = sum(one.size_bytes for one in store.list("a") if "index" in one.key)
    assert max(traffic.broadcast_bytes) >= indices_bytes
    assert max(traffic.gathered_bytes) < indices_bytes


@pytest.mark.parametrize("corrupted_part", ["chunk", "index"])
def test_all_ranks_fall_back_to_the_same_checkpoint(
    tmp_path: Path, corrupted_part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = saved_by_all(tmp_path, "a", "b")
    broken = max(
        (found for found in store.list("b") if corrupted_part in found.key),
        key=lambda one: one.size_bytes,
    ).key
    store.put(broken, store.get(broken)[:-1] + b"?")
    found = read_by_all(store, tmp_path, ["b", "a"])
    assert [name for name, _ in found] == ["a"] * RANKS
    assert [read >= WHOLE for _, read in found] == [True] * RANKS
    assert broken in capsys.readouterr().err


def test_without_a_readable_checkpoint_integrity_error_is_raised(tmp_path: Path) -> None:
    store = saved_by_all(tmp_path, "a")
    for found in list(store.list("a/chunks")):
        store.delete(found.key)
    with pytest.raises(IntegrityError, match="None of this run's checkpoints can be read"):
        read_by_all(store, tmp_path, ["a"])


def test_a_state_that_does_not_fit_one_rank_is_rejected_on_all(tmp_path: Path) -> None:
    store = saved_by_all(tmp_path, "b", "a")
    with pytest.raises(ConfigError, match="another model"):
        read_by_all(store, tmp_path, ["b", "a"], mismatch=ConfigError("It is of another model."))
    assert not [key for key in store.request_counts if "chunks" in key]
    assert list(tmp_path.glob("segments/*")) == [], "the rings are removed"


def test_compatibility_is_checked_before_any_rank_reads(tmp_path: Path) -> None:
    gathered_fits: list[list[int]] = []

    def judge(fits: Sequence[int]) -> None:
        gathered_fits.append([*fits])
        raise ConfigError("No rank has a place for all of it.")

    store = saved_by_all(tmp_path, "a")
    with pytest.raises(ConfigError, match="No rank has a place"):
        read_by_all(store, tmp_path, ["a"], judge=judge)
    assert gathered_fits == [[0, 1]] * RANKS
    assert not [key for key in store.request_counts if "chunks" in key]


def test_a_corrupt_state_is_skipped_before_its_compatibility_is_checked(
    make_state: Callable[[str], SavedState],
) -> None:
    def judge(fits: Sequence[Any]) -> None:
        judged.append(len(fits))

    judged: list[int] = []
    saved_states = SavedStates(b=make_state("b"), a=make_state("a"))
    assert restore_from(saved_states, broken=("b",), judge=judge) == "a"
    assert judged == [1]


def test_a_run_without_checkpoints_restores_nothing(tmp_path: Path) -> None:
    assert read_by_all(CountingStore(tmp_path), tmp_path, []) == [("", set())] * RANKS


def test_only_rank_zero_opens_the_state_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening contacts other machines, once per shard."""
    segments = [
        write_segment(tmp_path / f"{rank}", BODIES[rank], rank=rank, world_size=RANKS)
        for rank in range(RANKS)
    ]
    looked: list[RankChannel] = []
    descriptors: list[SavedStateDescriptor] = []

    def in_memory() -> SavedState:
        return SavedState(
            [MemoryShardReader(ShmSegment.open(path)) for path in segments], IN_MEMORY_NAME
        )

    def look(channel: RankChannel) -> SavedState:
        looked.append(channel)
        return in_memory()

    def again(_: RankChannel, opened: SavedStateDescriptor) -> SavedState:
        descriptors.append(opened)
        return in_memory()

    monkeypatch.setattr(RankChannel, "open_in_memory", look)
    monkeypatch.setattr(RankChannel, "reopen", again)
    found = read_by_all(MemoryStore(), tmp_path, [])
    everything = {body for bodies in BODIES for body in bodies}
    assert found == [(IN_MEMORY_NAME, everything)] * RANKS
    assert len(looked) == 1
    indices = tuple(("", encode_index(index)) for index in in_memory().indices)
    assert descriptors == [SavedStateDescriptor(IN_MEMORY_NAME, indices)] * RANKS
