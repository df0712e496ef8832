"""Session: reports, checkpoints, collectives, preemption notices."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.committed import CheckpointReport, ReportedCheckpoint, open_committed
from spotfit.checkpoint.manifest import manifest_digest, manifests_of
from spotfit.checkpoint.writer import load_upload_job, run_upload_job
from spotfit.core.codec import encode
from spotfit.core.errors import CollectiveTimeoutError, ConfigError, SessionMisuseError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    JournalEntry,
    JournalEvent,
    ValidationEnded,
    ValidationRequest,
)
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.spec import RetentionConfig, RunSpec, ValidationSpec
from spotfit.protocol.worker_agent import (
    AwaitReports,
    CheckpointNamed,
    CollectiveWaiting,
    CommitConfirmed,
    FilesReport,
    MetricsReport,
    PreemptionUpdate,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    ReportsSettled,
    RequestFinalSave,
    RequestUpload,
    SaveCompleted,
    SaveFailed,
    SuggestSave,
    Uploaded,
    ValidationFinished,
)
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.worker import session as sessions
from spotfit.worker.session import Session
from tests.unit.checkpoint.saved_checkpoints import make_directory, make_manifest, save_checkpoint
from tests.unit.worker.agent_end import FakeAgentConnection, make_start

SYNC, ASYNC, NO_UPLOAD = (
    CheckpointUploadMode.SYNC,
    CheckpointUploadMode.ASYNC,
    CheckpointUploadMode.NO_UPLOAD,
)
COMMITTED = CheckpointConsistencyMode.COMMITTED
VALIDATED = CheckpointConsistencyMode.VALIDATED


@pytest.fixture
def agent() -> Iterator[FakeAgentConnection]:
    with contextlib.closing(FakeAgentConnection()) as agent:
        yield agent


@pytest.fixture
def other_agent() -> Iterator[FakeAgentConnection]:
    with contextlib.closing(FakeAgentConnection()) as agent:
        yield agent


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def session(agent: FakeAgentConnection, store: MemoryStore) -> Session:
    return Session(make_start(), agent.connection, store)


def make_report(where: Path, mode: CheckpointUploadMode = SYNC, **more: Any) -> CheckpointReport:
    checkpoint = Checkpoint.from_directory(make_directory(where, model="w"))
    return CheckpointReport(checkpoint, mode, more.pop("delete_after_upload", False), **more)


# --- reports without files -------------------------------------------------------------------


def test_a_report_without_files_does_not_wait(session: Session, agent: FakeAgentConnection) -> None:
    session.report_metrics({"loss": 0.5})
    session.report_metrics({"loss": 0.25}, "best")
    assert agent.receive() == [
        MetricsReport(report_index=0, metrics=msgspec.Raw(b'{"loss":0.5}')),
        MetricsReport(
            report_index=1, metrics=msgspec.Raw(b'{"loss":0.25}'), checkpoint_dir_name="best"
        ),
    ]
    assert session.report_count == 2


def test_a_rejected_report_takes_no_index(session: Session, agent: FakeAgentConnection) -> None:
    with pytest.raises(ValueError, match="cannot be reported"):
        session.report_metrics({"loss": object()})
    session.report_metrics({"loss": 1})
    assert [frame.report_index for frame in agent.receive_of_type(MetricsReport)] == [0]


def test_reports_drain_the_socket_now_and_then(
    session: Session, agent: FakeAgentConnection
) -> None:
    session.report_metrics({})
    agent.send(CommitConfirmed(checkpoint_name="a", metrics={}))
    for _ in range(255):
        session.report_metrics({})
    agent.receive()
    assert agent.connection._poller.poll(0), "not at every report"
    session.report_metrics({})
    assert not agent.connection._poller.poll(0), "at every 256th report"


# --- reports with files ----------------------------------------------------------------------


def test_a_checkpoint_is_named_uploaded_and_reported(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    agent.name_report(0, "ck-a", (0, 1), loss=0.125)
    session.report_checkpoint({"loss": 9}, make_report(tmp_path / "ck", dir_name="ck-a"))
    (manifest,) = manifests_of(store, "ck-a")
    assert agent.receive() == [
        FilesReport(
            report_index=0,
            metrics=msgspec.Raw(b'{"loss":9}'),
            checkpoint_dir_name="ck-a",
            blocks_training=True,
        ),
        SaveCompleted(
            report_index=0,
            checkpoint_name="ck-a",
            size_bytes=1,
            manifest_digest=manifest_digest(manifest),
        ),
    ]
    assert (manifest.round, manifest.report_index, manifest.rank, manifest.ranks) == (
        1,
        0,
        0,
        (0, 1),
    )
    assert manifest.metrics == {"loss": 0.125}, "those of rank 0"
    assert store.get("ck-a/model") == b"w"
    assert (tmp_path / "ck" / "model").exists(), "a SYNC upload leaves the local copy"


def test_only_reports_with_files_are_counted_as_such(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.name_report(1, "a")
    session.report_metrics({})
    session.report_checkpoint({}, make_report(tmp_path / "a"))
    session.snapshot_channel.submit({}, tmp_path / "segment")
    assert session.snapshot_channel.files_report_count == 1
    assert session.report_count == 3


def test_a_report_does_not_wait_for_the_commit(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.name_report(0, "a")
    agent.name_report(1, "b")
    session.report_checkpoint({}, make_report(tmp_path / "a"))
    session.report_checkpoint({}, make_report(tmp_path / "b"))
    assert [frame.checkpoint_name for frame in agent.receive_of_type(SaveCompleted)] == ["a", "b"]


def test_the_local_copy_is_deleted_on_request(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.name_report(0, "a")
    session.report_checkpoint({}, make_report(tmp_path / "a", delete_after_upload=True))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [SYNC, NO_UPLOAD])
def test_files_of_the_parent_are_shared_unless_replaced(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path, mode: Any
) -> None:
    agent.name_report(0, "same")
    agent.name_report(1, "same@1-1", base="same")
    session.report_checkpoint({}, make_report(tmp_path / "a"))
    store.put("old/more", b"x")
    other = Checkpoint.from_directory(make_directory(tmp_path / "b", more="x"))
    old = Checkpoint.from_store(store, "old")
    session.report_checkpoint(
        {}, CheckpointReport(other if mode is SYNC else old, mode, delete_after_upload=False)
    )
    (manifest,) = manifests_of(store, "same@1-1")
    assert [(file.name, file.source_prefix) for file in manifest.files] == [
        ("more", ""),
        ("model", "same"),
    ]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_shared_files_are_in_the_latest_checkpoint_before_its_commit(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path, mode: Any
) -> None:
    agent.name_report(0, "same")
    agent.name_report(1, "same@1-1", (0, 1), base="same")
    session.report_checkpoint({}, make_report(tmp_path / "a"))
    other = Checkpoint.from_directory(make_directory(tmp_path / "b", more="x"))
    session.report_checkpoint({}, CheckpointReport(other, mode, delete_after_upload=False))
    for request in agent.receive_of_type(RequestUpload):
        run_upload_job(load_upload_job(request.upload_job), store)
        agent.send(
            Uploaded(report_index=request.report_index, checkpoint_name=request.checkpoint_name)
        )
    latest = session.latest_checkpoint()
    assert latest is not None
    assert latest.path == "private/same@1-1"
    with latest.as_directory() as stored:
        assert {path.name for path in Path(stored).iterdir()} == {"model", "more"}


def test_an_async_upload_is_delegated_to_the_agent(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    agent.name_report(3, "unused")
    agent.name_report(0, "a", loss=0.5)
    session.report_checkpoint({}, make_report(tmp_path / "a", ASYNC, delete_after_upload=True))
    (request,) = agent.receive_of_type(RequestUpload)
    job = load_upload_job(request.upload_job)
    assert (request.report_index, request.checkpoint_name) == (0, "a")
    assert (job.manifest.name, job.manifest.report_index, job.manifest.rank) == ("a", 0, 0)
    assert (job.manifest.metrics, job.delete_after_upload) == ({"loss": 0.5}, True)
    assert job.checkpoint.local_directory == tmp_path / "a"
    assert list(store.list()) == [], "report has returned, and this process uploads nothing"


def test_wait_for_uploads_waits_for_delegated_uploads(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    for n, name in enumerate(("a", "b")):
        agent.name_report(n, name)
        session.report_checkpoint({}, make_report(tmp_path / name, ASYNC))
    assert session.latest_checkpoint() is None, "not before it is stored"
    agent.send(Uploaded(report_index=0, checkpoint_name="a"))
    assert path_of_latest(session) == "private/a"
    closing = threading.Thread(target=session.wait_for_uploads)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    agent.send(Uploaded(report_index=1, checkpoint_name="b"))
    closing.join(60)
    assert not closing.is_alive()
    assert path_of_latest(session) == "private/b"


def path_of_latest(session: Session) -> str:
    latest = session.latest_checkpoint()
    assert latest is not None
    return latest.path


def test_a_sync_report_waits_for_earlier_async_uploads(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.name_report(0, "a")
    session.report_checkpoint({}, make_report(tmp_path / "a", ASYNC))
    agent.name_report(1, "b")
    second = threading.Thread(
        target=session.report_checkpoint, args=({}, make_report(tmp_path / "b"))
    )
    second.start()
    second.join(0.05)
    assert agent.receive_of_type(SaveCompleted) == []
    agent.send(Uploaded(report_index=0, checkpoint_name="a"))
    second.join(60)
    assert [frame.checkpoint_name for frame in agent.receive_of_type(SaveCompleted)] == ["b"]


def test_a_delegated_upload_with_a_parent_waits_for_earlier_uploads(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.name_report(0, "same")
    session.report_checkpoint({}, make_report(tmp_path / "a", ASYNC))
    agent.name_report(1, "same@1-1", base="same")
    again = threading.Thread(
        target=session.report_checkpoint, args=({}, make_report(tmp_path / "b", ASYNC))
    )
    again.start()
    again.join(0.05)
    assert [
        load_upload_job(one.upload_job).parent for one in agent.receive_of_type(RequestUpload)
    ] == [""]
    agent.send(Uploaded(report_index=0, checkpoint_name="same"))
    again.join(60)
    assert [
        load_upload_job(one.upload_job).parent for one in agent.receive_of_type(RequestUpload)
    ] == ["same"]


def test_upload_functions_run_in_this_process_in_order(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    gate = threading.Event()

    def upload(_: Checkpoint, name: str) -> Checkpoint:
        assert gate.wait(60)
        store.put(f"{name}/model", b"w")
        return Checkpoint.from_store(store, name)

    for n, name in enumerate(("a", "b")):
        agent.name_report(n, name)
        session.report_checkpoint(
            {}, make_report(tmp_path / name, ASYNC, delete_after_upload=True, upload_fn=upload)
        )
    session.report_metrics({"loss": 1})
    assert agent.receive_of_type(SaveCompleted) == [], "report returned before the upload was done"
    gate.set()
    session.wait_for_uploads()
    assert [frame.checkpoint_name for frame in agent.receive_of_type(SaveCompleted)] == ["a", "b"]
    assert not (tmp_path / "a").exists()
    assert path_of_latest(session) == "private/b"


def test_a_failing_background_upload_calls_on_upload_error(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    reported: list[BaseException] = []
    failed = threading.Event()

    def fail(error: BaseException) -> None:
        reported.append(error)
        failed.set()

    def raises(_: Checkpoint, __: str) -> Checkpoint:
        raise ConnectionResetError("the storage is gone")

    session = Session(make_start(), agent.connection, store, on_upload_error=fail)
    agent.name_report(0, "a")
    session.report_checkpoint({}, make_report(tmp_path / "a", ASYNC, upload_fn=raises))
    assert failed.wait(60), "without a call of close"
    assert str(reported[0]) == "the storage is gone"


def test_a_failing_sync_upload_raises_in_report(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.name_report(0, "a")
    gone = Checkpoint.from_directory(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        session.report_checkpoint({}, CheckpointReport(gone, SYNC, delete_after_upload=False))
    # The function may catch the error, and nothing must wait for these files.
    *_, failed = agent.receive()
    assert isinstance(failed, SaveFailed)
    assert failed.report_index == 0
    assert failed.reason.startswith("CheckpointNotFoundError: ")


def test_no_upload_records_files_in_the_run_directory(
    session: Session, agent: FakeAgentConnection, store: MemoryStore
) -> None:
    store.put("own/model", b"w")
    agent.name_report(0, "own")
    session.report_checkpoint(
        {},
        CheckpointReport(Checkpoint.from_store(store, "own"), NO_UPLOAD, delete_after_upload=False),
    )
    frame, reported = agent.receive()
    assert isinstance(frame, FilesReport)
    assert frame.checkpoint_dir_name == "own", "the folder of the files"
    assert not frame.managed_upload, "only the user may delete it"
    assert isinstance(reported, SaveCompleted)
    assert reported.custom_folder == "own"
    (manifest,) = manifests_of(store, "own")
    assert (manifest.folder, manifest.files[0].name) == ("own", "model")


def test_no_upload_of_an_empty_folder_is_a_checkpoint_without_files(
    session: Session, agent: FakeAgentConnection, store: MemoryStore
) -> None:
    agent.name_report(0, "placeholder")
    placeholder = Checkpoint.from_store(store, "placeholder")
    session.report_checkpoint(
        {"score": 1}, CheckpointReport(placeholder, NO_UPLOAD, delete_after_upload=False)
    )
    assert [frame.size_bytes for frame in agent.receive_of_type(SaveCompleted)] == [0]
    with open_committed(store, "placeholder").as_directory() as directory:
        assert list(Path(directory).iterdir()) == []


def test_no_upload_does_not_call_the_upload_function(
    session: Session, agent: FakeAgentConnection, store: MemoryStore
) -> None:
    def upload(_: Checkpoint, __: str) -> Checkpoint:
        raise AssertionError("must not be called")

    store.put("own/model", b"w")
    agent.name_report(0, "own")
    stored = Checkpoint.from_store(store, "own")
    session.report_checkpoint(
        {}, CheckpointReport(stored, NO_UPLOAD, delete_after_upload=False, upload_fn=upload)
    )
    assert [frame.checkpoint_name for frame in agent.receive_of_type(SaveCompleted)] == ["own"]


@pytest.mark.parametrize("folder", ["", ".spotfit/journal"])
def test_no_upload_outside_of_the_run_directory_is_rejected(
    session: Session, store: MemoryStore, tmp_path: Path, folder: str
) -> None:
    elsewhere = Checkpoint.from_directory(tmp_path)
    checkpoint = Checkpoint.from_store(store, folder) if folder else elsewhere
    with pytest.raises(ValueError, match="outside the experiment directory"):
        session.report_checkpoint(
            {}, CheckpointReport(checkpoint, NO_UPLOAD, delete_after_upload=False)
        )


def test_no_upload_never_deletes_files(agent: FakeAgentConnection, tmp_path: Path) -> None:
    session = Session(make_start(), agent.connection, open_store(tmp_path / "run"))
    agent.name_report(0, "own")
    session.report_checkpoint(
        {}, make_report(tmp_path / "run" / "own", NO_UPLOAD, delete_after_upload=True)
    )
    assert (tmp_path / "run" / "own" / "model").exists()


def test_an_upload_function_replaces_the_upload(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        store.put(f"models/{name}/model", b"uploaded by me")
        return Checkpoint.from_store(store, f"models/{name}")

    agent.name_report(0, "a")
    session.report_checkpoint({}, make_report(tmp_path / "a", upload_fn=upload))
    (manifest,) = manifests_of(store, "a")
    assert manifest.folder == "models/a"
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.path == "private/models/a"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "must return a Checkpoint, not a NoneType"),
        (Checkpoint("/elsewhere"), "outside the experiment directory"),
    ],
)
def test_an_invalid_result_of_an_upload_function_is_rejected(
    session: Session, agent: FakeAgentConnection, tmp_path: Path, given: Any, message: str
) -> None:
    agent.name_report(0, "a")
    with pytest.raises(ValueError, match=message):
        session.report_checkpoint({}, make_report(tmp_path / "a", upload_fn=lambda *_: given))


def test_a_checkpoint_directory_that_contains_the_run_is_rejected(
    agent: FakeAgentConnection, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "results" / "run")
    session = Session(make_start(), agent.connection, store)
    with pytest.raises(ValueError, match="contains the experiment directory"):
        session.report_checkpoint({}, make_report(tmp_path / "results", delete_after_upload=True))
    assert agent.receive() == []


# --- checkpoints to resume from --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reads", "warns"),
    [
        ({"checkpoint": "old"}, False, True),
        ({"checkpoint": "old"}, True, False),
        ({"checkpoint": "old", "rank": 1}, False, False),
        ({"checkpoint": "old", "has_snapshots": True}, False, False),
        ({}, False, False),
    ],
    ids=["ignored", "read", "other rank", "of a Checkpointer", "first round"],
)
def test_a_function_that_ignores_its_checkpoint_is_warned_once(
    agent: FakeAgentConnection,
    store: MemoryStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    reads: bool,
    warns: bool,
) -> None:
    save_checkpoint(store, tmp_path / "old", make_manifest("old"), model="old")
    session = Session(make_start(round=2, **fields), agent.connection, store)
    if reads:
        session.latest_checkpoint()
    for n in range(2):
        agent.name_report(n, f"c{n}")
        session.report_checkpoint({}, make_report(tmp_path / f"new{n}"))
    err = capsys.readouterr().err
    assert err.count("this run has the checkpoint old, but the training function") == warns


def test_a_first_round_has_no_latest_checkpoint(session: Session) -> None:
    assert session.latest_checkpoint() is None


def test_the_latest_checkpoint_is_the_reported_or_the_restored_one(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    save_checkpoint(store, tmp_path / "old", make_manifest("old"), model="old")
    session = Session(make_start(checkpoint="old", round=2), agent.connection, store)
    restored = session.latest_checkpoint()
    assert restored is not None
    assert restored.path == "private/old"
    session.report_metrics({})
    assert session.latest_checkpoint() == restored, "a report without files changes nothing"
    agent.name_report(1, "new")
    session.report_checkpoint({}, make_report(tmp_path / "new"))
    latest = session.latest_checkpoint()
    assert latest is not None
    assert latest.path == "private/new"


def write(store: MemoryStore, *events: JournalEvent) -> None:
    journal = Journal(store)
    for event in events:
        journal.append(
            JournalEntry(run_id=RunId("r"), author=AgentId("a"), event=event), journal.catch_up()
        )


def test_reported_checkpoints_are_ordered_worst_first_without_deleted_ones(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    spec = RunSpec(
        run_id=RunId("r"),
        name="run",
        fit_id="f",
        min_workers=1,
        max_workers=1,
        retention=RetentionConfig(num_to_keep=2, score_attribute="score"),
    )
    session = Session(make_start(spec=msgspec.Raw(encode(spec))), agent.connection, store)
    committed = [
        CheckpointCommitted(
            name=name, round=1, report_index=n, metrics={"score": score}, ranks=(0,)
        )
        for n, (name, score) in enumerate((("a", 3), ("b", 1), ("c", 2)))
    ]
    write(store, *committed, CheckpointDropped(name="b", reason="the worst"))
    reported = session.reported_checkpoints(COMMITTED, timeout_s=None)
    assert [(one.checkpoint.path, one.metrics["score"]) for one in reported] == [
        ("private/c", 2),
        ("private/a", 3),
    ]
    assert {one.status.value for one in reported} == {"COMMITTED"}


PENDING = CheckpointCommitted(
    name="a",
    round=1,
    report_index=0,
    metrics={"acc": 1},
    ranks=(0,),
    validation=ValidationRequest(),
)
WITH_VALIDATION = msgspec.Raw(
    encode(
        RunSpec(
            run_id=RunId("r"),
            name="run",
            fit_id="f",
            min_workers=1,
            max_workers=1,
            validation=ValidationSpec(),
        )
    )
)


def statuses(checkpoints: list[ReportedCheckpoint]) -> list[str]:
    return [one.status.name for one in checkpoints]


def test_validated_mode_waits_until_no_validation_is_pending(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    session = Session(make_start(spec=WITH_VALIDATION), agent.connection, store)
    write(store, PENDING)
    assert statuses(session.reported_checkpoints(COMMITTED, timeout_s=None)) == [
        "PENDING_VALIDATION"
    ]
    assert statuses(session.reported_checkpoints(VALIDATED, timeout_s=0)) == ["PENDING_VALIDATION"]
    reported: list[ReportedCheckpoint] = []
    waiting = threading.Thread(
        target=lambda: reported.extend(session.reported_checkpoints(VALIDATED, None))
    )
    waiting.start()
    agent.send(ValidationFinished(checkpoint_name="other_agent"))
    write(
        store,
        ValidationEnded(
            checkpoint_name="a", checkpoint_uid=PENDING.uid, status="validated", metrics={"acc": 2}
        ),
    )
    agent.send(ValidationFinished(checkpoint_name="a"))
    waiting.join(30)
    assert statuses(reported) == ["VALIDATED"]
    assert reported[0].metrics == {"acc": 2}


def test_a_validation_that_ended_before_is_not_waited_for(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    session = Session(make_start(spec=WITH_VALIDATION), agent.connection, store)
    write(
        store,
        PENDING,
        ValidationEnded(checkpoint_name="a", checkpoint_uid=PENDING.uid, status="timeout"),
    )
    assert statuses(session.reported_checkpoints(VALIDATED, timeout_s=None)) == [
        "VALIDATION_TIMEOUT"
    ]


def test_without_a_validation_config_no_validation_is_waited_for(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    spec = RunSpec(run_id=RunId("r"), name="run", fit_id="f", min_workers=1, max_workers=1)
    session = Session(make_start(spec=msgspec.Raw(encode(spec))), agent.connection, store)
    write(store, PENDING)
    assert statuses(session.reported_checkpoints(VALIDATED, timeout_s=None)) == [
        "PENDING_VALIDATION"
    ]


def test_a_checkpoint_about_to_be_deleted_is_not_returned(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    spec = RunSpec(
        run_id=RunId("r"),
        name="run",
        fit_id="f",
        min_workers=1,
        max_workers=1,
        retention=RetentionConfig(num_to_keep=1),
    )
    session = Session(make_start(spec=msgspec.Raw(encode(spec))), agent.connection, store)
    last = CheckpointCommitted(name="c", round=1, report_index=2, metrics={}, ranks=(0,))
    write(
        store,
        CheckpointCommitted(name="b", round=1, report_index=1, metrics={}, ranks=(0,)),
        PENDING,
        last,
    )
    names = [one.checkpoint.path for one in session.reported_checkpoints(COMMITTED, timeout_s=None)]
    assert names == ["private/a", "private/c"], "one validation is pending"


def test_a_validation_request_is_sent_and_written_to_the_manifest(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    session = Session(make_start(spec=WITH_VALIDATION), agent.connection, store)
    agent.name_report(0, "a")
    validation_request = ValidationRequest(fn_kwargs={"batches": 2})
    session.report_checkpoint({}, make_report(tmp_path, validation=validation_request))
    assert agent.receive_of_type(FilesReport)[0].validation == validation_request
    assert manifests_of(store, "a")[0].validation == validation_request


def test_a_validation_without_a_config_is_rejected(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    spec = RunSpec(run_id=RunId("r"), name="run", fit_id="f", min_workers=1, max_workers=1)
    session = Session(make_start(spec=msgspec.Raw(encode(spec))), agent.connection, store)
    with pytest.raises(ValueError, match="no validation_config"):
        session.report_checkpoint({}, make_report(tmp_path, validation=ValidationRequest()))


def test_reported_checkpoints_waits_for_reports_without_files_of_this_worker(
    session: Session, agent: FakeAgentConnection, store: MemoryStore
) -> None:
    session.report_metrics({})
    session.report_metrics({})
    assert session.reported_checkpoints(COMMITTED, timeout_s=0) == [], "the timeout has expired"
    assert agent.receive_of_type(AwaitReports) == [AwaitReports(report_count=2)]
    write(store, CheckpointCommitted(name="a", round=1, report_index=1, metrics={}, ranks=(1,)))
    agent.send(ReportsSettled(report_count=1), ReportsSettled(report_count=2))
    reported = session.reported_checkpoints(COMMITTED, timeout_s=None)
    assert [one.checkpoint.path for one in reported] == ["private/a"]


def test_settled_reports_are_not_waited_for_again(
    session: Session, agent: FakeAgentConnection
) -> None:
    session.reported_checkpoints(COMMITTED, timeout_s=None)
    session.report_metrics({})
    agent.send(ReportsSettled(report_count=1))
    session.drain()
    session.reported_checkpoints(COMMITTED, timeout_s=None)
    assert agent.receive_of_type(AwaitReports) == []


# --- collectives -----------------------------------------------------------------------------


def test_a_collective_returns_the_value_of_rank_0(
    session: Session, agent: FakeAgentConnection
) -> None:
    agent.send(
        RankZeroBroadcastResult(kind="own", seq=1, value=b"second"),
        RankZeroBroadcastResult(kind="own", seq=0, value=b"first"),
    )
    assert session.broadcast_bytes("own", b"x") == b"first"
    assert session.broadcast_bytes("own", b"y") == b"second"
    assert agent.receive() == [
        RankZeroBroadcast(kind="own", seq=0, value=b"x", blocks_training=True),
        RankZeroBroadcast(kind="own", seq=1, value=b"y", blocks_training=True),
    ]


def test_a_gather_returns_the_values_of_all_ranks(
    session: Session, agent: FakeAgentConnection
) -> None:
    agent.send(RankZeroBroadcastResult(kind="peers", seq=0, values=(b"zero", b"one")))
    assert session.all_gather_bytes("peers", b"zero") == (b"zero", b"one")
    assert agent.receive() == [
        RankZeroBroadcast(kind="peers", seq=0, value=b"zero", all_values=True, blocks_training=True)
    ]


def test_a_value_that_is_too_large_to_gather_is_rejected(
    session: Session, agent: FakeAgentConnection
) -> None:
    with pytest.raises(ConfigError, match=r"the limit is 4\.0 KiB"):
        session.all_gather_bytes("peers", b"x" * 4097)
    assert agent.receive() == []


def test_a_collective_timeout_names_the_missing_ranks(
    session: Session, agent: FakeAgentConnection
) -> None:
    agent.send(RankZeroBroadcastResult(kind="barrier", seq=0, missing_ranks=(1, 3)))
    with pytest.raises(CollectiveTimeoutError, match=r"timed out.* have not joined: \[1, 3\]"):
        session.barrier()


def test_a_report_timeout_names_the_missing_ranks(
    session: Session, agent: FakeAgentConnection, tmp_path: Path
) -> None:
    agent.send(RankZeroBroadcastResult(kind="report", seq=0, missing_ranks=(1,)))
    with pytest.raises(CollectiveTimeoutError, match=r"report timed out.*\[1\]"):
        session.report_checkpoint({}, make_report(tmp_path / "ck"))
    assert agent.receive_of_type(SaveCompleted) == []


def test_a_collective_that_cannot_complete_raises_with_the_reason(
    session: Session, agent: FakeAgentConnection
) -> None:
    agent.send(
        RankZeroBroadcastResult(
            kind="barrier", seq=0, missing_ranks=(1,), reason="rank 1 is somewhere else"
        )
    )
    with pytest.raises(SessionMisuseError, match="cannot complete: rank 1 is somewhere else"):
        session.barrier()


def test_a_waiting_collective_is_logged_with_the_missing_ranks(
    session: Session, agent: FakeAgentConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.send(
        CollectiveWaiting(kind="barrier", missing_ranks=(1, 3), waited_s=60.0),
        RankZeroBroadcastResult(kind="barrier", seq=0),
    )
    session.barrier()
    assert 'operation=barrier missing_ranks="1, 3" elapsed_s=60' in capsys.readouterr().err


def test_only_the_main_thread_blocks_training(session: Session, agent: FakeAgentConnection) -> None:
    agent.send(RankZeroBroadcastResult(kind="own", seq=0))
    thread = threading.Thread(target=session.broadcast_bytes, args=("own",))
    thread.start()
    thread.join()
    assert [frame.blocks_training for frame in agent.receive_of_type(RankZeroBroadcast)] == [False]


def test_an_internal_collective_has_its_own_timeout(session: Session) -> None:
    with pytest.raises(CollectiveTimeoutError, match="own timed out after 0 s on rank 0"):
        session.broadcast_bytes("own", timeout_s=0)


def test_a_broadcast_that_is_too_large_is_rejected(
    session: Session, agent: FakeAgentConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_BROADCAST_BYTES", 1024)
    with pytest.raises(ConfigError, match=r"has 1\.\d KiB; the limit is 1\.0 KiB") as refused:
        session.broadcast(b"x" * 1100)
    assert "torch.distributed" in refused.value.do
    assert agent.receive() == []


@pytest.mark.parametrize(("size_bytes", "warns"), [(900, False), (1100, True)])
def test_a_broadcast_over_a_kilobyte_is_logged(
    session: Session,
    agent: FakeAgentConnection,
    size_bytes: int,
    warns: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = b"x" * size_bytes
    agent.send(
        RankZeroBroadcastResult(kind="broadcast_from_rank_zero", seq=0, value=pickle.dumps(value))
    )
    assert session.broadcast(value) == value
    assert ("use it for small values" in capsys.readouterr().err) == warns


def test_all_ranks_receive_the_broadcast_of_rank_0(
    session: Session,
    agent: FakeAgentConnection,
    other_agent: FakeAgentConnection,
    store: MemoryStore,
) -> None:
    agent.send(RankZeroBroadcastResult(kind="broadcast_from_rank_zero", seq=0, missing_ranks=(1,)))
    with pytest.raises(CollectiveTimeoutError):
        session.broadcast({"seed": (1, 2)})
    (sent,) = agent.receive_of_type(RankZeroBroadcast)
    listener = Session(make_start(rank=1), other_agent.connection, store)
    other_agent.send(
        RankZeroBroadcastResult(kind="broadcast_from_rank_zero", seq=0, value=sent.value)
    )
    assert listener.broadcast("ignored") == {"seed": (1, 2)}
    assert other_agent.receive_of_type(RankZeroBroadcast)[0].value == b"", "only rank 0 sends"


def test_a_report_completed_without_this_rank_uploads_nothing(
    session: Session, agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    agent.send(
        CheckpointNamed(report_index=0, checkpoint_name="", ranks=(), metrics=msgspec.Raw(b"{}"))
    )
    session.report_checkpoint({"loss": 1.0}, make_report(tmp_path / "w"))
    assert agent.receive_of_type(SaveCompleted) == []
    assert list(store.list()) == []
    assert session.latest_checkpoint() is None


def test_preemption_info_is_none_without_a_notice(
    session: Session, agent: FakeAgentConnection
) -> None:
    agent.send(RankZeroBroadcastResult(kind="preemption_info", seq=0, value=b"null"))
    assert session.preemption_info() is None
    assert agent.receive() == [
        RankZeroBroadcast(kind="preemption_info", seq=0, value=b"null", blocks_training=True)
    ]


def test_preemption_info_returns_what_rank_0_knows(
    session: Session, agent: FakeAgentConnection
) -> None:
    notice = PreemptionUpdate(deadline_ms=5_000, node_to_ranks={"node-b": (2, 3), "node-a": (1,)})
    agent.send(notice, RankZeroBroadcastResult(kind="preemption_info", seq=0, value=encode(notice)))
    reported = session.preemption_info()
    assert agent.receive_of_type(RankZeroBroadcast)[0].value == encode(notice), (
        "the last known state of this rank"
    )
    assert reported is not None
    assert (reported.deadline_ms, reported.preempted_ranks) == (5_000, [1, 2, 3])
    assert reported.preempted_node_to_ranks == {"node-b": [2, 3], "node-a": [1]}


def test_a_preemption_without_a_deadline_has_none(
    session: Session, agent: FakeAgentConnection
) -> None:
    agent.send(
        RankZeroBroadcastResult(
            kind="preemption_info",
            seq=0,
            value=encode(PreemptionUpdate(deadline_ms=0, node_to_ranks={"node-a": (1,)})),
        )
    )
    reported = session.preemption_info()
    assert reported is not None
    assert reported.deadline_ms is None


def test_wait_for_preemption_returns_once_a_notice_arrives(
    session: Session, agent: FakeAgentConnection
) -> None:
    assert not session.wait_for_preemption(0.0)
    agent.send(PreemptionUpdate(deadline_ms=5_000, node_to_ranks={"node-a": (1,)}))
    assert session.wait_for_preemption(5.0)


def test_a_suggested_save_is_not_a_preemption(session: Session, agent: FakeAgentConnection) -> None:
    assert session.outlook().rebalance_recommendation is None
    agent.send(
        SuggestSave(reason="higher risk"),
        RankZeroBroadcastResult(kind="preemption_info", seq=0, value=b"null"),
    )
    assert session.preemption_info() is None
    assert not session.wait_for_preemption(0.0)
    reported = session.outlook().rebalance_recommendation
    assert reported is not None
    assert reported[1] == "higher risk"


def test_a_request_for_the_final_save_is_in_the_outlook(
    session: Session, agent: FakeAgentConnection
) -> None:
    assert session.outlook().final_save_request is None
    agent.send(RequestFinalSave(reason="Ctrl-C"))
    request = session.outlook().final_save_request
    assert request is not None
    assert request[1] == "Ctrl-C"


# --- datasets --------------------------------------------------------------------------------


def test_dataset_shard_raises(session: Session) -> None:
    with pytest.raises(KeyError, match="no dataset 'train'"):
        session.dataset_shard("train")
