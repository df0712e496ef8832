"""Background jobs: in order, awaited, and none after one that failed."""

from __future__ import annotations

import threading

from spotfit.worker.uploads import Uploads


def test_jobs_run_in_order_in_one_named_thread() -> None:
    uploads, done = Uploads(fail=print), list[tuple[int, str]]()
    for n in range(20):
        uploads.put(lambda n=n: done.append((n, threading.current_thread().name)))  # type: ignore[misc]
    uploads.wait()
    assert done == [(n, "spotfit-upload") for n in range(20)]


def test_nothing_to_do_is_done() -> None:
    Uploads(fail=print).wait()


def test_after_a_failure_nothing_runs_and_nobody_waits() -> None:
    told: list[BaseException] = []
    done: list[int] = []
    failed = threading.Event()

    def fail(error: BaseException) -> None:
        told.append(error)
        failed.set()

    def raises() -> None:
        raise SystemExit(3)

    uploads = Uploads(fail)
    uploads.put(raises)
    assert failed.wait(60)
    uploads.put(lambda: done.append(1))
    uploads.wait()
    assert [type(error) for error in told] == [SystemExit]
    assert done == []
