"""Processes: how they die together, how they ended, and who is left of a group or a session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

STACKS_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 3) - 3
"""Asks a worker for the stacks of its threads: one that nothing else is likely to use."""
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "in a call of the kernel that cannot be interrupted",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Let the kernel send `sig` to this process when its parent (the thread) ends.

    `parent` is who is believed to be it: one that is gone already ends us now. Linux only;
    elsewhere nothing happens, and the broken pipe must do.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os._exit(128 + sig)


def call_myself(name: str) -> None:
    """The name that `ps` and `top` show; Linux only, 15 letters."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, name.encode()[:15])


def kill_group(leader: int, sig: int = signal.SIGKILL) -> None:
    """Send `sig` to every process of the group; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sig)


def kill(pid: int, sig: int = signal.SIGKILL) -> None:
    """Send `sig` to one process; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def kill_session(session: int) -> None:
    """Kill every process of a session, whatever groups they have formed. Linux only."""
    # Twice: who was being forked while we looked is there the second time.
    for _ in range(2):
        for pid in session_members(session):
            kill(pid)


def session_members(session: int) -> list[int]:
    """Living processes of a session (zombies do not live). Linux only."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _alive_in(entry, session):
            members.append(int(entry.name))
    return members


def thread_count() -> int:
    """How many threads this process has, those of libraries included; Linux only, else 1."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def has_thread(number: int) -> bool:
    """Whether this process still has that thread, as the kernel counts them; Linux only."""
    return Path(f"/proc/self/task/{number}").exists()


def exists(pid: int) -> bool:
    """Whether that process is there, alive or not; Linux only, else True."""
    return sys.platform != "linux" or Path(f"/proc/{pid}").exists()


def ended(pid: int) -> int | None:
    """The wait status of a process that is somebody's zombie, else None. Linux only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[49]) if fields[0] in ("Z", "X") else None


def state_of(pid: int) -> str:
    """What the kernel says of a process, in words; empty where it is gone. Linux only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    state = _STATES.get(fields[0], fields[0])
    return state if place in ("", "0") else f"{state}, in {place}"


def how_it_ended(waitstatus: int) -> tuple[str, bool]:
    """In words ('exited with code 1', 'was killed by SIGKILL'), and whether that was code 0."""
    code = os.waitstatus_to_exitcode(waitstatus)
    if code >= 0:
        return f"exited with code {code}", code == 0
    return f"was killed by {_signal_name(-code)}", False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _alive_in(entry: Path, session: int) -> bool:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, in_session = fields[0], int(fields[3])
    return in_session == session and state not in ("Z", "X")


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
