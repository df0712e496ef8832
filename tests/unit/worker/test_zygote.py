"""The zygote by itself: what it may import, when it may fork, and whose pipes it passes on."""

import array
import socket
import threading
from pathlib import Path

import pytest

from spotfit.worker import zygote


def test_a_framework_s_first_stage_comes_first_and_ours_with_it() -> None:
    first, later = zygote.stages_of("torch")
    assert first[0] == "torch"
    assert "spotfit.worker.session" in first
    assert "torch._dynamo" in later
    assert "torch._dynamo" not in first


def test_an_unknown_framework_is_the_worker_s_to_tell() -> None:
    assert zygote.stages_of("no such framework")[1] == []


def test_what_cannot_be_imported_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    zygote._import("breaks_on_import")
    zygote._import("is_not_there")


def test_a_process_with_threads_may_not_fork() -> None:
    stay, leave = threading.Event(), threading.Event()

    def live() -> None:
        stay.set()
        leave.wait()

    thread = threading.Thread(target=live)
    thread.start()
    stay.wait()
    try:
        assert not zygote._can_fork()
    finally:
        leave.set()
        thread.join()


def test_descriptors_are_found_among_what_came_along() -> None:
    body = array.array("i", [5, 6, 7]).tobytes()
    assert zygote._descriptors([(socket.SOL_SOCKET, socket.SCM_RIGHTS, body)]) == (5, 6, 7)
    assert zygote._descriptors([(socket.SOL_SOCKET, socket.SCM_RIGHTS + 1, body)]) == ()
