"""A folder goes with its owner, however that one ends, and with nobody else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfit.host import owned as module
from spotfit.host.owned import owned

_HOLDS = """
import sys, pathlib
from spotfit.host.owned import owned
with owned(pathlib.Path(sys.argv[1]), "other") as folder:
    (folder / "big").write_text("x")
    print("there", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(parent: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns a folder there; it is gone when the block ends."""
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


def test_it_is_the_users_own_and_goes_with_the_block(tmp_path: Path) -> None:
    with owned(tmp_path / "new", "me") as folder:
        (folder / "x").write_text("x")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list((tmp_path / "new").iterdir())


def test_what_a_killed_owner_left_is_freed_by_the_next(tmp_path: Path) -> None:
    with another(tmp_path), owned(tmp_path, "me"):
        assert folder_of(tmp_path).exists(), "its owner lives"
    assert folder_of(tmp_path).exists()
    with owned(tmp_path, "me"):
        assert not folder_of(tmp_path).exists()


def test_what_lies_on_a_disk_that_machines_share_is_left_to_those_of_its_machine(
    tmp_path: Path,
) -> None:
    with another(tmp_path):
        pass
    owner = folder_of(tmp_path) / "owner"
    for elsewhere in (b"another-machine", b"another-machine\n0-1-2 77", b""):
        owner.write_bytes(elsewhere)
        with owned(tmp_path, "me"):
            assert folder_of(tmp_path).exists()
    owner.write_bytes(os.uname().nodename.encode())
    with owned(tmp_path, "me"):
        assert not folder_of(tmp_path).exists(), "it may have been started anew since"


def test_what_an_owner_in_another_container_left_is_freed_once_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has a name of its own, and the kernel of its host."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    with another(tmp_path), owned(tmp_path, "me"):
        assert folder_of(tmp_path).exists(), "its owner lives"
    with owned(tmp_path, "me"):
        assert not folder_of(tmp_path).exists()


def test_by_another_kernel_or_mount_nobody_can_tell_whether_its_owner_lives(tmp_path: Path) -> None:
    """Some file systems keep their locks to themselves there."""
    with another(tmp_path):
        pass
    owner = folder_of(tmp_path) / "owner"
    kernel, mount = owner.read_text().split("\n")[-1].split()
    for left_by in (f"0-1-2 {mount}", f"{kernel} 0{mount}"):
        owner.write_text(f"another\n{left_by}")
        with owned(tmp_path, "me"):
            assert folder_of(tmp_path).exists()
    owner.write_text(f"another\n{kernel} {mount}")
    with owned(tmp_path, "me"):
        assert not folder_of(tmp_path).exists()


def test_where_a_kernel_does_not_say_which_it_is_the_machine_s_name_must_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another(tmp_path):
        pass
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "none")
    with owned(tmp_path, "me") as folder:
        assert (folder / "owner").read_text() == os.uname().nodename
        assert not folder_of(tmp_path).exists()


def test_what_is_no_folder_of_ours_stays(tmp_path: Path) -> None:
    folder_of(tmp_path, "by-hand").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "owner").write_bytes(os.uname().nodename.encode())
    folder_of(tmp_path, "link").symlink_to(tmp_path / "theirs")
    with owned(tmp_path, "me"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(
        [folder_of(tmp_path, "by-hand"), folder_of(tmp_path, "link"), tmp_path / "theirs"]
    )


def test_one_that_nobody_has_locked_yet_is_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(fcntl, "flock", real)
                with owned(tmp_path, "another"):
                    pass
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with owned(tmp_path, "me") as folder:
        assert (folder / "owner").exists()


def test_where_nothing_can_be_locked_a_folder_is_had_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some file systems of clusters."""

    def refused(_lock: int, _how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with owned(tmp_path, "me") as folder, owned(tmp_path, "other"):
        assert folder.is_dir()
