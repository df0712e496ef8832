"""Uploads in the background: one thread, in the order of the reports."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Uploads:
    """Runs jobs one after the other; the first that raises is told to `fail`, and no more are run.

    The thread starts with the first job.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._broken = False
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Run it after those before."""
        with self._idle:
            self._open += 1
        self._jobs.put(job)
        if self._thread is None:
            # A daemon: a worker whose function has raised does not stay for its uploads.
            self._thread = threading.Thread(target=self._work, name="spotfit-upload", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until nothing is left to upload, or an upload has failed."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0 or self._broken)

    def _work(self) -> None:
        while not self._broken:
            self._run(self._jobs.get())

    def _run(self, job: Job) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - the border to the user's upload function
            self._fail(error)
            self._broken = True
        with self._idle:
            self._open -= 1
            self._idle.notify_all()
