"""Directories that are owned by one process and removed when that process has ended.

The owner holds a lock on a file in the directory. The kernel releases it when the owner dies in any
way; the next process that creates a directory beside it removes directories without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from spotfit.host import log, machine, memory


def remove_orphaned_shared_memory() -> None:
    """Remove the directories of `shared_memory_directory` whose owners have ended.

    Called by processes that observe or cause the end of an agent on this machine: an agent that was
    killed cannot free its snapshots, and there may be no next one.
    """
    _remove_orphans(_shared_memory_parent())


def shared_memory_directory(name: str) -> AbstractContextManager[Path]:
    """Create a directory in shared memory (/dev/shm) that is removed when the context exits.

    Without a writable /dev/shm it is in the temporary directory. The agent stores snapshots in it.
    `name` must be unique on the machine; see `owned_directory`.
    """
    return owned_directory(_shared_memory_parent(), name)


def _shared_memory_parent() -> Path:
    shared = memory.SHARED_MEMORY_DIR
    # Some containers mount no /dev/shm, or a read-only one.
    is_usable = shared.is_dir() and os.access(shared, os.W_OK)
    return shared if is_usable else Path(tempfile.gettempdir())


# The file that the owner keeps locked. It contains the lock domains of the owner.
_LOCK_FILE = "owner"


@contextmanager
def owned_directory(parent: Path, name: str) -> Iterator[Path]:
    """Create the directory spotfit-<uid>-<name> in `parent` with mode 0700; remove it on exit.

    `parent` is created if necessary. If this process is killed, the next call with an equal
    `parent` removes its directory: before it creates its own, a call removes those of dead owners
    on this machine, including those of other containers. Raises `FileExistsError` if `name` is in
    use.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(parent)
    folder = parent / f"{_prefix()}{name}"
    folder.mkdir(mode=0o700)
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    owner = os.getpid()
    try:
        with suppress(OSError):  # a file system without locks: the directory is never an orphan
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Written after locking: without lock domains, no other process considers the
            # directory an orphan, so there is no moment in which a new directory could be removed.
            os.pwrite(lock, b"\n".join(_lock_domains(lock)), 0)
        yield folder
    finally:
        if os.getpid() == owner:  # also the exit of a fork ends the context
            _remove_tree(folder)
        # The lock last: once it is free, others may remove the directory and create it again, and
        # rmtree would delete the new one.
        os.close(lock)


def _remove_tree(folder: Path) -> None:
    with suppress(OSError):  # it was removed by others, or the name is in use
        # Threads of this process may still create files in it, such as the segment of a replica.
        # Under the new name they cannot, so that nothing is left behind.
        folder = folder.rename(folder.with_name(f"{folder.name}.removed"))
    shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"spotfit-{os.getuid()}-"


def _remove_orphans(parent: Path) -> None:
    for existing in parent.glob(f"{_prefix()}*"):
        _remove_if_orphaned(existing)


def _remove_if_orphaned(folder: Path) -> None:
    """Remove `folder` if its lock is free and this process can see the owner's locks.

    A process id would not identify the owner: containers number their processes separately.
    """
    with suppress(OSError):  # it was removed meanwhile, or is locked by its owner
        # The parent is usually world-writable: never follow a link of another user.
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A free lock is no proof: on a network file system it may be local to a machine.
            if set(os.pread(lock, 1024, 0).split(b"\n")).intersection(_lock_domains(lock)):
                shutil.rmtree(folder, ignore_errors=True)
                log.debug("owned_dir.removed", folder=str(folder))
        finally:
            os.close(lock)


def _lock_domains(lock: int) -> list[bytes]:
    """Return the scopes in which this lock is visible: host name, and boot id with device.

    Two processes that share one of them see each other's locks. On a network file system the
    processes of another machine share neither and leave the directory alone. Containers have
    different host names but share the boot id.
    """
    domains = [os.uname().nodename.encode()]
    if boot_id := machine.boot_id():
        domains.append(f"{boot_id} {os.fstat(lock).st_dev}".encode())
    return domains
