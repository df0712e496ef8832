"""Files of rows that several processes share: verified, within a limit, and of this user only."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotfit.data.caching import cache_files
from spotfit.data.caching.cache_files import CacheFiles

LIMIT_BYTES = 2**20
TABLE = pa.table(
    {
        "number": [1, 2, None],
        "text": ["a", None, "ü"],
        "list": [[1.0], [], [2.0, 3.0]],
        "category": pa.array(["x", "y", "x"]).dictionary_encode(),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2)),
    }
)


def numbers(first: int, rows: int = 1000) -> pa.Table:
    """8 KB of rows that differ by their first number."""
    return pa.table({"id": np.arange(first, first + rows)})


def open_files(root: Path, group: str = "g", limit_bytes: int = LIMIT_BYTES) -> CacheFiles:
    return CacheFiles(root / "cache", group, limit_bytes)


def stored_bytes(root: Path) -> int:
    files = [path for path in (root / "cache").glob("*/*") if path.name != "lock"]
    return sum(path.stat().st_size for path in files)


def counted_bytes(root: Path) -> int:
    return int.from_bytes((root / "cache" / "lock").read_bytes(), "little")


def start_fork(function: Callable[[], None]) -> int:
    """Run a function in a fork of this process; return its process id."""
    process_id = os.fork()
    if not process_id:
        try:
            function()
        except BaseException:  # noqa: BLE001 - it must not return to pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return process_id


def wait_for(process_id: int) -> int:
    """Return the exit code of a fork: 0 unless the function has raised; -N after signal N."""
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    open_files(tmp_path).write("0", TABLE)
    read = open_files(tmp_path).read("0")
    assert read is not None
    assert read.equals(TABLE)
    assert read.schema.equals(TABLE.schema, check_metadata=True)


def test_a_slice_is_written_without_the_other_rows(tmp_path: Path) -> None:
    open_files(tmp_path).write("0", numbers(0, 100_000).slice(50, 10))
    assert stored_bytes(tmp_path) < 2000
    assert open_files(tmp_path).read("0") == numbers(50, 10)


def test_rows_that_were_not_written_are_none(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write("0", TABLE)
    assert files.contains("0")
    assert not files.contains("1")
    assert files.read("1") is None
    assert open_files(tmp_path, "other").read("0") is None


def test_the_directory_is_for_this_user_only(tmp_path: Path) -> None:
    open_files(tmp_path).write("0", TABLE)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "g" / "0").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(PermissionError, match="only this user"):
        open_files(tmp_path)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="only this user"):
        open_files(tmp_path)


# ── damaged files ─────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_removed_and_written_again(tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    files = open_files(tmp_path)
    files.write("0", TABLE)
    path = tmp_path / "cache" / "g" / "0"
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "truncate", "extend", "zero", "random"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "truncate":
        del content[place:]
    elif kind == "extend":
        content += data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "zero":
        content[:] = bytes(len(content))
    else:
        content[:] = data.draw(st.binary(max_size=200))
    path.write_bytes(content)
    assert files.read("0") is None
    assert not files.contains("0")
    files.write("0", TABLE)
    assert files.read("0") == TABLE


def test_a_file_of_other_rows_is_not_read(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write("0", numbers(0))
    files.write("1", numbers(7))
    shutil.copy(tmp_path / "cache" / "g" / "0", tmp_path / "cache" / "g" / "1")
    assert files.read("1") is None
    other = open_files(tmp_path, "other")
    shutil.copy(tmp_path / "cache" / "g" / "0", tmp_path / "cache" / "other" / "0")
    assert other.read("0") is None


def test_a_file_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(tmp_path)
    files.write("0", TABLE)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert files.read("0") is None


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to(path.with_name("1"))


@pytest.mark.parametrize("make", [make_pipe, make_link, Path.mkdir, Path.touch])
def test_what_is_no_file_of_rows_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    files = open_files(tmp_path)
    files.write("1", TABLE)
    make(tmp_path / "cache" / "g" / "0")
    assert files.read("0") is None
    files.write("0", TABLE)  # in vain for a directory, which is not removed
    assert files.read("1") == TABLE


def test_files_deleted_by_another_program_are_written_again(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write("0", TABLE)
    (tmp_path / "cache" / "g" / "0").unlink()
    assert files.read("0") is None
    files.write("0", TABLE)
    assert files.read("0") == TABLE


def test_a_deleted_directory_ends_the_writing_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_files(tmp_path)
    files.write("0", TABLE)
    shutil.rmtree(tmp_path / "cache")
    assert files.read("0") is None
    files.write("0", TABLE)
    files.write("1", TABLE)
    assert [message for message in caplog.messages if message == "data.cache_not_written"] == [
        "data.cache_not_written"
    ]


# ── the limit ─────────────────────────────────────────────────────────────────────────────────────


def test_files_of_a_group_stay_when_the_limit_is_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "spotfit")
    files = open_files(tmp_path, limit_bytes=30_000)
    for number in range(10):
        files.write(str(number), numbers(number))
    assert [number for number in range(10) if files.contains(str(number))] == [0, 1, 2]
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path) <= 30_000
    assert caplog.messages == ["data.cache_full"]


def test_the_oldest_unused_group_is_removed_for_another_one(tmp_path: Path) -> None:
    for number, group in enumerate(["b", "c", "a"]):
        files = open_files(tmp_path, group, 30_000)
        files.write("0", numbers(0))
        del files
        os.utime(tmp_path / "cache" / group / "lock", (number, number))
    in_use = open_files(tmp_path, "a", 30_000)
    files = open_files(tmp_path, "d", 30_000)
    files.write("0", numbers(0))
    assert not (tmp_path / "cache" / "b").exists()
    assert (tmp_path / "cache" / "c" / "0").exists()
    for number in range(1, 10):
        files.write(str(number), numbers(number))
    assert not (tmp_path / "cache" / "c").exists()
    assert in_use.read("0") == numbers(0)
    assert files.contains("1")
    assert not files.contains("2")
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path) <= 30_000


def test_what_another_program_leaves_in_an_unused_group_does_not_end_the_writing(
    tmp_path: Path,
) -> None:
    files = open_files(tmp_path, "old", 30_000)
    files.write("0", numbers(0))
    del files
    (tmp_path / "cache" / "old" / "folder").mkdir()
    files = open_files(tmp_path, "new", 30_000)
    for number in range(4):
        files.write(str(number), numbers(number))
    assert [number for number in range(4) if files.contains(str(number))] == [0, 1, 2]
    assert not (tmp_path / "cache" / "old" / "0").exists()


def test_a_read_counts_as_use(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write("0", TABLE)
    lock = tmp_path / "cache" / "g" / "lock"
    os.utime(lock, (1, 1))
    files.read("0")
    assert lock.stat().st_mtime > 1


def test_a_lower_limit_removes_files_when_the_directory_is_opened(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    for number in range(10):
        files.write(str(number), numbers(number))
    del files
    files = open_files(tmp_path, limit_bytes=30_000)
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path) <= 30_000
    assert sum(files.contains(str(number)) for number in range(10)) == 3


def test_rows_beyond_the_limit_are_not_written(tmp_path: Path) -> None:
    files = open_files(tmp_path, limit_bytes=5000)
    files.write("0", numbers(0))
    assert stored_bytes(tmp_path) == 0


def test_space_is_left_for_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "spotfit")
    files = open_files(tmp_path)
    monkeypatch.setattr(cache_files, "_free_bytes", lambda _folder: 8000)
    files.write("0", numbers(0))
    assert stored_bytes(tmp_path) == 0
    assert caplog.messages == ["data.cache_full"]
    monkeypatch.undo()
    for _ in range(cache_files._REFUSED_WRITES + 1):  # it looks for space from time to time
        files.write("0", numbers(0))
    assert files.contains("0")


def test_the_limit_holds_while_several_processes_write(tmp_path: Path) -> None:
    limit_bytes = 400_000

    def write(group: str) -> None:
        files = open_files(tmp_path, group, limit_bytes)
        for number in range(60):
            files.write(str(number), numbers(number))
            assert stored_bytes_of_running(tmp_path) <= limit_bytes
            assert files.read(str(number)) in (None, numbers(number))

    processes = [start_fork(partial(write, f"g{number % 2}")) for number in range(4)]
    assert [wait_for(one) for one in processes] == [0] * 4
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path) <= limit_bytes
    assert stored_bytes(tmp_path) > limit_bytes * 3 / 4


def stored_bytes_of_running(root: Path) -> int:
    """As `stored_bytes`, while files are renamed and removed."""
    total = 0
    for path in (root / "cache").glob("*/*"):
        try:
            total += path.stat().st_size if path.name.isdecimal() else 0
        except FileNotFoundError:
            continue
    return total


# ── processes that end, and errors of the disk ────────────────────────────────────────────────────


def test_what_a_killed_writer_leaves_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_die() -> None:
        files = open_files(tmp_path, limit_bytes=30_000)
        files.write("0", numbers(0))
        monkeypatch.setattr(files, "_rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        files.write("1", numbers(1))

    assert wait_for(start_fork(write_and_die)) == -signal.SIGKILL
    assert [path.suffix for path in (tmp_path / "cache" / "g").glob("1*")] == [".new"]
    files = open_files(tmp_path, limit_bytes=30_000)
    assert files.read("0") == numbers(0)
    assert files.read("1") is None
    for number in range(4):
        files.write(str(number), numbers(number))
    assert not list((tmp_path / "cache" / "g").glob("*.new"))
    assert [number for number in range(4) if files.contains(str(number))] == [0, 1, 2]
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path)


def test_files_are_counted_again_after_a_process_was_killed_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_with_lock() -> None:
        files = open_files(tmp_path, limit_bytes=30_000)
        files.write("0", numbers(0))
        files.write("1", numbers(0))
        monkeypatch.setattr(
            cache_files, "_free_bytes", lambda _: os.kill(os.getpid(), signal.SIGKILL)
        )
        files.write("2", numbers(1))

    assert wait_for(start_fork(die_with_lock)) == -signal.SIGKILL
    assert (tmp_path / "cache" / "lock").read_bytes() == b""
    files = open_files(tmp_path, limit_bytes=30_000)
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path)
    files.write("2", numbers(2))
    files.write("3", numbers(3))
    assert [number for number in range(4) if files.contains(str(number))] == [0, 1, 2]


@pytest.mark.parametrize("method", ["_create", "_header"])
def test_a_full_disk_ends_the_writing_only(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the file is created, and before it is written."""

    def write_on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        files = open_files(tmp_path)
        files.write("0", numbers(0))
        proceed = getattr(files, method)

        def fill_disk(*arguments: Any) -> Any:
            # A write beyond the limit of the process fails like one on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            return proceed(*arguments)

        monkeypatch.setattr(files, method, fill_disk)
        files.write("1", numbers(1, 5000))
        assert files.read("1") is None
        monkeypatch.undo()
        files.write("2", numbers(2))
        assert not files.contains("2")
        assert files.read("0") == numbers(0)

    assert wait_for(start_fork(write_on_a_full_disk)) == 0
    assert not list((tmp_path / "cache" / "g").glob("1*"))
    open_files(tmp_path)
    assert stored_bytes(tmp_path) == counted_bytes(tmp_path) > 0


def test_a_group_is_not_removed_while_another_process_uses_it(tmp_path: Path) -> None:
    ready, done = os.pipe(), os.pipe()

    def use() -> None:
        files = open_files(tmp_path, "old", 30_000)
        files.write("0", numbers(0))
        os.write(ready[1], b"1")
        os.read(done[0], 1)
        assert files.read("0") == numbers(0)

    process_id = start_fork(use)
    os.read(ready[0], 1)
    files = open_files(tmp_path, "new", 30_000)
    for number in range(5):
        files.write(str(number), numbers(number))
    os.write(done[1], b"1")
    assert wait_for(process_id) == 0
    for _ in range(cache_files._REFUSED_WRITES + 1):
        files.write("4", numbers(4))
    assert files.contains("4")
    assert not (tmp_path / "cache" / "old").exists()


def test_a_fork_does_not_keep_the_lock_of_the_directory(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    done = os.pipe()

    def wait() -> None:
        os.read(done[0], 1)

    with files._locked():
        process_id = start_fork(wait)
    descriptor = os.open(tmp_path / "cache" / "lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
        os.write(done[1], b"1")
        assert wait_for(process_id) == 0
