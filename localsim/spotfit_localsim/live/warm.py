"""Machines begun before it is known what for: they import what the workers of a run will need.

A warm machine reads from a pipe, whose other end its driver holds, which node it is to serve. Where
the pipe is closed instead, because the driver has let it go or is dead, the machine ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from spotfit_localsim.live import pool, processes
from spotfit_localsim.live.places import Node, Root
from spotfit_localsim.live.processes import Process, here

MACHINE = (sys.executable, "-P", "-m", "spotfit_localsim.live.machine")
WAIT = "--wait"
"""In the place of a node's directory: root, slots and framework follow."""


class Warm(NamedTuple):
    """A machine that waits for its first node."""

    root: Root
    process: Process
    digest: str
    """Of the environment it was started in."""
    pipe: int


_waiting: list[Warm] = []
_lock = threading.Lock()


@contextlib.contextmanager
def machines(root: Root, nodes: int, slots: int, framework: str) -> Iterator[None]:
    """So many machines are warm while this is open; those that `take` gave no node then end.

    Only for drivers: a machine that starts machines has a driver, whose they are.
    """
    begun: list[Warm] = []
    try:
        if pool.owner() == here():
            begun += _begin(root, nodes, slots, framework)
        yield
    finally:
        _let_go(begun)


def take(node: Node, digest: str) -> bool:
    """Give the node to a warm machine of that environment; False if there is none."""
    with _lock:
        fitting = [warm for warm in _waiting if (warm.root, warm.digest) == (node.root, digest)]
        while fitting:
            warm = fitting.pop(0)
            _waiting.remove(warm)
            with contextlib.closing(_Pipe(warm.pipe)) as pipe:
                if warm.process.alive and node.claim(warm.process) and pipe.tell(node.path):
                    return True
    return False


def told(root: Root) -> Node | None:
    """In the machine: the node that the driver names on standard input; None if it names none."""
    with os.fdopen(os.dup(sys.stdin.fileno())) as pipe, Path(os.devnull).open() as nothing:
        line = pipe.readline()
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return Node(root, Path(line.removesuffix("\n"))) if line.endswith("\n") else None


class _Pipe:
    """The driver's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, path: Path) -> bool:
        try:
            os.write(self._descriptor, f"{path}\n".encode())
        except BrokenPipeError:  # it has died
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def _begin(root: Root, nodes: int, slots: int, framework: str) -> Iterator[Warm]:
    environment = pool.environment()
    for _ in range(nodes):
        theirs, ours = os.pipe()
        with root.locked():  # it is not tidied away before the machine has its home there
            process = processes.start_detached(
                [*MACHINE, WAIT, str(root.path), str(slots), framework],
                environment=environment | pool.belonging(root, environment),
                directory=root.path,
                output=Path(os.devnull),
                stdin=theirs,
            )
        os.close(theirs)
        if process is None:
            os.close(ours)
            continue
        warm = Warm(root, process, pool.digest(environment), ours)
        with _lock:
            _waiting.append(warm)
        yield warm


def _let_go(begun: list[Warm]) -> None:
    """End those that nobody took."""
    with _lock:
        left = [warm for warm in begun if warm in _waiting]
        for warm in left:
            _waiting.remove(warm)
            os.close(warm.pipe)
    for warm in left:
        processes.kill(warm.process)
        warm.root.forget(warm.process)
        warm.root.tidy()
