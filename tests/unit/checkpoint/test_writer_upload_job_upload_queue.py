"""Background uploads run in order, and none after a failure."""

from __future__ import annotations

import threading

from spotfit.checkpoint.writer import UploadQueue


def test_tasks_run_in_order_on_one_named_thread() -> None:
    uploads, done = UploadQueue(on_error=print), list[tuple[int, str]]()
    for n in range(20):
        uploads.put(lambda n=n: done.append((n, threading.current_thread().name)))  # type: ignore[misc]
    uploads.wait()
    assert done == [(n, "spotfit-upload") for n in range(20)]


def test_waiting_without_tasks_returns_at_once() -> None:
    UploadQueue(on_error=print).wait()


def test_after_a_failure_no_task_runs_and_wait_returns() -> None:
    errors: list[BaseException] = []
    done: list[int] = []
    failed = threading.Event()

    def fail(error: BaseException) -> None:
        errors.append(error)
        failed.set()

    def raises() -> None:
        raise SystemExit(3)

    uploads = UploadQueue(fail)
    uploads.put(raises)
    assert failed.wait(60)
    uploads.put(lambda: done.append(1))
    uploads.wait()
    assert [type(error) for error in errors] == [SystemExit]
    assert done == []
