"""A snapshot is handed over without waiting, and its worker learns how far it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.checkpoint.saved import InMemory, Saved, told
from spotfit.checkpoint.segment import Segment
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.core.ids import RunId
from spotfit.ledger.journal import Journal
from spotfit.model.holding import State
from spotfit.model.vault import COPY_BYTES_PER_S
from spotfit.model.wire import (
    Carried,
    Committed,
    Files,
    Gathered,
    Preempted,
    Snapshot,
    TakenBack,
    Uncarried,
    Unsaved,
)
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import a_spec
from spotfit.worker.handover import IN_MEMORY
from spotfit.worker.session import Session
from spotfit.worker.snapshots import Snapshots
from tests.unit.checkpoint.snapshots import brought, filled
from tests.unit.worker.agent_end import AgentEnd, start


@pytest.fixture
def agent() -> Iterator[AgentEnd]:
    with contextlib.closing(AgentEnd()) as agent:
        yield agent


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def session(agent: AgentEnd, store: MemoryStore) -> Session:
    return Session(start(segments="/memory", scratch="/scratch"), agent.talk, store)


@pytest.fixture
def snapshots(session: Session) -> Snapshots:
    return session.snapshots


def test_it_is_told_and_nobody_waits(snapshots: Snapshots, agent: AgentEnd) -> None:
    assert snapshots.give({"loss": 1.5}, Path("/memory/x"), "asked for") == 0
    (told,) = agent.heard_of(Snapshot)
    assert told == Snapshot(0, msgspec.Raw(b'{"loss":1.5}'), "/memory/x", "asked for")
    assert snapshots.fate(0) == "given"


def test_its_fate_is_followed(snapshots: Snapshots, agent: AgentEnd) -> None:
    for _ in range(2):
        snapshots.give({}, Path("/memory/x"))
    agent.name(0, "a")
    agent.say(Carried(0, "a"))
    assert snapshots.wait(0) == "carried"
    agent.say(Committed("a", {}), Uncarried(1, "Traceback\n  the bucket is gone"))
    assert snapshots.fate(0) == "committed"
    assert snapshots.wait(1) == "lost"


def test_what_others_parts_are_missing_of_stays_lost_though_ours_was_carried(
    snapshots: Snapshots, agent: AgentEnd
) -> None:
    snapshots.give({}, Path("/memory/x"))
    agent.name(0, "a")
    agent.say(Uncarried(0, "rank 1: the disk is full"), Carried(0, "a"))
    assert snapshots.fate(0) == "lost"


@pytest.mark.parametrize(
    "word", [Gathered("report", 0, missing=(1,)), Gathered("report", 0, why="rank 1 has returned")]
)
def test_a_report_that_never_matches_is_a_lost_snapshot(
    snapshots: Snapshots, agent: AgentEnd, word: Gathered
) -> None:
    snapshots.give({}, Path("/memory/x"))
    agent.say(word)
    assert snapshots.wait(0) == "lost"


def test_a_rank_without_room_takes_part_all_the_same(
    snapshots: Snapshots, session: Session, agent: AgentEnd
) -> None:
    snapshots.withhold({"loss": 2.0}, "no room")
    files, unsaved = agent.heard()
    assert isinstance(files, Files)
    assert unsaved == Unsaved(0, "no room")
    assert session.reports == 1
    session.close()


def test_a_worker_that_ends_waits_for_its_snapshots(
    snapshots: Snapshots, session: Session, agent: AgentEnd
) -> None:
    snapshots.give({}, Path("/memory/x"))
    agent.say(Carried(0, "a"))
    session.close()
    assert snapshots.fate(0) == "carried"


def test_reports_of_other_kinds_are_none_of_its_business(
    snapshots: Snapshots, agent: AgentEnd
) -> None:
    assert not snapshots.take(Carried(5, "x"))
    assert not snapshots.take(Committed("x", {}))


def test_segments_lie_in_memory_and_else_on_the_disk(snapshots: Snapshots, agent: AgentEnd) -> None:
    memory, disk = snapshots.folders
    names = [snapshots.path_for(memory).name for _ in range(2)]
    assert names == ["1-0-1.segment", "1-0-2.segment"]
    assert disk == Path("/scratch/segments")
    assert Session(start(scratch="/s"), agent.talk, MemoryStore()).snapshots.folders == [
        Path("/s/segments")
    ]


def test_the_ranks_of_a_machine_share_what_carries_their_copies(
    agent: AgentEnd, store: MemoryStore
) -> None:
    def speed(**given: Any) -> float:
        return Session(start(**given), agent.talk, store).snapshots.peer_bytes_per_s()

    assert speed(copies_to="a:9", local_world_size=1) == COPY_BYTES_PER_S
    assert speed(copies_to="a:9", local_world_size=8) == COPY_BYTES_PER_S / 8
    assert speed(local_world_size=8) == 0.0


def test_who_leaves_with_all_others_has_no_peer(agent: AgentEnd, store: MemoryStore) -> None:
    session = Session(start(copies_to="a:9", world_size=2), agent.talk, store)
    agent.say(Preempted(0, {"node-1": (1,)}))
    assert session.wait_for_notice(5.0)
    assert session.snapshots.peer_bytes_per_s() > 0
    agent.say(Preempted(0, {"node-0": (0,), "node-1": (1,)}))
    session.wait_for(lambda: session.all_leave() or None)
    assert session.snapshots.peer_bytes_per_s() == 0.0


def test_what_there_is_to_go_on_from(agent: AgentEnd, store: MemoryStore, tmp_path: Path) -> None:
    brought(store, tmp_path, "b", [b"x"])
    snapshots = Session(start(checkpoint="b", snapshots=True), agent.talk, store).snapshots
    assert snapshots.begun_from == "b"
    assert snapshots.has_snapshots
    assert not Session(start(checkpoint="b"), agent.talk, store).snapshots.has_snapshots
    saved = snapshots.open("b")
    assert saved is not None
    assert saved.indices[0].step == 5


def test_earlier_checkpoints_come_the_latest_first(
    agent: AgentEnd, monkeypatch: pytest.MonkeyPatch, store: MemoryStore
) -> None:
    from spotfit.testing.builders import a_commit, a_view

    view = a_view(checkpoints=tuple(a_commit(name) for name in ("a", "b", "c", "d")))
    monkeypatch.setattr(Journal, "catch_up", lambda _: view)
    snapshots = Session(start(checkpoint="c"), agent.talk, store).snapshots
    assert list(snapshots.earlier()) == ["b", "a"]


def test_a_state_in_memory_is_opened_where_the_round_begins_from_it(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    paths = [str(filled(tmp_path / f"{n}", [b"x"], rank=n, world_size=2, step=9)) for n in range(2)]
    told = start(memory=State(3, 9), remembered=tuple(paths))
    saved = Session(told, agent.talk, store).snapshots.open_memory()
    assert saved is not None
    assert [index.step for index in saved.indices] == [9, 9]
    assert Session(start(), agent.talk, store).snapshots.open_memory() is None
    torn = start(memory=State(3, 9), remembered=(paths[0],))
    with pytest.raises(IntegrityError, match="not whole"):
        Session(torn, agent.talk, store).snapshots.open_memory()
    later = filled(tmp_path / "later", [b"x"], rank=1, world_size=2, step=9, save=2)
    mixed = start(memory=State(3, 9), remembered=(paths[0], str(later)))
    with pytest.raises(IntegrityError, match="of 2 saves"):
        Session(mixed, agent.talk, store).snapshots.open_memory()
    lost = start(memory=State(3, 9))
    with pytest.raises(IntegrityError):
        Session(lost, agent.talk, store).snapshots.open_memory()


def test_what_is_taken_back_is_all_that_was_reported(snapshots: Snapshots, agent: AgentEnd) -> None:
    snapshots.give({}, Path("/memory/x"))
    snapshots.withhold({}, "there is no room")
    snapshots.take_back()
    assert agent.heard_of(TakenBack) == [TakenBack(2)]


def test_a_state_in_memory_that_another_rank_has_opened_is_asked_for_by_nobody(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    paths = [filled(tmp_path / f"{n}", [b"x"], rank=n, world_size=2, step=9) for n in range(2)]
    opened = told(Saved([InMemory(Segment.open(path)) for path in paths], IN_MEMORY))
    begins = start(
        memory=State(3, 9),
        remembered=(str(paths[0]), ""),
        elsewhere=("", "127.0.0.1:1"),
        secret=RunKey(bytes(32), RunId("r")).to_text(),
    )
    saved = Session(begins, agent.talk, store).snapshots.reopen(opened)
    assert (saved.name, [index.rank for index in saved.indices]) == (IN_MEMORY, [0, 1])
    assert [saved.parts[rank].at_hand for rank in (0, 1)] == [True, False]
    with pytest.raises(IntegrityError, match=r"127\.0\.0\.1:1"):
        saved.parts[1].fetch(saved.parts[1].index.chunks[0])


@pytest.mark.parametrize(("workers", "resizes"), [((2, 2), False), ((1, 2), True)])
def test_a_group_of_more_than_one_size_resizes(
    agent: AgentEnd, store: MemoryStore, workers: tuple[int, int], *, resizes: bool
) -> None:
    least, most = workers
    spec = msgspec.Raw(encode(a_spec(workers_min=least, workers_max=most, elastic=True)))
    assert Session(start(spec=spec), agent.talk, store).snapshots.resizes is resizes
