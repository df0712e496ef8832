"""Processes of this machine: parent-death signals, killing, kernel state, exit status."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

STACK_DUMP_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 3) - 3
"""Requests the stacks of all threads from a worker.

A real-time signal near the end of the range: applications use SIGUSR1 and SIGUSR2, and the C
library reserves the first real-time signals.
"""
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""The `OSError.errno` if this process or the machine has no free file descriptor."""
KILLED_BY_SIGKILL = "was killed by SIGKILL"
"""What `describe_exit` returns for a process that another one or the kernel has killed."""
_PROCESS_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "in an uninterruptible system call",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
_ZOMBIE_STATES = ("Z", "X")
_PF_EXITING = 0x4  # include/linux/sched.h
# Exit handlers and calls that return take less: the request of a bucket times out after 10 s.
_EXIT_TIMEOUT_S = 15.0
# Constants of prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Let the kernel send `sig` to this process when the parent thread that started it ends.

    Called by a child at its start; `parent` is the process id that it expects as its parent's.
    Exits at once, with code 128 + `sig`, if that process has already ended. Later ends are noticed
    on Linux only; elsewhere this process ends when it reads from the closed socket of its parent.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, sig)
    # The parent may have died before prctl() took effect; then no signal will come.
    if os.getppid() != parent:
        os._exit(128 + sig)  # the exit code that shells report for this signal


def limit_exit(code: int, *, timeout_s: float = _EXIT_TIMEOUT_S) -> int:
    """Return `code`, and end this process with it if it has not ended after `timeout_s` seconds.

    Called directly before `sys.exit`: the interpreter waits without a limit for threads that hang
    in a call of a file system or a client library, and a machine whose process does not end is
    paid.
    """

    def end() -> None:
        time.sleep(timeout_s)
        os._exit(code)

    # It runs until the other threads were joined and the exit handlers have returned.
    threading.Thread(target=end, name="spotfit-exit", daemon=True).start()
    return code


def set_process_name(name: str) -> None:
    """Set the name of this process that `ps` and `top` show, cut to 15 bytes. Linux only."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, name.encode()[:15])


_descriptor_limits: list[tuple[int, int]] = []
"""The limits of this process before `raise_descriptor_limit`, if it has changed them."""


def raise_descriptor_limit() -> None:
    """Allow this process as many file descriptors as its hard limit permits.

    For an agent, whose connections grow with the run. Its children must not inherit the limit: call
    `restore_descriptor_limit` for each. Linux only; a limit that cannot be raised is kept.
    """
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if sys.platform != "linux" or soft == hard:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _descriptor_limits.append(limits)


def descriptor_limit() -> int:
    """Return how many file descriptors this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def restore_descriptor_limit(pid: int) -> None:
    """Give the child `pid` the descriptor limit that this process had before it was raised.

    User code and its libraries may call select(), which fails for descriptors above 1023, or close
    all numbers up to the limit. No effect if the limit was not raised or the child has ended.
    """
    if _descriptor_limits:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _descriptor_limits[0])


def kill_group(leader: int, sig: int = signal.SIGKILL) -> None:
    """Send `sig`, by default SIGKILL, to every process of the group whose id is `leader`.

    Does not wait for their end. Does nothing if the group has ended or may not be signalled.
    """
    # macOS reports a group that consists only of zombies as PermissionError.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sig)


def kill(pid: int, sig: int = signal.SIGKILL) -> None:
    """Send `sig`, by default SIGKILL, to one process, without its children.

    Does not wait for its end. Does nothing if the process has ended.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def session_members(session: int) -> list[int]:
    """Return the process ids of all members of the session with id `session`, except zombies.

    Linux only: reads /proc. For tests.
    """
    members = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            fields = _read_stat(pid)
            if int(fields[3]) == session and fields[0] not in _ZOMBIE_STATES:
                members.append(pid)
    return members


def thread_count() -> int:
    """Return the number of threads of this process, including those of native libraries.

    Returns 1 on systems other than Linux.
    """
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def exists(pid: int) -> bool:
    """Whether a process with id `pid` exists; zombies exist.

    Always True on systems other than Linux.
    """
    return sys.platform != "linux" or Path(f"/proc/{pid}").exists()


def zombie_wait_status(pid: int) -> int | None:
    """Return the wait status of a zombie process, as `os.waitpid` would, without reaping it.

    None if it still runs, or does not exist any more, if that cannot be read because this process
    has no descriptors left, and on systems other than Linux.
    """
    try:
        fields = _read_stat(pid)
    except OSError:
        return None
    return int(fields[49]) if fields[0] in _ZOMBIE_STATES else None  # field 52, exit_code


def is_ending(pid: int) -> bool:
    """Whether the process is a zombie, or runs no code any more and will be one.

    The kernel closes its sockets before it is a zombie, so that its peers may notice its end
    earlier. False if that cannot be read, and on systems other than Linux.
    """
    try:
        fields = _read_stat(pid)
    except OSError:
        return False
    return fields[0] in _ZOMBIE_STATES or bool(int(fields[6]) & _PF_EXITING)  # field 9, flags


def describe_state(pid: int) -> str:
    """Return the kernel's state of a process as text, such as 'waiting, in futex_wait_queue'.

    For the report of a hang. Returns '' if the process does not exist, and on systems other than
    Linux.
    """
    try:
        fields = _read_stat(pid)
        kernel_function = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    state = _PROCESS_STATES.get(fields[0], fields[0])
    return state if kernel_function in ("", "0") else f"{state}, in {kernel_function}"


def describe_exit(waitstatus: int) -> tuple[str, bool]:
    """Return a phrase for a wait status of `os.waitpid`, and whether it is exit code 0.

    For example `("exited with code 1", False)` or `("was killed by SIGKILL", False)`.
    """
    code = os.waitstatus_to_exitcode(waitstatus)
    if code >= 0:
        return f"exited with code {code}", code == 0
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no name
        name = f"signal {-code}"
    return f"was killed by {name}", False


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third one, the state (see proc(5))."""
    # The second field, the name in parentheses, may itself contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
