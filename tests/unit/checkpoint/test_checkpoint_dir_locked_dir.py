"""Directories that several processes of a node fill once and share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint import checkpoint_dir
from spotfit.checkpoint.checkpoint_dir import fill_once, private_folder, shared_directory
from spotfit.core.errors import StorePermissionError


class Filler:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, directory: Path) -> None:
        self.times += 1
        (directory / "x").write_text("filled")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_directory_is_filled_on_entry_and_removed_on_exit(tmp_path: Path) -> None:
    with shared_directory(tmp_path / "d", Filler()) as directory:
        assert (directory / "x").read_text() == "filled"
    assert names_in(tmp_path) == []


def test_a_nested_reader_does_not_remove_the_directory(tmp_path: Path) -> None:
    fill = Filler()
    with shared_directory(tmp_path / "d", fill) as outer:
        with shared_directory(tmp_path / "d", fill):
            pass
        assert (outer / "x").exists()
    assert fill.times == 1
    assert names_in(tmp_path) == []


def test_one_of_many_threads_fills_the_directory(tmp_path: Path) -> None:
    fill, all_here = Filler(), threading.Barrier(8)

    def read() -> None:
        all_here.wait()
        with shared_directory(tmp_path / "d", fill) as directory:
            all_here.wait()
            assert (directory / "x").read_text() == "filled"

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fill.times == 1
    assert names_in(tmp_path) == []


def test_a_failed_fill_leaves_no_directory(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError), shared_directory(tmp_path / "d", fail):
        pytest.fail("it was given out")
    assert names_in(tmp_path) == []
    fill = Filler()
    with shared_directory(tmp_path / "d", fill):
        assert fill.times == 1


# --- the download folder -------------------------------------------------------------------------


def test_the_private_folder_is_accessible_to_this_user_only(tmp_path: Path) -> None:
    own = private_folder(tmp_path)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    (own / "x").write_text("kept")
    assert private_folder(tmp_path) == own
    assert (own / "x").read_text() == "kept"


def open_to_all(own: Path) -> None:
    own.chmod(0o755)


def a_link(own: Path) -> None:
    own.rmdir()
    (own.parent / "elsewhere").mkdir(mode=0o700)
    own.symlink_to("elsewhere")


def a_file(own: Path) -> None:
    own.rmdir()
    own.write_text("in the way")


@pytest.mark.parametrize("taken", [open_to_all, a_link, a_file])
def test_a_folder_that_others_can_change_is_rejected(
    tmp_path: Path, taken: Callable[[Path], None]
) -> None:
    own = private_folder(tmp_path)
    taken(own)
    with pytest.raises(StorePermissionError, match="not a directory that only user") as refused:
        private_folder(tmp_path)
    assert "TMPDIR" in refused.value.do


# --- killed readers ------------------------------------------------------------------------------


def _hold(place: Path, ready: Any) -> None:
    with shared_directory(place, Filler()):
        ready.set()
        signal.pause()


def test_a_killed_reader_releases_its_lock(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    reader = spawn.Process(target=_hold, args=(tmp_path / "d", ready))
    reader.start()
    assert ready.wait(60)
    fill = Filler()
    with shared_directory(tmp_path / "d", fill):
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGKILL)
        reader.join()
    assert fill.times == 0
    assert names_in(tmp_path) == []


# --- persistent directories ------------------------------------------------------------------


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore that is released each time a process reads the fill count."""
    looked, look = threading.Semaphore(0), checkpoint_dir._fill_count

    def count(lock: int) -> int:
        times = look(lock)
        looked.release()
        return times

    monkeypatch.setattr(checkpoint_dir, "_fill_count", count)
    return looked


def test_a_concurrent_fill_is_awaited_and_not_repeated(
    tmp_path: Path, count_reads: threading.Semaphore
) -> None:
    second = threading.Thread(target=fill_once, args=(tmp_path / "d", tmp_path, fail))

    def fill(target: Path) -> None:
        for _ in range(2):
            count_reads.acquire()  # the first one's own looks
        second.start()
        count_reads.acquire()  # the second one has come, and waits from now on
        target.mkdir()

    fill_once(tmp_path / "d", tmp_path, fill)
    second.join(60)
    assert not second.is_alive()
    assert (tmp_path / "d").is_dir()


def fail(_: Path) -> None:
    raise ConnectionError("gone")


def test_after_a_failed_fill_the_waiting_process_fills(
    tmp_path: Path, count_reads: threading.Semaphore
) -> None:
    second = threading.Thread(target=fill_once, args=(tmp_path / "d", tmp_path, Path.mkdir))

    def fill(_place: Path) -> None:
        for _ in range(2):
            count_reads.acquire()
        second.start()
        count_reads.acquire()
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        fill_once(tmp_path / "d", tmp_path, fill)
    second.join(60)
    assert (tmp_path / "d").is_dir()


def test_a_later_call_fills_again(tmp_path: Path) -> None:
    fill = Filler()
    (tmp_path / "d").mkdir()
    for _ in range(2):
        fill_once(tmp_path / "d", tmp_path, fill)
    assert fill.times == 2
