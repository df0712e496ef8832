"""A machine of the local cloud: `python -m spotfit_localsim.live.machine <node directory>`.

It runs the agent of one node after the other: the first is named on the command line, the next
are brought by the driver it belongs to. It keeps its zygotes, so only the first pays for imports.

With `--wait <root> <slots> <framework>` instead it imports at once, and is told its first node by
a line on its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from spotfit.agent.zygote import Breed, ZygoteKeeper, variables_for
from spotfit.core.errors import ConfigError
from spotfit.host import env
from spotfit.host.process import call_myself
from spotfit.provision.launch import Assignment, Exit
from spotfit_localsim.live import pool, warm
from spotfit_localsim.live.places import Node, Root
from spotfit_localsim.live.processes import Process, here

_LOOK_FOR_OWNER_EVERY_S = 1.0
_REQUEST_WITHIN_S = 0.5
_LONGEST_REQUEST = 65_536


def main(arguments: Sequence[str]) -> int:
    """Serve one node, then those that the driver brings, until it brings none."""
    _become_a_group()
    if arguments[0] == warm.WAIT:
        return _wait(Root(Path(arguments[1])), int(arguments[2]), arguments[3])
    path = Path(arguments[0])
    first, me = Node(Root(path.parents[2]), path), here()
    if not first.claim(me):
        return 0  # somebody else is the machine of this node
    with _home(first.root, me) as home, contextlib.closing(ZygoteKeeper()) as zygotes:
        return _serve_all(first, home, zygotes)


def _wait(root: Root, slots: int, framework: str) -> int:
    """Import what the workers of a run will need, then serve the node that the driver names."""
    me = here()
    with _home(root, me) as home, contextlib.closing(ZygoteKeeper()) as zygotes:
        inherited = _inherited(home)
        env.replace(inherited | pool.belonging(root, pool.environment()))
        zygotes.warm(Breed.of(framework, sys.executable, variables_for(slots, {})))
        first = warm.told(root)
        return _serve_all(first, home, zygotes) if first is not None and first.claim(me) else 0


def _inherited(home: Path) -> dict[str, str]:
    return pool.environment() | {"TMPDIR": str(home / "tmp")}


def _serve_all(first: Node, home: Path, zygotes: ZygoteKeeper) -> int:
    inherited = _inherited(home)
    door: Door | None = None
    node: Node | None = first
    while node is not None:
        told = node.assignment()
        if told is None:
            return 0  # cancelled before it began
        door = door or Door(home, owner=told["owner"], digest=told["digest"])
        if not _serve(node, told, inherited, zygotes):
            return 1
        node = door.next_node(after=node, within_s=told["idle_s"])
    return 0


def _become_a_group() -> None:
    call_myself("spotfit-machine")
    with contextlib.suppress(PermissionError):  # it is one already
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it


@contextlib.contextmanager
def _home(root: Root, me: Process) -> Iterator[Path]:
    home = root.home(me)
    with root.locked():  # whoever began us may be dead, and the root tidied away
        (home / "tmp").mkdir(mode=0o700, parents=True)
    os.chdir(home)
    try:
        yield home
    finally:
        root.forget(me)
        root.tidy()


# --- one node ---------------------------------------------------------------------------------


def _serve(
    node: Node, told: dict[str, Any], inherited: dict[str, str], zygotes: ZygoteKeeper
) -> bool:
    """Be the agent of this node to its end. False if this machine should do no more."""
    _speak_to(node.output)
    node.assignment_was_read()
    env.replace(inherited | told["environment"])
    try:
        assignment = Assignment.read(env.everything())
        zygotes.begin(assignment)  # while the agent itself is still being imported
        code = _named(told["agent"])(assignment, zygotes=zygotes)
    except Exception as error:  # noqa: BLE001  # the border of the agent: a fact about this node
        traceback.print_exc()
        node.ended(f"its agent failed with {type(error).__name__}")
        return False
    finally:
        env.replace(inherited)
        signal.signal(signal.SIGTERM, _leave_quietly)
    if code == Exit.DRAINED:
        node.reclaimed("left before it was taken away")
    elif code == Exit.GIVEN_UP:
        node.leave()
    elif code != 0:
        node.ended(f"its agent ended with code {code}")
    return code == 0


def _named(agent: str) -> Callable[..., int]:
    module, _, function = agent.partition(":")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ConfigError(f"LocalOptions(agent={agent!r}) names nothing that can be called.")
    return found  # type: ignore[no-any-return]  # it is compared with 0, whatever it is


def _speak_to(output: Path) -> None:
    """From now on all that this process and its children print goes to that file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(FileNotFoundError):  # cancelled meanwhile
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


def _leave_quietly(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


# --- between two nodes ------------------------------------------------------------------------


class Door:
    """Where the driver brings the next node. A thread of its own answers at once."""

    def __init__(self, home: Path, *, owner: str, digest: str) -> None:
        self._root = Root(home.parents[1])
        self._owner = Process.parse(owner)
        self._digest = digest
        self._lock = threading.Lock()
        self._open = False
        self._brought: queue.Queue[Node | None] = queue.Queue()
        if self._owner is not None and self._owner.alive:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(pool.DOOR)  # of the home, where we are: a whole path may be too long
            listening.listen()
            threading.Thread(target=self._watch, args=[listening], daemon=True).start()

    def next_node(self, *, after: Node, within_s: float) -> Node | None:
        """Leave a node and wait for the next one; None if none was brought in time, or will be.

        It can be brought from before the last one is seen to be over: who waited for that may
        have the next one in hand.
        """
        with self._lock:
            self._open = self._owner is not None and self._owner.alive and within_s > 0
        after.leave()
        if not self._open and self._brought.empty():
            return None
        with contextlib.suppress(queue.Empty):
            return self._brought.get(timeout=within_s)
        with self._lock:
            self._open = False
        return None if self._brought.empty() else self._brought.get()

    def _watch(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            with _death_of(self._owner) as death:
                if death is not None:
                    selector.register(death, selectors.EVENT_READ)
                while self._owner is not None and self._owner.alive:
                    selector.select(_LOOK_FOR_OWNER_EVERY_S)
                    self._answer(listening)
        self._close()

    def _answer(self, listening: socket.socket) -> None:
        listening.settimeout(0)
        # Nobody was there, or did not wait for the answer, or died before it had asked.
        with contextlib.suppress(OSError, ValueError, KeyError):
            wire, _ = listening.accept()
            with wire:
                wire.settimeout(_REQUEST_WITHIN_S)
                request = json.loads(wire.recv(_LONGEST_REQUEST))
                wire.sendall(pool.YES if self._grants(request) else pool.NO)

    def _grants(self, request: dict[str, str]) -> bool:
        if request["owner"] != str(self._owner):
            return False
        if request["ask"] == pool.LEAVE or request["digest"] != self._digest:
            return self._close() and request["ask"] == pool.LEAVE
        with self._lock:
            node = Node(self._root, Path(request["node"]))
            granted = self._open and node.claim(here())
            if granted:
                self._open = False
                self._brought.put(node)
        return granted

    def _close(self) -> bool:
        """No more nodes; True if one was being waited for."""
        with self._lock:
            was_open, self._open = self._open, False
            if was_open:
                self._brought.put(None)
        return was_open


@contextlib.contextmanager
def _death_of(owner: Process | None) -> Iterator[int | None]:
    """A descriptor that can be read from when that process is dead, where the system has such."""
    descriptor: int | None = None
    if owner is not None and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(owner.pid)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
