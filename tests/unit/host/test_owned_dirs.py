"""Owned directories in shared memory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfit.host import machine, memory
from spotfit.host.owned_dirs import (
    owned_directory,
    remove_orphaned_shared_memory,
    shared_memory_directory,
)


def test_the_directory_is_in_shared_memory_and_removed_on_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY_DIR", tmp_path)
    with shared_memory_directory("me") as folder:
        assert folder == tmp_path / f"spotfit-{os.getuid()}-me"
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_the_temporary_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY_DIR", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with shared_memory_directory("me") as folder:
        assert folder.parent == tmp_path


_HOLDS = """
import sys, pathlib
from spotfit.host.owned_dirs import owned_directory
with owned_directory(pathlib.Path(sys.argv[1]), "other") as folder:
    (folder / "big").write_text("x")
    print("there", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_owner(parent: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns a directory in `parent`; killed on exit."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"there\n"
    yield holder
    holder.send_signal(signal.SIGKILL)
    holder.communicate()


def folder_of(parent: Path, name: str = "other") -> Path:
    return parent / f"spotfit-{os.getuid()}-{name}"


def test_the_directory_is_private_and_removed_on_exit(tmp_path: Path) -> None:
    with owned_directory(tmp_path / "new", "me") as folder:
        (folder / "x").write_text("x")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list((tmp_path / "new").iterdir())


def test_threads_cannot_create_files_in_it_while_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    existed: list[bool] = []

    def rmtree(path: Path, *, ignore_errors: bool) -> None:
        existed.append(folder_of(tmp_path, "me").exists())

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with owned_directory(tmp_path, "me"):
        pass
    assert existed == [False]


def test_the_directory_of_a_killed_owner_is_removed(tmp_path: Path) -> None:
    with other_owner(tmp_path), owned_directory(tmp_path, "me"):
        assert folder_of(tmp_path).exists(), "its owner is running"
    assert folder_of(tmp_path).exists()
    with owned_directory(tmp_path, "me"):
        assert not folder_of(tmp_path).exists()


def test_on_a_shared_disk_directories_of_other_machines_are_kept(
    tmp_path: Path,
) -> None:
    with other_owner(tmp_path):
        pass
    owner = folder_of(tmp_path) / "owner"
    for other_owner_text in (b"another-machine", b"another-machine\n0-1-2 77", b""):
        owner.write_bytes(other_owner_text)
        with owned_directory(tmp_path, "me"):
            assert folder_of(tmp_path).exists()
    owner.write_bytes(os.uname().nodename.encode())
    with owned_directory(tmp_path, "me"):
        assert not folder_of(tmp_path).exists(), "the machine may have rebooted since"


def test_the_directory_of_a_dead_owner_in_another_container_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has its own host name, and the kernel of its host."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    with other_owner(tmp_path), owned_directory(tmp_path, "me"):
        assert folder_of(tmp_path).exists(), "its owner is running"
    with owned_directory(tmp_path, "me"):
        assert not folder_of(tmp_path).exists()


def test_with_another_kernel_or_mount_the_directory_is_kept(tmp_path: Path) -> None:
    """Locks of other kernels and mounts may be invisible."""
    with other_owner(tmp_path):
        pass
    owner = folder_of(tmp_path) / "owner"
    kernel, mount = owner.read_text().split("\n")[-1].split()
    for left_by in (f"0-1-2 {mount}", f"{kernel} 0{mount}"):
        owner.write_text(f"another\n{left_by}")
        with owned_directory(tmp_path, "me"):
            assert folder_of(tmp_path).exists()
    owner.write_text(f"another\n{kernel} {mount}")
    with owned_directory(tmp_path, "me"):
        assert not folder_of(tmp_path).exists()


def test_without_a_boot_id_the_host_name_identifies_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_owner(tmp_path):
        pass
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "none")
    with owned_directory(tmp_path, "me") as folder:
        assert (folder / "owner").read_text() == os.uname().nodename
        assert not folder_of(tmp_path).exists()


def test_other_directories_are_kept(tmp_path: Path) -> None:
    folder_of(tmp_path, "by-hand").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "owner").write_bytes(os.uname().nodename.encode())
    folder_of(tmp_path, "link").symlink_to(tmp_path / "foreign")
    with owned_directory(tmp_path, "me"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(
        [folder_of(tmp_path, "by-hand"), folder_of(tmp_path, "link"), tmp_path / "foreign"]
    )


def test_a_directory_that_is_not_locked_yet_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            with monkeypatch.context() as patch:
                patch.setattr(fcntl, "flock", real)
                with owned_directory(tmp_path, "another"):
                    pass
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with owned_directory(tmp_path, "me") as folder:
        assert (folder / "owner").exists()


def test_without_file_locks_directories_are_created_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some cluster file systems have no locks."""

    def refused(_lock: int, _how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with owned_directory(tmp_path, "me") as folder, owned_directory(tmp_path, "other"):
        assert folder.is_dir()


def test_shared_memory_of_killed_agents_is_removed_without_a_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY_DIR", tmp_path)
    with other_owner(tmp_path):
        remove_orphaned_shared_memory()
        assert folder_of(tmp_path).exists(), "its owner is running"
    remove_orphaned_shared_memory()
    assert not folder_of(tmp_path).exists()
