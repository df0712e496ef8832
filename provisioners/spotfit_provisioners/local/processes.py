"""Identification, start and termination of processes; a pid alone is not unique over time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
# Milliseconds normally; a process that waits for a disk or freed gigabytes takes longer.
_KILL_TIMEOUT_S = 2.0
EXIT_CHECK_INTERVAL_S = 1.0
"""Interval of checks whether a process has ended, where `open_pidfd` yields None."""
# Field numbers in /proc/<pid>/stat (see proc(5)), counted after the name in parentheses.
_STATE, _PARENT, _START_TIME = 0, 1, 19


class ProcessIdentity(NamedTuple):
    """A pid with the start time of its process, which together are unique."""

    pid: int
    start_time: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the result of `str()`; return None for other text."""
        pid, dash, started = text.partition("-")
        return cls(int(pid), started) if dash and pid.isdecimal() and started else None

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_time}"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; False for a zombie."""
        return find_process(self.pid) == self


def current_process() -> ProcessIdentity:
    """Return the identity of this process."""
    found = find_process(os.getpid())
    assert found is not None, "the calling process is alive"
    return found


def find_process(pid: int) -> ProcessIdentity | None:
    """Return the process that currently has the pid; None if there is none, or a zombie."""
    row = _read_row(pid)
    return None if row is None or row.is_zombie else ProcessIdentity(pid, row.start_time)


def descendant_pids(pid: int) -> list[int]:
    """Return the pids of all descendants that were not orphaned."""
    if _HAS_PROC:
        pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    else:
        ps = ["/bin/ps", "-axo", "pid="]
        listing = subprocess.run(ps, capture_output=True, text=True, check=True)  # noqa: S603  # constant
        pids = [int(text) for text in listing.stdout.split()]
    children: dict[int, list[int]] = {}
    for candidate in pids:
        row = _read_row(candidate)
        if row is not None:
            children.setdefault(row.parent, []).append(candidate)
    found, pending = [], [pid]
    while pending:
        direct = children.get(pending.pop(), [])
        found += direct
        pending += direct
    return found


def kill_process_tree(process: ProcessIdentity) -> None:
    """Send SIGKILL to the process, its group and its descendants. No error if it has ended.

    Waits until it has ended, at most 2 s: until then it holds its locks and shared memory.
    """
    if not process.is_alive:
        return
    # Listed before killing: orphans can no longer be found as descendants.
    descendants = descendant_pids(process.pid)
    # Only a group that it leads: otherwise the group contains the process that started it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    for pid in (process.pid, *descendants):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_for_exit(process)


def _wait_for_exit(process: ProcessIdentity) -> None:
    with open_pidfd(process) as exited:
        # Not another process that has this pid now. On macOS nothing depends on the wait.
        if exited is not None and process.is_alive:
            select.select([exited], [], [], _KILL_TIMEOUT_S)


@contextlib.contextmanager
def open_pidfd(process: ProcessIdentity | None) -> Iterator[int | None]:
    """Yield a descriptor that becomes readable when the process exits; None if unsupported."""
    descriptor: int | None = None
    if process is not None and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def start_detached(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    output: Path,
    stdin: int = subprocess.DEVNULL,
) -> ProcessIdentity | None:
    """Start a process that is not a child of this one, so it survives it and leaves no zombie.

    `stdin` is a descriptor; stdout and stderr are appended to `output`. Returns None if the process
    has already ended.
    """
    # The shell starts the command in the background and exits; init adopts and reaps the command.
    # A background command gets /dev/null as stdin, hence the copy as descriptor 3.
    script = 'exec 3<&0; "$@" <&3 3<&- >>"$0" 2>&1 & echo $!'
    shell = ["/bin/sh", "-c", script, str(output), *command]
    done = subprocess.run(  # noqa: S603  # our own command, passed as separate arguments
        shell,
        stdin=stdin,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
        capture_output=True,
        check=True,
    )
    return find_process(int(done.stdout))


class _ProcessRow(NamedTuple):
    parent: int
    start_time: str
    is_zombie: bool


def _read_row(pid: int) -> _ProcessRow | None:
    if _HAS_PROC:
        try:
            text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name may contain spaces and parentheses itself.
        fields = text[text.rindex(")") + 2 :].split()
        return _ProcessRow(int(fields[_PARENT]), fields[_START_TIME], fields[_STATE] in "ZX")
    # macOS has no /proc. The start time has a resolution of one second there.
    ps = ["/bin/ps", "-o", "ppid=,stat=,lstart=", "-p", str(pid)]
    done = subprocess.run(ps, capture_output=True, text=True, check=False)  # noqa: S603  # as above
    parent, _, rest = done.stdout.strip().partition(" ")
    if not parent:
        return None
    state, _, started = rest.strip().partition(" ")
    return _ProcessRow(int(parent), "".join(filter(str.isalnum, started)), state.startswith("Z"))
