"""Processes of this machine, told apart for ever: a pid alone may be given out again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Where these stand in /proc/<pid>/stat, counted after the name in brackets."""


class Process(NamedTuple):
    """A pid and when its process was started: no other process will ever have both."""

    pid: int
    started: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The reverse of `str`; None for anything else."""
        pid, dash, started = text.partition("-")
        return cls(int(pid), started) if dash and pid.isdecimal() and started else None

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return find(self.pid) == self


def here() -> Process:
    """This very process."""
    found = find(os.getpid())
    assert found is not None, "a process that asks is alive"
    return found


def find(pid: int) -> Process | None:
    """The process that has this pid now; None if nobody has, or only a zombie."""
    row = _table_row(pid)
    return None if row is None or row.is_zombie else Process(pid, row.started)


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on, as far as they still have their parents."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        row = _table_row(one)
        if row is not None:
            children.setdefault(row.parent, []).append(one)
    found, unasked = [], [pid]
    while unasked:
        born = children.get(unasked.pop(), [])
        found += born
        unasked += born
    return found


def kill(process: Process) -> None:
    """SIGKILL to it, its group and all it has started, at once. One already gone is no error."""
    if not process.alive:
        return
    family = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    for pid in (process.pid, *family):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_detached(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    output: Path,
    stdin: int = subprocess.DEVNULL,
) -> Process | None:
    """Start a process that is nobody's child: it outlives its starter and never becomes its zombie.

    `stdin` is a descriptor; all it says goes to `output`. None if it was gone before we could look.
    """
    # The shell starts it in the background and ends: whoever adopts orphans then reaps it. What
    # runs in the background hears nothing of the shell's own input, but of a copy it does.
    words = 'exec 3<&0; "$@" <&3 3<&- >>"$0" 2>&1 & echo $!'
    shell = ["/bin/sh", "-c", words, str(output), *command]
    told = subprocess.run(  # noqa: S603  # our own command, passed word by word
        shell,
        stdin=stdin,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
        capture_output=True,
        check=True,
    )
    return find(int(told.stdout))


class _Row(NamedTuple):
    parent: int
    started: str
    is_zombie: bool


def _table_row(pid: int) -> _Row | None:
    return _row_of_proc(pid) if _HAS_PROC else _row_of_ps(pid)


def _row_of_proc(pid: int) -> _Row | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Row(int(fields[_PARENT]), fields[_STARTED], fields[_STATE] in "ZX")


def _row_of_ps(pid: int) -> _Row | None:
    ps = ["/bin/ps", "-o", "ppid=,stat=,lstart=", "-p", str(pid)]
    told = subprocess.run(ps, capture_output=True, text=True, check=False)  # noqa: S603  # as above
    parent, _, rest = told.stdout.strip().partition(" ")
    if not parent:
        return None
    state, _, started = rest.strip().partition(" ")
    return _Row(int(parent), "".join(filter(str.isalnum, started)), state.startswith("Z"))


def _pids() -> list[int]:
    if _HAS_PROC:
        return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    told = subprocess.run(["/bin/ps", "-axo", "pid="], capture_output=True, text=True, check=True)
    return [int(pid) for pid in told.stdout.split()]
