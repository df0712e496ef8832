"""A worker's side of its round: what it says, what it waits for, and what it does not wait for."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import manifests_of
from spotfit.core.codec import encode
from spotfit.core.errors import CollectiveTimeoutError, ConfigError, SessionMisuseError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    Event,
    ValidationAsked,
    ValidationEnded,
)
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.spec import Keep, RunSpec, ValidationSpec
from spotfit.model.wire import (
    Carried,
    Carry,
    Committed,
    Files,
    Gather,
    Gathered,
    Judged,
    Named,
    Overdue,
    Preempted,
    Report,
    Saved,
    SaveSoon,
    Uncarried,
)
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from spotfit.worker import session as sessions
from spotfit.worker.parcel import bring, unpacked
from spotfit.worker.reported import Luggage, ReportedCheckpoint
from spotfit.worker.session import Session
from tests.unit.checkpoint.kept import directory, part, saved
from tests.unit.worker.agent_end import AgentEnd, start

SYNC, ASYNC, NO_UPLOAD = (
    CheckpointUploadMode.SYNC,
    CheckpointUploadMode.ASYNC,
    CheckpointUploadMode.NO_UPLOAD,
)
COMMITTED = CheckpointConsistencyMode.COMMITTED
VALIDATED = CheckpointConsistencyMode.VALIDATED


@pytest.fixture
def agent() -> Iterator[AgentEnd]:
    with contextlib.closing(AgentEnd()) as agent:
        yield agent


@pytest.fixture
def another() -> Iterator[AgentEnd]:
    with contextlib.closing(AgentEnd()) as agent:
        yield agent


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def session(agent: AgentEnd, store: MemoryStore) -> Session:
    return Session(start(), agent.talk, store)


def luggage(where: Path, mode: CheckpointUploadMode = SYNC, **more: Any) -> Luggage:
    checkpoint = Checkpoint.from_directory(directory(where, model="w"))
    return Luggage(checkpoint, mode, more.pop("delete", False), **more)


# --- reports without files -------------------------------------------------------------------


def test_a_report_without_files_waits_for_nobody(session: Session, agent: AgentEnd) -> None:
    session.report_metrics({"loss": 0.5})
    session.report_metrics({"loss": 0.25}, "best")
    assert agent.heard() == [
        Report(0, msgspec.Raw(b'{"loss":0.5}')),
        Report(1, msgspec.Raw(b'{"loss":0.25}'), "best"),
    ]
    assert session.reports == 2


def test_a_refused_report_was_none(session: Session, agent: AgentEnd) -> None:
    with pytest.raises(ValueError, match="cannot be reported"):
        session.report_metrics({"loss": object()})
    session.report_metrics({"loss": 1})
    assert [frame.n for frame in agent.heard_of(Report)] == [0]


def test_who_only_ever_reports_takes_in_what_it_is_told_now_and_then(
    session: Session, agent: AgentEnd
) -> None:
    session.report_metrics({})
    agent.say(Committed("a", {}))
    for _ in range(255):
        session.report_metrics({})
    agent.heard()
    assert agent.talk._readable.poll(0), "not at every report: that would cost"
    session.report_metrics({})
    assert not agent.talk._readable.poll(0), "or the agent's queue would grow for ever"


# --- reports with files ----------------------------------------------------------------------


def test_a_checkpoint_is_named_uploaded_written_down_and_told(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    agent.name(0, "ck-a", (0, 1), loss=0.125)
    session.report_files({"loss": 9}, luggage(tmp_path / "ck", dir_name="ck-a"))
    assert agent.heard() == [
        Files(0, msgspec.Raw(b'{"loss":9}'), "ck-a", blocks=True),
        Saved(0, "ck-a", 1),
    ]
    (manifest,) = manifests_of(store, "ck-a")
    assert (manifest.round, manifest.report, manifest.rank, manifest.ranks) == (1, 0, 0, (0, 1))
    assert manifest.metrics == {"loss": 0.125}, "rank 0's, whoever has files"
    assert store.get("ck-a/model") == b"w"
    assert (tmp_path / "ck" / "model").exists(), "a SYNC upload leaves the local copy"


def test_it_does_not_wait_for_the_commit(session: Session, agent: AgentEnd, tmp_path: Path) -> None:
    agent.name(0, "a")
    agent.name(1, "b")
    session.report_files({}, luggage(tmp_path / "a"))
    session.report_files({}, luggage(tmp_path / "b"))
    assert [frame.name for frame in agent.heard_of(Saved)] == ["a", "b"]


def test_the_local_copy_goes_when_asked(session: Session, agent: AgentEnd, tmp_path: Path) -> None:
    agent.name(0, "a")
    session.report_files({}, luggage(tmp_path / "a", delete=True))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [SYNC, NO_UPLOAD])
def test_what_had_the_name_before_is_taken_over_where_it_is_not_replaced(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path, mode: Any
) -> None:
    agent.name(0, "same")
    agent.name(1, "same@1-1", base="same")
    session.report_files({}, luggage(tmp_path / "a"))
    store.put("mine/more", b"x")
    other = Checkpoint.from_directory(directory(tmp_path / "b", more="x"))
    mine = Checkpoint.in_store(store, "mine")
    session.report_files({}, Luggage(other if mode is SYNC else mine, mode, delete=False))
    (manifest,) = manifests_of(store, "same@1-1")
    assert [(file.name, file.at) for file in manifest.files] == [("more", ""), ("model", "same")]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_what_was_taken_over_is_in_the_latest_checkpoint_before_it_is_committed(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path, mode: Any
) -> None:
    agent.name(0, "same")
    agent.name(1, "same@1-1", (0, 1), base="same")
    session.report_files({}, luggage(tmp_path / "a"))
    other = Checkpoint.from_directory(directory(tmp_path / "b", more="x"))
    session.report_files({}, Luggage(other, mode, delete=False))
    for carry in agent.heard_of(Carry):
        bring(unpacked(carry.parcel), store)
        agent.say(Carried(carry.n, carry.name))
    latest = session.checkpoint()
    assert latest is not None
    assert latest.path == "private/same@1-1"
    with latest.as_directory() as there:
        assert {path.name for path in Path(there).iterdir()} == {"model", "more"}


def test_files_of_a_background_upload_are_the_agent_s_at_once(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    agent.name(3, "unused")
    agent.name(0, "a", loss=0.5)
    session.report_files({}, luggage(tmp_path / "a", ASYNC, delete=True))
    (carry,) = agent.heard_of(Carry)
    parcel = unpacked(carry.parcel)
    assert (carry.n, carry.name) == (0, "a")
    assert (parcel.part.name, parcel.part.report, parcel.part.rank) == ("a", 0, 0)
    assert (parcel.part.metrics, parcel.delete) == ({"loss": 0.5}, True)
    assert parcel.checkpoint.local_directory == tmp_path / "a"
    assert list(store.list()) == [], "report has returned, and this process uploads nothing"


def test_the_end_waits_for_what_was_given_away_and_then_it_is_the_latest(
    session: Session, agent: AgentEnd, tmp_path: Path
) -> None:
    for n, name in enumerate(("a", "b")):
        agent.name(n, name)
        session.report_files({}, luggage(tmp_path / name, ASYNC))
    assert session.checkpoint() is None, "not before it is there"
    agent.say(Carried(0, "a"))
    assert path_of_latest(session) == "private/a"
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    agent.say(Carried(1, "b"))
    closing.join(60)
    assert not closing.is_alive()
    assert path_of_latest(session) == "private/b"


def path_of_latest(session: Session) -> str:
    latest = session.checkpoint()
    assert latest is not None
    return latest.path


def test_a_report_in_the_foreground_comes_after_those_in_the_background(
    session: Session, agent: AgentEnd, tmp_path: Path
) -> None:
    agent.name(0, "a")
    session.report_files({}, luggage(tmp_path / "a", ASYNC))
    agent.name(1, "b")
    second = threading.Thread(target=session.report_files, args=({}, luggage(tmp_path / "b")))
    second.start()
    second.join(0.05)
    assert agent.heard_of(Saved) == []
    agent.say(Carried(0, "a"))
    second.join(60)
    assert [frame.name for frame in agent.heard_of(Saved)] == ["b"]


def test_what_is_given_away_tells_what_had_the_name_before_and_waits_until_that_is_there(
    session: Session, agent: AgentEnd, tmp_path: Path
) -> None:
    agent.name(0, "same")
    session.report_files({}, luggage(tmp_path / "a", ASYNC))
    agent.name(1, "same@1-1", base="same")
    again = threading.Thread(target=session.report_files, args=({}, luggage(tmp_path / "b", ASYNC)))
    again.start()
    again.join(0.05)
    assert [unpacked(one.parcel).base for one in agent.heard_of(Carry)] == [""]
    agent.say(Carried(0, "same"))
    again.join(60)
    assert [unpacked(one.parcel).base for one in agent.heard_of(Carry)] == ["same"]


def test_a_function_of_the_user_s_uploads_here_in_order_and_is_awaited(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    gate = threading.Event()

    def mine(_: Checkpoint, name: str) -> Checkpoint:
        assert gate.wait(60)
        store.put(f"{name}/model", b"w")
        return Checkpoint.in_store(store, name)

    for n, name in enumerate(("a", "b")):
        agent.name(n, name)
        session.report_files({}, luggage(tmp_path / name, ASYNC, delete=True, upload_fn=mine))
    session.report_metrics({"loss": 1})
    assert agent.heard_of(Saved) == [], "report returned before the upload was done"
    gate.set()
    session.close()
    assert [frame.name for frame in agent.heard_of(Saved)] == ["a", "b"]
    assert not (tmp_path / "a").exists()
    assert path_of_latest(session) == "private/b"


def test_a_failing_background_upload_ends_the_worker_at_once(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    told: list[BaseException] = []
    failed = threading.Event()

    def fail(error: BaseException) -> None:
        told.append(error)
        failed.set()

    def raises(_: Checkpoint, __: str) -> Checkpoint:
        raise ConnectionResetError("the storage is gone")

    session = Session(start(), agent.talk, store, fail=fail)
    agent.name(0, "a")
    session.report_files({}, luggage(tmp_path / "a", ASYNC, upload_fn=raises))
    assert failed.wait(60), "nobody had to call close"
    assert str(told[0]) == "the storage is gone"


def test_a_failing_upload_in_the_foreground_raises_where_it_was_reported(
    session: Session, agent: AgentEnd, tmp_path: Path
) -> None:
    agent.name(0, "a")
    gone = Checkpoint.from_directory(tmp_path / "gone")
    with pytest.raises(ValueError, match="is not there"):
        session.report_files({}, Luggage(gone, SYNC, delete=False))
    assert agent.heard_of(Saved) == []


def test_what_lies_in_the_run_s_folder_is_not_uploaded(
    session: Session, agent: AgentEnd, store: MemoryStore
) -> None:
    store.put("mine/model", b"w")
    agent.name(0, "mine")
    session.report_files({}, Luggage(Checkpoint.in_store(store, "mine"), NO_UPLOAD, delete=False))
    frame, told = agent.heard()
    assert isinstance(frame, Files)
    assert frame.dir_name == "mine", "its folder is its name"
    assert not frame.ours, "nobody but the user may delete it"
    assert isinstance(told, Saved)
    assert told.at == "mine"
    (manifest,) = manifests_of(store, "mine")
    assert (manifest.folder, manifest.files[0].name) == ("mine", "model")


def test_what_is_not_uploaded_is_not_uploaded_by_a_function_either(
    session: Session, agent: AgentEnd, store: MemoryStore
) -> None:
    def mine(_: Checkpoint, __: str) -> Checkpoint:
        raise AssertionError("nobody asked it")

    store.put("mine/model", b"w")
    agent.name(0, "mine")
    there = Checkpoint.in_store(store, "mine")
    session.report_files({}, Luggage(there, NO_UPLOAD, delete=False, upload_fn=mine))
    assert [frame.name for frame in agent.heard_of(Saved)] == ["mine"]


@pytest.mark.parametrize("folder", ["", ".spotfit/journal"])
def test_what_lies_elsewhere_cannot_stay_there(
    session: Session, store: MemoryStore, tmp_path: Path, folder: str
) -> None:
    elsewhere = Checkpoint.from_directory(tmp_path)
    checkpoint = Checkpoint.in_store(store, folder) if folder else elsewhere
    with pytest.raises(ValueError, match="outside the experiment directory"):
        session.report_files({}, Luggage(checkpoint, NO_UPLOAD, delete=False))


def test_what_is_kept_where_it_lies_is_not_deleted(agent: AgentEnd, tmp_path: Path) -> None:
    session = Session(start(), agent.talk, open_store(tmp_path / "run"))
    agent.name(0, "mine")
    session.report_files({}, luggage(tmp_path / "run" / "mine", NO_UPLOAD, delete=True))
    assert (tmp_path / "run" / "mine" / "model").exists()


def test_an_upload_function_uploads_in_our_place(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    def mine(checkpoint: Checkpoint, name: str) -> Checkpoint:
        store.put(f"models/{name}/model", b"uploaded by me")
        return Checkpoint.in_store(store, f"models/{name}")

    agent.name(0, "a")
    session.report_files({}, luggage(tmp_path / "a", upload_fn=mine))
    (manifest,) = manifests_of(store, "a")
    assert manifest.folder == "models/a"
    checkpoint = session.checkpoint()
    assert checkpoint is not None
    assert checkpoint.path == "private/models/a"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "must return a Checkpoint, not a NoneType"),
        (Checkpoint("/elsewhere"), "outside the experiment directory"),
    ],
)
def test_what_an_upload_function_gives_is_checked(
    session: Session, agent: AgentEnd, tmp_path: Path, given: Any, said: str
) -> None:
    agent.name(0, "a")
    with pytest.raises(ValueError, match=said):
        session.report_files({}, luggage(tmp_path / "a", upload_fn=lambda *_: given))


def test_nobody_deletes_the_run_s_own_folder(agent: AgentEnd, tmp_path: Path) -> None:
    store = open_store(tmp_path / "results" / "run")
    session = Session(start(), agent.talk, store)
    with pytest.raises(ValueError, match="contains the experiment directory"):
        session.report_files({}, luggage(tmp_path / "results", delete=True))
    assert agent.heard() == []


# --- what to go on from ----------------------------------------------------------------------


def test_a_first_attempt_has_nothing_to_go_on_from(session: Session) -> None:
    assert session.checkpoint() is None


def test_a_worker_goes_on_from_what_it_reported_else_from_the_restored(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    saved(store, tmp_path / "old", part("old"), model="old")
    session = Session(start(checkpoint="old", round=2), agent.talk, store)
    restored = session.checkpoint()
    assert restored is not None
    assert restored.path == "private/old"
    session.report_metrics({})
    assert session.checkpoint() == restored, "a report without files changes nothing"
    agent.name(1, "new")
    session.report_files({}, luggage(tmp_path / "new"))
    latest = session.checkpoint()
    assert latest is not None
    assert latest.path == "private/new"


def write(store: MemoryStore, *events: Event) -> None:
    journal = Journal(store)
    for event in events:
        journal.append(Entry(RunId("r"), AgentId("a"), event), journal.catch_up())


def test_all_that_was_reported_is_told_worst_first_and_without_what_was_dropped(
    agent: AgentEnd, store: MemoryStore
) -> None:
    spec = RunSpec(RunId("r"), "run", "f", 1, 1, keep=Keep(2, "score"))
    session = Session(start(spec=msgspec.Raw(encode(spec))), agent.talk, store)
    committed = [
        CheckpointCommitted(name, 1, n, {"score": score}, (0,))
        for n, (name, score) in enumerate((("a", 3), ("b", 1), ("c", 2)))
    ]
    write(store, *committed, CheckpointDropped("b", "the worst"))
    told = session.reported(COMMITTED, timeout_s=None)
    assert [(one.checkpoint.path, one.metrics["score"]) for one in told] == [
        ("private/c", 2),
        ("private/a", 3),
    ]
    assert {one.status.value for one in told} == {"COMMITTED"}


PENDING = CheckpointCommitted("a", 1, 0, {"acc": 1}, (0,), validation=ValidationAsked())
WITH_VALIDATION = msgspec.Raw(
    encode(RunSpec(RunId("r"), "run", "f", 1, 1, validation=ValidationSpec()))
)


def statuses(some: list[ReportedCheckpoint]) -> list[str]:
    return [one.status.name for one in some]


def test_by_default_it_waits_until_nothing_is_left_to_validate(
    agent: AgentEnd, store: MemoryStore
) -> None:
    session = Session(start(spec=WITH_VALIDATION), agent.talk, store)
    write(store, PENDING)
    assert statuses(session.reported(COMMITTED, timeout_s=None)) == ["PENDING_VALIDATION"]
    assert statuses(session.reported(VALIDATED, timeout_s=0)) == ["PENDING_VALIDATION"]
    told: list[ReportedCheckpoint] = []
    waiting = threading.Thread(target=lambda: told.extend(session.reported(VALIDATED, None)))
    waiting.start()
    agent.say(Judged("another"))
    write(store, ValidationEnded("a", PENDING.mark, "validated", {"acc": 2}))
    agent.say(Judged("a"))
    waiting.join(30)
    assert statuses(told) == ["VALIDATED"]
    assert told[0].metrics == {"acc": 2}


def test_what_ended_while_nobody_listened_is_not_waited_for(
    agent: AgentEnd, store: MemoryStore
) -> None:
    session = Session(start(spec=WITH_VALIDATION), agent.talk, store)
    write(store, PENDING, ValidationEnded("a", PENDING.mark, "timeout"))
    assert statuses(session.reported(VALIDATED, timeout_s=None)) == ["VALIDATION_TIMEOUT"]


def test_a_fit_that_cannot_validate_waits_for_no_validation(
    agent: AgentEnd, store: MemoryStore
) -> None:
    spec = RunSpec(RunId("r"), "run", "f", 1, 1)
    session = Session(start(spec=msgspec.Raw(encode(spec))), agent.talk, store)
    write(store, PENDING)
    assert statuses(session.reported(VALIDATED, timeout_s=None)) == ["PENDING_VALIDATION"]


def test_what_is_to_be_dropped_in_a_moment_is_told_no_more(
    agent: AgentEnd, store: MemoryStore
) -> None:
    spec = RunSpec(RunId("r"), "run", "f", 1, 1, keep=Keep(1))
    session = Session(start(spec=msgspec.Raw(encode(spec))), agent.talk, store)
    last = CheckpointCommitted("c", 1, 2, {}, (0,))
    write(store, CheckpointCommitted("b", 1, 1, {}, (0,)), PENDING, last)
    names = [one.checkpoint.path for one in session.reported(COMMITTED, timeout_s=None)]
    assert names == ["private/a", "private/c"], "one is still to be validated"


def test_a_validation_is_asked_for_with_the_files_and_written_into_the_manifest(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    session = Session(start(spec=WITH_VALIDATION), agent.talk, store)
    agent.name(0, "a")
    asked = ValidationAsked({"batches": 2})
    session.report_files({}, luggage(tmp_path, validation=asked))
    assert agent.heard_of(Files)[0].validation == asked
    assert manifests_of(store, "a")[0].validation == asked


def test_without_a_validation_config_nothing_can_be_validated(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    spec = RunSpec(RunId("r"), "run", "f", 1, 1)
    session = Session(start(spec=msgspec.Raw(encode(spec))), agent.talk, store)
    with pytest.raises(ValueError, match="no validation_config"):
        session.report_files({}, luggage(tmp_path, validation=ValidationAsked()))


def test_it_waits_until_what_this_worker_brought_is_in(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    spec = RunSpec(RunId("r"), "run", "f", 1, 1)
    session = Session(start(spec=msgspec.Raw(encode(spec))), agent.talk, store)
    agent.name(0, "a")
    session.report_files({}, luggage(tmp_path / "a"))
    assert session.reported(COMMITTED, timeout_s=0) == [], "the time is over: what there is"
    write(store, CheckpointCommitted("a", 1, 0, {}, (0,)))
    agent.say(Committed("other", {}), Committed("a", {}))
    told = session.reported(COMMITTED, timeout_s=None)
    assert [one.checkpoint.path for one in told] == ["private/a"]


def test_but_not_for_that_which_others_left_without_their_files(
    agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    spec = RunSpec(RunId("r"), "run", "f", 1, 1)
    session = Session(start(spec=msgspec.Raw(encode(spec))), agent.talk, store)
    agent.name(0, "a")
    agent.say(Uncarried(0, "ranks [1] left"))
    session.report_files({}, luggage(tmp_path / "a"))
    agent.name(1, "b")
    session.report_files({}, luggage(tmp_path / "b"))
    write(store, CheckpointCommitted("b", 1, 1, {}, (0,)))
    agent.say(Committed("b", {}))
    told = session.reported(COMMITTED, timeout_s=30)
    assert [one.checkpoint.path for one in told] == ["private/b"]


# --- collectives -----------------------------------------------------------------------------


def test_a_collective_gives_rank_0_s_value(session: Session, agent: AgentEnd) -> None:
    agent.say(Gathered("mine", 1, b"second"), Gathered("mine", 0, b"first"))
    assert session.gather("mine", b"x") == b"first"
    assert session.gather("mine", b"y") == b"second"
    assert agent.heard() == [
        Gather("mine", 0, b"x", blocks=True),
        Gather("mine", 1, b"y", blocks=True),
    ]


def test_ranks_that_never_came_are_named(session: Session, agent: AgentEnd) -> None:
    agent.say(Gathered("barrier", 0, missing=(1, 3)))
    with pytest.raises(CollectiveTimeoutError, match=r"timed out.* have not joined: \[1, 3\]"):
        session.barrier()


def test_a_report_that_waited_too_long_names_them_too(
    session: Session, agent: AgentEnd, tmp_path: Path
) -> None:
    agent.say(Gathered("report", 0, missing=(1,)))
    with pytest.raises(CollectiveTimeoutError, match=r"report timed out.*\[1\]"):
        session.report_files({}, luggage(tmp_path / "ck"))
    assert agent.heard_of(Saved) == []


def test_out_of_step_with_the_others_is_told_with_the_reason(
    session: Session, agent: AgentEnd
) -> None:
    agent.say(Gathered("barrier", 0, missing=(1,), why="rank 1 is somewhere else"))
    with pytest.raises(SessionMisuseError, match="never be complete: rank 1 is somewhere else"):
        session.barrier()


def test_the_log_says_for_whom_one_waits(
    session: Session, agent: AgentEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.say(Overdue("barrier", (1, 3), 60.0), Gathered("barrier", 0))
    session.barrier()
    assert 'what=barrier missing_ranks="1, 3" so_far="60 s"' in capsys.readouterr().err


def test_only_the_training_function_s_own_thread_holds_its_rank(
    session: Session, agent: AgentEnd
) -> None:
    agent.say(Gathered("mine", 0))
    thread = threading.Thread(target=session.gather, args=("mine",))
    thread.start()
    thread.join()
    assert [frame.blocks for frame in agent.heard_of(Gather)] == [False]


def test_a_collective_of_ours_has_a_time_limit_of_its_own(session: Session) -> None:
    with pytest.raises(CollectiveTimeoutError, match="mine timed out after 0 s on rank 0"):
        session.gather("mine", timeout_s=0)


def test_what_is_too_big_to_broadcast_is_refused_before_it_is_sent(
    session: Session, agent: AgentEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_LARGEST_BROADCAST_BYTES", 1024)
    with pytest.raises(ConfigError, match=r"was given 1\.\d KiB; it takes 1\.0 KiB") as refused:
        session.broadcast(b"x" * 1100)
    assert "torch.distributed" in refused.value.do
    assert agent.heard() == []


@pytest.mark.parametrize(("size_bytes", "warns"), [(900, False), (1100, True)])
def test_more_than_a_kilobyte_is_broadcast_with_a_warning(
    session: Session,
    agent: AgentEnd,
    size_bytes: int,
    warns: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    thing = b"x" * size_bytes
    agent.say(Gathered("broadcast_from_rank_zero", 0, pickle.dumps(thing)))
    assert session.broadcast(thing) == thing
    assert ("meant for small things" in capsys.readouterr().err) == warns


def test_rank_0_broadcasts_and_the_others_receive(
    session: Session, agent: AgentEnd, another: AgentEnd, store: MemoryStore
) -> None:
    agent.say(Gathered("broadcast_from_rank_zero", 0, missing=(1,)))
    with pytest.raises(CollectiveTimeoutError):
        session.broadcast({"seed": (1, 2)})
    (sent,) = agent.heard_of(Gather)
    listener = Session(start(rank=1), another.talk, store)
    another.say(Gathered("broadcast_from_rank_zero", 0, sent.value))
    assert listener.broadcast("ignored") == {"seed": (1, 2)}
    assert another.heard_of(Gather)[0].value == b"", "only rank 0 sends"


def test_a_report_made_without_this_rank_saves_nothing_and_goes_on(
    session: Session, agent: AgentEnd, store: MemoryStore, tmp_path: Path
) -> None:
    agent.say(Named(0, "", (), msgspec.Raw(b"{}")))
    session.report_files({"loss": 1.0}, luggage(tmp_path / "w"))
    assert agent.heard_of(Saved) == []
    assert list(store.list()) == []
    assert session.checkpoint() is None


def test_nobody_knows_of_a_preemption_at_first(session: Session, agent: AgentEnd) -> None:
    agent.say(Gathered("preemption_info", 0, b"null"))
    assert session.preemption_info() is None
    assert agent.heard() == [Gather("preemption_info", 0, b"null", blocks=True)]


def test_what_rank_0_knows_of_a_preemption_is_what_all_are_told(
    session: Session, agent: AgentEnd
) -> None:
    notice = Preempted(5_000, {"node-b": (2, 3), "node-a": (1,)})
    agent.say(notice, Gathered("preemption_info", 0, encode(notice)))
    told = session.preemption_info()
    assert agent.heard_of(Gather)[0].value == encode(notice), "what this rank knew"
    assert told is not None
    assert (told.deadline_ms, told.preempted_ranks) == (5_000, [1, 2, 3])
    assert told.preempted_node_to_ranks == {"node-b": [2, 3], "node-a": [1]}


def test_a_preemption_without_a_time_has_none(session: Session, agent: AgentEnd) -> None:
    agent.say(Gathered("preemption_info", 0, encode(Preempted(0, {"node-a": (1,)}))))
    told = session.preemption_info()
    assert told is not None
    assert told.deadline_ms is None


def test_a_worker_may_wait_until_it_knows_of_a_notice(session: Session, agent: AgentEnd) -> None:
    assert not session.wait_for_notice(0.0)
    agent.say(Preempted(5_000, {"node-a": (1,)}))
    assert session.wait_for_notice(5.0)


def test_that_a_machine_is_in_danger_is_no_preemption(session: Session, agent: AgentEnd) -> None:
    assert session.advice() is None
    agent.say(SaveSoon("higher risk"), Gathered("preemption_info", 0, b"null"))
    assert session.preemption_info() is None
    assert not session.wait_for_notice(0.0)
    told = session.advice()
    assert told is not None
    assert told[1] == "higher risk"


# --- datasets --------------------------------------------------------------------------------


def test_a_worker_has_no_dataset_of_any_name(session: Session) -> None:
    with pytest.raises(KeyError, match="no dataset 'train'"):
        session.dataset("train")
