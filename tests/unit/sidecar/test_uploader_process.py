"""UploadServer: uploads of a rank are executed in order, failures are reported."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.manifest import manifest_digest, manifests_of
from spotfit.checkpoint.writer import SnapshotUploadJob, UploadJob, encode_upload_job
from spotfit.core.errors import CheckpointNotFoundError
from spotfit.protocol.agent_sidecar import FromUploader, StartUpload, UploadDone, UploadError
from spotfit.sidecar.uploader_process import UploadServer
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.retry import PATIENT_RETRY_POLICY, RetryPolicy
from spotfit.testing.builders import RUN_ID, RUN_KEY
from tests.unit.checkpoint.saved_checkpoints import make_directory, make_manifest
from tests.unit.checkpoint.snapshots import write_segment


class Agent:
    """Collects the messages of an upload server."""

    def __init__(self) -> None:
        self.messages: list[FromUploader] = []
        self._more = threading.Condition()

    def on_message(self, message: FromUploader) -> None:
        with self._more:
            self.messages.append(message)
            self._more.notify()

    def wait_for(self, count: int) -> list[FromUploader]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.messages) >= count, 60)
        return self.messages


@pytest.fixture
def agent() -> Agent:
    return Agent()


def make_request(
    job_id: int, run: Path, directory: Path, name: str, *, delete: bool = False
) -> StartUpload:
    job = UploadJob(
        Checkpoint.from_directory(directory),
        make_manifest(name, report=job_id),
        delete_after_upload=delete,
    )
    return start_upload(job_id, run, job.to_bytes())


def start_upload(job_id: int, run: Path, upload_job: bytes) -> StartUpload:
    return StartUpload(
        job_id=job_id,
        rank=0,
        storage_url=str(run),
        secret=RUN_KEY.to_text(),
        run_id=RUN_ID,
        upload_job=upload_job,
    )


def test_uploads_of_a_rank_are_executed_in_order(agent: Agent, tmp_path: Path) -> None:
    server = UploadServer(agent.on_message)
    for n in range(5):
        directory = make_directory(tmp_path / str(n), model="w" * n)
        server.submit(make_request(n, tmp_path / "run", directory, f"c{n}", delete=True))
    done = agent.wait_for(5)
    store = open_store(tmp_path / "run")
    digests = [manifest_digest(manifests_of(store, f"c{n}")[0]) for n in range(5)]
    assert done == [
        UploadDone(job_id=n, size_bytes=n, manifest_digest=digests[n]) for n in range(5)
    ]
    assert [manifests_of(store, f"c{n}")[0].size_bytes for n in range(5)] == list(range(5))
    assert not (tmp_path / "1").exists(), "delete_after_upload"


def test_a_failing_upload_is_reported_and_later_ones_are_executed(
    agent: Agent, tmp_path: Path
) -> None:
    server = UploadServer(agent.on_message)
    server.submit(make_request(0, tmp_path / "run", tmp_path / "gone", "c0", delete=True))
    server.submit(
        make_request(1, tmp_path / "run", make_directory(tmp_path / "here", model="w"), "c1")
    )
    error, done = agent.wait_for(2)
    assert isinstance(error, UploadError)
    assert "gone, does not exist" in error.traceback_text
    assert isinstance(pickle.loads(error.pickled_exception), CheckpointNotFoundError)
    assert isinstance(done, UploadDone)
    assert (done.job_id, done.size_bytes) == (1, 1)
    assert (tmp_path / "here").exists()


def test_the_store_retries_as_long_as_that_of_a_worker(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RetryPolicy | None] = []

    def record_open(url: str, budget: RetryPolicy | None = None) -> Store:
        opened.append(budget)
        return open_store(url, budget)

    monkeypatch.setattr("spotfit.sidecar.uploader_process.open_store", record_open)
    server = UploadServer(agent.on_message)
    for n in range(2):
        server.submit(
            make_request(n, tmp_path / "run", make_directory(tmp_path / str(n), model="w"), f"c{n}")
        )
    agent.wait_for(2)
    assert opened == [PATIENT_RETRY_POLICY]


def test_a_slow_snapshot_upload_is_logged(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []

    @contextmanager
    def record_warning(name: str) -> Iterator[None]:
        warned.append(name)
        yield

    monkeypatch.setattr("spotfit.sidecar.uploader_process.warn_while_slow", record_warning)
    segment = write_segment(tmp_path / "0-0-1.segment", [b"w"])
    job = encode_upload_job(SnapshotUploadJob(str(segment), make_manifest("c0")))
    UploadServer(agent.on_message).submit(start_upload(0, tmp_path / "run", job))
    assert isinstance(agent.wait_for(1)[0], UploadDone)
    assert warned == ["c0"]
