"""An agent keeps a snapshot until it has a name, and needs its worker no more."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.copies import Due
from spotfit.agent.snapshots import Snapshots
from spotfit.checkpoint.bring import unpacked
from spotfit.checkpoint.relay import LANE
from spotfit.checkpoint.segment import Segment
from spotfit.core.codec import decoder
from spotfit.model.holding import Part, State
from spotfit.model.wire import Named, Snapshot, Start
from tests.unit.agent.dues import due
from tests.unit.checkpoint.snapshots import filled
from tests.unit.worker.agent_end import start as a_start

_METRICS = msgspec.Raw(b'{"loss":1.5}')


def start(round_number: int) -> Start:
    return replace(a_start(), round=round_number)


def test_it_is_on_its_way_once_it_has_a_name(tmp_path: Path) -> None:
    snapshots = Snapshots(str(tmp_path))
    assert snapshots.enter(start(3)).segments == str(tmp_path)
    snapshots.keep(1, Snapshot(0, _METRICS, "/shm/x", "asked for"))
    assert snapshots.named(0, Named(0, "c", (0, 1), _METRICS)) is None, "another rank's"
    order = snapshots.named(1, Named(0, "c", (0, 1), _METRICS, "base"))
    assert order is not None
    assert order.is_snapshot
    assert (order.round, order.rank, order.carry.n, order.carry.name) == (3, 1, 0, "c")
    parcel = unpacked(order.carry.parcel)
    assert parcel is not None
    assert (parcel.segment, parcel.base) == ("/shm/x", "base")
    part = parcel.part
    assert (part.name, part.round, part.report, part.rank, part.ranks) == ("c", 3, 0, 1, (0, 1))
    assert part.metrics == {"loss": 1.5}
    assert part.why == "asked for", "whoever leads next knows it, too"
    assert snapshots.named(1, Named(0, "c", (0, 1), _METRICS)) is None, "it is on its way"


def test_one_that_nobody_waits_for_goes_nowhere(tmp_path: Path) -> None:
    snapshots = Snapshots(str(tmp_path))
    snapshots.enter(start(1))
    snapshots.keep(0, Snapshot(0, _METRICS, "/shm/x"))
    snapshots.keep(0, Snapshot(1, _METRICS, "/shm/y"))
    assert snapshots.named(0, Named(0, "", (), _METRICS)) is None
    snapshots.forget(0, 1)
    assert snapshots.named(0, Named(1, "c", (0,), _METRICS)) is None


def test_a_round_frees_what_earlier_ones_left_once_it_has_its_own(tmp_path: Path) -> None:
    old, new = tmp_path / "1-0-0-1.segment", tmp_path / "11-0-0-1.segment"
    old.touch()
    new.touch()
    snapshots = Snapshots(str(tmp_path))
    snapshots.enter(start(11))
    assert old.exists(), "it may be all there is to go on from"
    snapshots.keep(0, Snapshot(0, _METRICS, str(new)))
    assert old.exists(), "another rank may have died before it had handed over its own"
    snapshots.named(0, Named(0, "c", (0,), _METRICS))
    assert not old.exists()
    assert new.exists()


def test_a_round_frees_the_lanes_of_workers_that_were_killed_while_they_read(
    tmp_path: Path,
) -> None:
    lanes = [tmp_path / f"{name}{LANE}" for name in ("1-0-1", "11-0-1")]
    segment = tmp_path / "1-0-2.segment"
    for path in (*lanes, segment):
        path.touch()
    snapshots = Snapshots(str(tmp_path))
    for _ in range(2):
        snapshots.enter(start(11))
        assert [path.exists() for path in lanes] == [False, True]
    snapshots.enter(start(12))
    assert not lanes[1].exists()
    assert segment.exists()
    assert snapshots.held() == ()


def test_what_is_whole_is_held_and_the_next_round_is_told_where(tmp_path: Path) -> None:
    snapshots = Snapshots(str(tmp_path))
    snapshots.enter(start(3))
    newer = [
        filled(tmp_path / f"3-{n}-1-1.segment", [b"x"], rank=n, world_size=2, step=9)
        for n in (0, 1)
    ]
    filled(tmp_path / "3-0-0-1.segment", [b"x"], rank=0, world_size=2, step=6)
    with Segment.create(tmp_path / "3-1-0-1.segment", 10):
        pass  # its writer died before it was whole
    newest = State(3, 9)
    assert snapshots.held() == (Part(State(3, 6), 0, 2), Part(newest, 0, 2), Part(newest, 1, 2))
    told = snapshots.enter(replace(start(4), memory=newest, elsewhere=("", "")))
    assert told.remembered == tuple(map(str, newer))
    told = snapshots.enter(replace(start(4), memory=newest, elsewhere=("", "10.0.0.2:7")))
    assert told.remembered == (str(newer[0]), "")
    assert snapshots.find(Part(newest, 1, 2)) == newer[1], "for a peer that asks"
    assert snapshots.enter(start(4)).remembered == (), "that round begins from a checkpoint"


def test_what_lay_on_the_disk_for_want_of_memory_is_held_too(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    snapshots = Snapshots(str(memory))
    snapshots.enter(start(3))
    path = filled(disk / "3-0-0-1.segment", [b"x"], step=9)
    snapshots.keep(0, Snapshot(0, _METRICS, str(path)))
    assert snapshots.held() == (Part(State(3, 9), 0, 1),)


def test_a_snapshot_travels() -> None:
    told = Snapshot(4, _METRICS, "/shm/x")
    assert decoder(Snapshot).decode(msgspec.json.encode(told)) == told


def test_a_new_keeper_gets_what_the_old_one_had(tmp_path: Path) -> None:
    sent: list[Due] = []
    snapshots = Snapshots(str(tmp_path))
    snapshots.copy = sent.append
    for rank in (2, 3):
        snapshots.enter(
            replace(start(3), rank=rank, local_rank=rank - 2, local_world_size=2, copies_to="a:9")
        )
    paths = [filled(tmp_path / f"3-{rank}-1.segment", [b"x"], rank=rank) for rank in (2, 3)]
    for rank, path in zip((2, 3), paths, strict=True):
        snapshots.keep(rank, Snapshot(7, _METRICS, str(path)))
        snapshots.named(rank, Named(7, "c", (2, 3), _METRICS))
    snapshots.copy_to("b:9")
    first, second = (due(path, "a:9", report=7, fellows=(2, 3)) for path in paths)
    assert sent == [first, second, first._replace(to="b:9"), second._replace(to="b:9")]
    snapshots.copy_to("")
    snapshots.keep(2, Snapshot(8, _METRICS, str(paths[0])))
    snapshots.named(2, Named(8, "d", (2, 3), _METRICS))
    assert len(sent) == 4, "nobody is left to keep it"


def test_what_was_taken_back_is_held_no_more_and_goes_to_no_new_keeper(tmp_path: Path) -> None:
    sent: list[Due] = []
    snapshots = Snapshots(str(tmp_path))
    snapshots.copy = sent.append
    snapshots.enter(replace(start(3), copies_to="a:9"))
    earlier = filled(tmp_path / "2-0-1.segment", [b"x"], step=30)
    ours = [filled(tmp_path / f"3-{rank}-1.segment", [b"x"], rank=rank) for rank in (0, 1)]
    snapshots.keep(0, Snapshot(7, _METRICS, str(ours[0])))
    snapshots.named(0, Named(7, "c", (0,), _METRICS))
    assert not earlier.exists()
    filled(earlier, [b"x"], step=30)
    snapshots.take_back(8)
    assert not earlier.exists(), "what the round began from was left behind, too"
    assert all(path.exists() for path in ours), "ranks free their own; one may be of a save since"
    sent.clear()
    snapshots.copy_to("b:9")
    assert sent == []


@pytest.mark.parametrize("last", [0, 1])
def test_of_two_saves_of_one_step_the_last_counts(tmp_path: Path, last: int) -> None:
    """One at an epoch's last batch and one after what is done once an epoch, for instance."""
    snapshots = Snapshots(str(tmp_path))
    places = [
        filled(tmp_path / f"3-0-{slot + 1}.segment", [b"x"], save=2 if slot == last else 1)
        for slot in (0, 1)
    ]
    (part,) = snapshots.held()
    assert snapshots.find(part) == places[last]
