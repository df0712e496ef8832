"""User processes started one by one, where a fork is not safe: slower, the same otherwise."""

from __future__ import annotations

import os
import subprocess

from spotfit.agent.child import Child
from spotfit.agent.loop import Loop
from spotfit.agent.zygote import Breed
from spotfit.model.cradle import Kind

_POLL_S = 0.05


class Spawner:
    """Starts a fresh interpreter for each child, and watches it until it has ended."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: dict[int, tuple[subprocess.Popen[bytes], Child]] = {}

    @property
    def left(self) -> int:
        """How many have not been reaped."""
        return len(self._running)

    def bear(self, what: Kind, breed: Breed, child: Child) -> None:
        """Start it. Raises `OSError` where that interpreter cannot be run."""
        talk, out, err = child.descriptors
        started = subprocess.Popen(  # noqa: S603 - our own module in a given interpreter
            [breed.python, "-m", "spotfit.worker", str(talk), str(os.getpid()), what],
            env=breed.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[talk],
            process_group=0,
        )
        child.born(started.pid)
        if not self._running:
            self._loop.after(_POLL_S, self._look)
        self._running[started.pid] = started, child

    def _look(self) -> None:
        """Popen tells by polling only, on every platform."""
        for pid, (started, child) in list(self._running.items()):
            code = started.poll()
            if code is not None:
                del self._running[pid]
                child.reaped(_status(code))
        if self._running:
            self._loop.after(_POLL_S, self._look)


def _status(returncode: int) -> int:
    """The wait status that `Popen` made this return code from."""
    return -returncode if returncode < 0 else returncode << 8
