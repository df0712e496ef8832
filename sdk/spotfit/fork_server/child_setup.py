"""Initializes a user process right after its start: process group, streams, RNG state."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import tempfile
import weakref
from pathlib import Path

from spotfit.host import process as this_process
from spotfit.host import system

CHILD_MODULES = {
    "worker": "spotfit.worker.main",
    "callbacks": "spotfit.sidecar.callbacks_process",
    "hooks": "spotfit.sidecar.backend_hooks_process",
    "uploader": "spotfit.sidecar.uploader_process",
    "validation": "spotfit.sidecar.validator_process",
    "feeder": "spotfit.sidecar.feeder_node_process",
}
"""Maps each `ChildKind` to a module whose `main(socket_fd)` runs the child and never returns."""
_FD_DIR = Path("/proc/self/fd")
_MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path has 108 bytes with the terminating zero
_SOCKET_SUFFIX_BYTES = len("/pymp-12345678/listener-12345678")  # as multiprocessing names them


def isolate_process(parent_pid: int) -> None:
    """Make this process lead a new process group, and end when the process `parent_pid` ends.

    Called by a user process at its start. Also restores the default handlers of SIGTERM, SIGINT and
    SIGCHLD, sets the process name, and reseeds random generators.
    """
    # Its own group, so that the agent can kill it with everything that it has started.
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    this_process.die_with_parent(parent_pid)
    this_process.set_process_name("spotfit-worker")
    reseed()


def drop_inherited_finalizers() -> None:
    """Disable the exit finalizers of objects that the fork server has created before this fork.

    Called by a forked child, and only for those of `weakref.finalize`. Finalizers that the child
    registers later do run at its exit.
    """
    # Torch registers hundreds, which would take longer at exit than a restart of the worker. There
    # is no public way to list them.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        finalizer.atexit = False


def redirect_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Replace standard output and standard error of this process by these descriptors.

    The passed numbers are closed. Both streams are line-buffered afterwards.
    """
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    os.close(stdout_fd)
    os.close(stderr_fd)
    enable_line_buffering()


def enable_line_buffering() -> None:
    """Make stdout and stderr of this process flush after each line, from now on.

    A process that is killed then loses no complete line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def reseed() -> None:
    """Reseed the global random generators of Python and NumPy from the operating system.

    Forked workers must not share RNG state. NumPy's only if it is imported.
    """
    system.reseed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()


def shorten_socket_paths() -> None:
    """Set a short alias of the temporary directory for multiprocessing, if its path is too long.

    Socket paths are limited to 107 bytes. Otherwise a DataLoader whose workers cannot bind their
    sockets waits for them indefinitely. Called by workers and validators. Does nothing on systems
    without /proc.
    """
    directory = os.fsencode(tempfile.gettempdir())
    if len(directory) + _SOCKET_SUFFIX_BYTES <= _MAX_SOCKET_PATH_BYTES or not _FD_DIR.is_dir():
        return
    from multiprocessing import process  # rarely needed, therefore not imported before

    # A symlink would have to be deleted; a descriptor below /proc vanishes with the process.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    config: dict[str, str] = process.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001 - no public setter
    config["tempdir"] = f"/proc/{os.getpid()}/fd/{fd}"


def run_child(kind: str, socket_fd: int) -> None:
    """Run the program of that kind, such as `"worker"`, in this process until its end.

    `socket_fd` is its end of the socket to the agent. Imports the module of `CHILD_MODULES` unless
    the fork server already has. The program ends the process; `run_child` returns only if that
    fails.
    """
    importlib.import_module(CHILD_MODULES[kind]).main(socket_fd)
