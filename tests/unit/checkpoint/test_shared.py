"""One download for all readers of a node; the last one tidies up; the dead hold nothing."""

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

from spotfit.checkpoint import shared
from spotfit.checkpoint.shared import own_folder, shared_directory, together
from spotfit.core.errors import StorePermissionError


class Filler:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, directory: Path) -> None:
        self.times += 1
        (directory / "x").write_text("filled")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_filled_before_and_gone_after(tmp_path: Path) -> None:
    with shared_directory(tmp_path / "d", Filler()) as directory:
        assert (directory / "x").read_text() == "filled"
    assert left_in(tmp_path) == []


def test_a_nested_reader_does_not_take_it_away(tmp_path: Path) -> None:
    fill = Filler()
    with shared_directory(tmp_path / "d", fill) as outer:
        with shared_directory(tmp_path / "d", fill):
            pass
        assert (outer / "x").exists()
    assert fill.times == 1
    assert left_in(tmp_path) == []


def test_of_many_threads_one_fills(tmp_path: Path) -> None:
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
    assert left_in(tmp_path) == []


def test_a_failed_fill_leaves_nothing_to_be_believed(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError), shared_directory(tmp_path / "d", fail):
        pytest.fail("it was given out")
    assert left_in(tmp_path) == []
    fill = Filler()
    with shared_directory(tmp_path / "d", fill):
        assert fill.times == 1


# --- where downloads lie -------------------------------------------------------------------------


def test_a_folder_of_ones_own_is_made_once_and_for_nobody_else(tmp_path: Path) -> None:
    own = own_folder(tmp_path)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    (own / "x").write_text("kept")
    assert own_folder(tmp_path) == own
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
def test_what_somebody_else_could_change_is_not_trusted(
    tmp_path: Path, taken: Callable[[Path], None]
) -> None:
    own = own_folder(tmp_path)
    taken(own)
    with pytest.raises(StorePermissionError, match="not a folder of this user's own") as refused:
        own_folder(tmp_path)
    assert "TMPDIR" in refused.value.do


# --- readers that die ----------------------------------------------------------------------------


def _hold(place: Path, ready: Any) -> None:
    with shared_directory(place, Filler()):
        ready.set()
        signal.pause()


def test_a_killed_reader_holds_nothing(tmp_path: Path) -> None:
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
    assert left_in(tmp_path) == []


# --- one place that stays --------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released whenever somebody has looked how often a place was filled."""
    looked, look = threading.Semaphore(0), shared._times_filled

    def tell(lock: int) -> int:
        times = look(lock)
        looked.release()
        return times

    monkeypatch.setattr(shared, "_times_filled", tell)
    return looked


def test_who_comes_while_another_fills_waits_and_does_nothing(
    tmp_path: Path, asked: threading.Semaphore
) -> None:
    second = threading.Thread(target=together, args=(tmp_path / "d", tmp_path, fail))

    def fill(target: Path) -> None:
        for _ in range(2):
            asked.acquire()  # the first one's own looks
        second.start()
        asked.acquire()  # the second one has come, and waits from now on
        target.mkdir()

    together(tmp_path / "d", tmp_path, fill)
    second.join(60)
    assert not second.is_alive()
    assert (tmp_path / "d").is_dir()


def fail(_: Path) -> None:
    raise ConnectionError("gone")


def test_where_the_first_fails_the_second_does_it(
    tmp_path: Path, asked: threading.Semaphore
) -> None:
    second = threading.Thread(target=together, args=(tmp_path / "d", tmp_path, Path.mkdir))

    def fill(_place: Path) -> None:
        for _ in range(2):
            asked.acquire()
        second.start()
        asked.acquire()
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        together(tmp_path / "d", tmp_path, fill)
    second.join(60)
    assert (tmp_path / "d").is_dir()


def test_who_comes_later_fills_again(tmp_path: Path) -> None:
    fill = Filler()
    (tmp_path / "d").mkdir()
    for _ in range(2):
        together(tmp_path / "d", tmp_path, fill)
    assert fill.times == 2
