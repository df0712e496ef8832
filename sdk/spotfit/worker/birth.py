"""The first moments of a user process: on its own, its streams in place, its dice its own."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import tempfile
import weakref
from pathlib import Path

from spotfit.host import dice
from spotfit.host import process as this_process

ENTRANCES = {
    "worker": "spotfit.worker.main",
    "audience": "spotfit.worker.audience",
    "hooks": "spotfit.worker.hooks",
    "carrier": "spotfit.worker.carrier",
    "validation": "spotfit.worker.validation",
}
"""By `model.cradle.Kind`: modules with a `main` that takes the socket and never returns."""
_DESCRIPTORS = Path("/proc/self/fd")
_SOCKET_PATH_BYTES = 107
_BELOW = len("/pymp-12345678/listener-12345678")


def separate(parent: int) -> None:
    """A process group of our own, which dies with `parent`; default answers to all signals."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    this_process.die_with_parent(parent)
    this_process.call_myself("spotfit-worker")
    reseed()


def leave_inheritance() -> None:
    """What the zygote's imports wanted to tidy up at exit is the zygote's; ours goes with us."""
    # Only the registry knows them all; torch has hundreds, and they take longer than a restart.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        finalizer.atexit = False


def take_streams(out: int, err: int) -> None:
    """Make these our standard output and error."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    whole_lines()


def whole_lines() -> None:
    """Write each line when it ends: what a killed process has printed must have left it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def reseed() -> None:
    """Forked twins must not throw the same dice."""
    dice.reseed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()


def shorten_socket_paths() -> None:
    """Let multiprocessing meet in a folder with a short name, whatever that of TMPDIR is.

    The path of a socket is limited, and a data loader whose workers cannot open theirs waits for
    them for ever. A name in /proc lasts as long as this process, and leaves nothing behind.
    """
    folder = os.fsencode(tempfile.gettempdir())
    if len(folder) + _BELOW <= _SOCKET_PATH_BYTES or not _DESCRIPTORS.is_dir():
        return
    from multiprocessing import process  # only few need it

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    mine: dict[str, str] = process.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001 - there is no other door
    mine["tempdir"] = f"/proc/{os.getpid()}/fd/{handle}"


def enter(what: str, talk: int) -> None:
    """Be a child of that kind; its module is imported now, if nobody has done so before."""
    importlib.import_module(ENTRANCES[what]).main(talk)
