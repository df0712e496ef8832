"""Upload of the files of one rank's report, by the worker itself or by the uploader process.

Background uploads of a worker: one thread runs them in the order of the reports.
"""

from __future__ import annotations

import pickle
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.committed import UploadFn
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.writer import save_directory
from spotfit.core.errors import TransientStoreError
from spotfit.host import env, log
from spotfit.host.system import SystemClock
from spotfit.store.api import Store

# User functions mostly write with libraries that retry by themselves, so two more attempts are
# enough: one soon, and one after a moment of throttling.
_RETRY_DELAYS_S = (0.5, 2.0)
# pyarrow raises a plain OSError for every failure; only its text shows that S3 was overloaded.
_TRANSIENT_PATTERN = re.compile(
    "AWS Error (SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|NETWORK_CONNECTION|UNKNOWN)"
)


class UploadJob(NamedTuple):
    """What to upload, and how. Another process of this node can unpickle and run it."""

    checkpoint: Checkpoint
    manifest: Manifest
    """The manifest to write, still without files."""
    parent: str = ""
    """Earlier checkpoint of the same requested name; its files that are not replaced are listed in
    this one as well."""
    delete_after_upload: bool = False
    """Whether to delete the local copy after the upload."""

    def to_bytes(self) -> bytes:
        """Pickle the job for the uploader process, which cannot import user-defined classes.

        A subclass of `Checkpoint` becomes a plain one. `load_upload_job` is the inverse.
        """
        return pickle.dumps(self._replace(checkpoint=self.checkpoint.without_extras()))


def load_upload_job(body: bytes) -> UploadJob:
    """Unpickle a job that a worker of this node has sent; the inverse of `UploadJob.to_bytes`.

    Called by the uploader process. Only for bytes from the run's own workers: unpickling runs code.
    """
    job = pickle.loads(body)  # noqa: S301 - from this node's worker, over its own socket
    assert isinstance(job, UploadJob)
    return job


def run_upload_job(job: UploadJob, store: Store) -> Manifest:
    """Upload the files, then write and return the manifest, now with its files. Idempotent.

    Called by a worker or by the uploader process. `store` is rooted at the run. Blocks, and logs a
    warning while the upload is slow. The local copy stays. Raises `ConfigError` if the local
    directory does not exist, `IntegrityError` for missing or corrupt files of a checkpoint in a
    bucket, and the errors of the store.
    """
    # Also while a checkpoint in another bucket is downloaded first.
    with warn_while_slow(job.manifest.name), job.checkpoint.as_directory() as directory:
        return save_directory(store, Path(directory), job.manifest, parent=job.parent)


def upload_with_user_fn(upload_fn: UploadFn, checkpoint: Checkpoint, name: str) -> Any:
    """Return what the user-defined upload function returns, without checking it.

    `name` is the checkpoint's directory name, such as "checkpoint_000003". Calls the function
    again, after 0.5 s and 2 s, if it raises a transient storage error; any other exception, and the
    third, propagates. Blocks, and logs a warning while it is slow.
    """
    with warn_while_slow(name):
        for delay_s in _RETRY_DELAYS_S:
            try:
                return upload_fn(checkpoint, name)
            except Exception as error:  # raised by user code
                if not (
                    isinstance(error, TransientStoreError) or _TRANSIENT_PATTERN.search(str(error))
                ):
                    raise
                log.warning("checkpoint.upload_retry", name=name, reason=str(error))
            SystemClock().wait(delay_s)
        return upload_fn(checkpoint, name)


def delete_local_copy(checkpoint: Checkpoint, store: Store) -> None:
    """Delete the uploaded local directory, unless it is inside the run's own storage.

    Called after the upload if the report has `delete_after_upload`. `store` is rooted at the run; a
    directory in it may be an earlier checkpoint, or hold files of ranks that have not uploaded them
    yet. Does nothing for a checkpoint in a bucket; errors are ignored.
    """
    local = checkpoint.local_directory
    if local is not None and checkpoint.folder_relative_to(store) is None:
        shutil.rmtree(local, ignore_errors=True)


@contextmanager
def warn_while_slow(name: str) -> Iterator[None]:
    """Log a warning at intervals while the block, an upload, runs; it is not stopped.

    The interval is SPOTFIT_CHECKPOINT_UPLOAD_WARN_INTERVAL_S, 60 s by default. `name` is the
    checkpoint's name for the log. Exceptions of the block propagate.
    """
    interval_s = env.read(env.UPLOAD_WARN_INTERVAL_S)
    finished = threading.Event()

    def warn() -> None:
        elapsed_s = 0.0
        while not finished.wait(interval_s):
            elapsed_s += interval_s
            log.warning("checkpoint.upload_slow", name=name, elapsed_s=elapsed_s)

    # A thread, because the upload itself may block in user code or in a library.
    threading.Thread(target=warn, name="spotfit-upload-watch", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


# --- Background uploads of a worker ---------------------------------------------------------------


UploadTask = Callable[[], None]


class UploadQueue:
    """Runs upload tasks one after the other on a thread that starts with the first task.

    The first task that raises is passed to `on_error`, and no further task runs.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[UploadTask] = queue.SimpleQueue()
        self._idle = threading.Condition()  # guards the two fields below
        self._pending_count = 0
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def put(self, task: UploadTask) -> None:
        """Run the task on the queue's thread, after the tasks that were put before; does not block.

        After a task has raised, tasks are accepted but never run.
        """
        with self._idle:
            self._pending_count += 1
        self._tasks.put(task)
        if self._thread is None:
            # A daemon: a worker whose function has raised must exit without waiting for uploads.
            self._thread = threading.Thread(
                target=self._run_all, name="spotfit-upload", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Block, without a timeout, until all tasks are done or one has failed.

        Raises nothing: the failure was passed to `on_error`, on the queue's thread.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._pending_count == 0 or self._has_failed)

    def _run_all(self) -> None:
        while not self._has_failed:
            task = self._tasks.get()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - runs the user's upload function
                # Before the flag is set: wait() must not return while the error is unreported.
                self._on_error(error)
                self._has_failed = True
            with self._idle:
                self._pending_count -= 1
                self._idle.notify_all()
