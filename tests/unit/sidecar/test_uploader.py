"""UploaderProxy: each upload is reported once, also if the process crashes."""

from __future__ import annotations

from spotfit.protocol.agent_sidecar import UploadDone, UploadError
from spotfit.protocol.worker_agent import RequestUpload
from spotfit.sidecar.uploader import QueuedUpload, UploaderProxy
from spotfit.testing.builders import RUN_KEY
from tests.unit.sidecar.fake_process import FakeProcess, FakeStarter


class Uploads:
    """An uploader with fake processes, and the outcomes it has reported."""

    def __init__(self) -> None:
        self.starter = FakeStarter()
        self.finished: list[tuple[str, UploadDone | UploadError]] = []
        self.uploader = UploaderProxy(
            "memory://run", RUN_KEY, self.starter.start, self._on_finished
        )

    def submit(self, name: str, *, round_number: int = 3, rank: int = 0) -> None:
        request = RequestUpload(report_index=0, checkpoint_name=name, upload_job=name.encode())
        self.uploader.submit(QueuedUpload(round_number, rank, request))

    def _on_finished(self, upload: QueuedUpload, outcome: UploadDone | UploadError) -> None:
        self.finished.append((upload.request.checkpoint_name, outcome))


def received_ids(process: FakeProcess) -> list[int]:
    return [message["job_id"] for message in process.received]


def test_the_first_upload_starts_a_process() -> None:
    uploads = Uploads()
    assert uploads.uploader.round is None
    assert uploads.starter.processes == []
    uploads.submit("a", rank=1)
    uploads.submit("b")
    (process,) = uploads.starter.processes
    assert [(job["job_id"], job["rank"], job["storage_url"]) for job in process.received] == [
        (1, 1, "memory://run"),
        (2, 0, "memory://run"),
    ]
    assert uploads.uploader.round == 3


def test_each_outcome_is_reported_once() -> None:
    uploads = Uploads()
    uploads.submit("a")
    uploads.submit("b")
    uploads.starter.latest.reply(
        UploadError(job_id=2, traceback_text="no"),
        UploadDone(job_id=1, size_bytes=10),
        UploadDone(job_id=1, size_bytes=10),
    )
    assert uploads.finished == [
        ("b", UploadError(job_id=2, traceback_text="no")),
        ("a", UploadDone(job_id=1, size_bytes=10)),
    ]
    assert uploads.uploader.round is None


def test_unfinished_uploads_of_a_crashed_process_are_submitted_to_a_new_one() -> None:
    uploads = Uploads()
    uploads.submit("a")
    uploads.submit("b")
    uploads.starter.latest.reply(UploadDone(job_id=1, size_bytes=10))
    uploads.starter.latest.exit()
    assert received_ids(uploads.starter.latest) == [2]
    uploads.starter.latest.reply(UploadDone(job_id=2, size_bytes=10))
    uploads.starter.latest.exit()
    assert len(uploads.starter.processes) == 2, "no uploads are left"
    uploads.submit("c")
    assert received_ids(uploads.starter.latest) == [3]


def test_an_upload_that_crashes_three_processes_fails() -> None:
    uploads = Uploads()
    uploads.submit("a")
    for n in range(3):
        uploads.starter.processes[n].exit("was killed by SIGSEGV")
    assert len(uploads.starter.processes) == 3
    ((name, outcome),) = uploads.finished
    assert name == "a"
    assert isinstance(outcome, UploadError)
    assert outcome.traceback_text == "The uploader process was killed by SIGSEGV."


def test_a_cancelled_upload_is_not_reported() -> None:
    uploads = Uploads()
    uploads.submit("a")
    cancelled = uploads.starter.latest
    uploads.uploader.cancel_all()
    assert cancelled.killed
    assert uploads.uploader.round is None
    uploads.submit("b", round_number=4)
    cancelled.reply(UploadDone(job_id=1, size_bytes=10))
    cancelled.exit()
    assert (uploads.finished, len(uploads.starter.processes)) == ([], 2)
    uploads.starter.latest.reply(UploadDone(job_id=2, size_bytes=5))
    assert uploads.finished == [("b", UploadDone(job_id=2, size_bytes=5))]


def test_cancel_without_uploads_keeps_the_process() -> None:
    uploads = Uploads()
    uploads.submit("a")
    uploads.starter.latest.reply(UploadDone(job_id=1, size_bytes=10))
    uploads.uploader.cancel_all()
    assert not uploads.starter.latest.killed
