"""A temporary directory filled once a node, used by any number of readers, removed by the last.

Readers are processes or nested blocks of one; each holds a shared lock, which the system takes
back from whoever is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotfit.core.errors import StorePermissionError


@contextmanager
def shared_directory(place: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """`place`, filled by exactly one of its readers; gone when the last of them is done.

    `fill` writes into the directory it is given, which may hold what a killed one has left. When
    it raises, nothing appears at `place`, and the next reader tries anew.
    """
    lock = _enter(place, fill)
    try:
        yield place
    finally:
        _leave(place, lock)


def together(target: Path, locks: Path, fill: Callable[[Path], None]) -> None:
    """Fill `target`; who comes while another process does so waits for it, and does nothing.

    `locks` is a folder of this user's own. Where the other one fails, the next one tries itself.
    """
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    lock = os.open(locks / f"{name}.filling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        before = _times_filled(lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        filled = _times_filled(lock)
        if filled == before:
            fill(target)
            os.pwrite(lock, f"{filled + 1}".encode(), 0)
    finally:
        os.close(lock)


def _times_filled(lock: int) -> int:
    return int(os.pread(lock, 32, 0) or b"0")


def own_folder(parent: Path) -> Path:
    """A folder below `parent` that only this user can use: what lies there is trusted.

    Raises `StorePermissionError` where somebody else has taken its name.
    """
    folder = parent / f"spotfit-checkpoints-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StorePermissionError(
            f"{folder} is not a folder of this user's own: checkpoints put there could be changed.",
            do="Remove it, or set TMPDIR to a directory of your own.",
        )
    return folder


def _enter(place: Path, fill: Callable[[Path], None]) -> int:
    while True:
        lock = _locked(_readers(place), fcntl.LOCK_SH)
        if place.is_dir():
            return lock
        os.close(lock)
        _fill_alone(place, fill)


def _fill_alone(place: Path, fill: Callable[[Path], None]) -> None:
    """Under a lock of its own: whoever waits for the filling must not wait for a reader's end."""
    part = place.with_name(f"{place.name}.part")
    filling = place.with_name(f"{place.name}.fill")
    lock = _locked(filling, fcntl.LOCK_EX)
    try:
        if not place.is_dir():
            part.mkdir(parents=True, exist_ok=True)
            fill(part)
            part.rename(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        _readers(place).unlink(missing_ok=True)
        raise
    finally:
        filling.unlink(missing_ok=True)
        os.close(lock)


def _leave(place: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place, ignore_errors=True)
        _readers(place).unlink(missing_ok=True)
    except BlockingIOError:
        return  # somebody still reads; the last one tidies up
    finally:
        os.close(lock)


def _locked(file: Path, kind: int) -> int:
    """A lock on the file that stands there now: who is done with it removes it, too."""
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, kind)
        if _is_still(file, lock):
            return lock
        os.close(lock)


def _is_still(file: Path, lock: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _readers(place: Path) -> Path:
    return place.with_name(f"{place.name}.lock")
