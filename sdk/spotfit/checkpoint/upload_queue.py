"""Background uploads of a worker: one thread runs them in the order of the reports."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

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
        """Run the task after the tasks that were put before."""
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
        """Wait until all tasks are done or one has failed."""
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
