"""Machines that outlast a run: they wait, framework imported, for the next `fit()` of their driver.

A machine belongs to the driver that started it, or whose machine did. It is used again only in
the very environment it was started in, and leaves when its driver does.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import socket
import sys
from pathlib import Path

from spotfit.host import env
from spotfit.host.clocks import SystemClock
from spotfit_localsim.live.places import Node, Root
from spotfit_localsim.live.processes import Process, here

OWNER = "SPOTFIT_LOCAL_OWNER"
ROOT = "SPOTFIT_LOCAL_ROOT"
TMPDIR = "SPOTFIT_LOCAL_TMPDIR"
DOOR = "door"
"""The socket in a machine's home at which it can be asked."""
SERVE, LEAVE = "serve", "leave"
YES, NO = b"yes", b"no"

_ONE_RUN_ONLY = (
    "SPOTFIT_RUN_URL",
    "SPOTFIT_RUN_ID",
    "SPOTFIT_RUN_SECRET",
    "SPOTFIT_STORAGE_KEYS",
    "SPOTFIT_TOKEN",
    "SPOTFIT_NODE",
    "SPOTFIT_SLOTS",
    "SPOTFIT_NOTICES",
    "SPOTFIT_NOTICE_FILE",
    "SPOTFIT_HOST",
    "SPOTFIT_SCRATCH",
    OWNER,
    ROOT,
    TMPDIR,
)
_MEANS_NOTHING = ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_")
_ANSWER_WITHIN_S = 0.5
_LEAVE_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.01


def owner() -> Process:
    """The driver this process works for: itself, unless it is one of a driver's machines."""
    return Process.parse(env.lookup(OWNER) or "") or here()


def environment() -> dict[str, str]:
    """What machines inherit: everything here but what belongs to one run or one machine."""
    inherited = env.everything()
    if TMPDIR in inherited:
        inherited["TMPDIR"] = inherited[TMPDIR]
    if not inherited.get("TMPDIR"):
        inherited.pop("TMPDIR", None)
    return {name: text for name, text in inherited.items() if name not in _ONE_RUN_ONLY}


def belonging(root: Root, inherited: dict[str, str]) -> dict[str, str]:
    """What tells a machine, and all that it starts, whose it is."""
    return {OWNER: str(owner()), ROOT: str(root.path), TMPDIR: inherited.get("TMPDIR", "")}


def digest(environment: dict[str, str]) -> str:
    """Equal for two environments in which a machine behaves the same."""
    told = {name: text for name, text in environment.items() if name not in _MEANS_NOTHING}
    text = json.dumps([sys.executable, told], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def take(node: Node, owner: Process, digest: str) -> bool:
    """Give the node to a machine of that owner that waits for one; False if there is none."""
    request = {"ask": SERVE, "owner": str(owner), "digest": digest, "node": str(node.path)}
    return any(_ask(node.root, machine, request) for machine in node.root.machines())


def dismiss_at_exit(root: Root) -> None:
    """When this process ends, its waiting machines end before it."""
    _at_exit(root, here())


@functools.cache
def _at_exit(root: Root, owner: Process) -> None:
    atexit.register(dismiss, root, owner)


def dismiss(root: Root, owner: Process) -> None:
    """Send the waiting machines of that owner away; those that train go on."""
    request = {"ask": LEAVE, "owner": str(owner)}
    leaving = [machine for machine in root.machines() if _ask(root, machine, request)]
    clock = SystemClock()
    give_up_at = clock.now() + _LEAVE_WITHIN_S
    while any(machine.alive for machine in leaving) and clock.now() < give_up_at:
        clock.wait(_LOOK_EVERY_S)
    root.tidy()


def _ask(root: Root, machine: Process, request: dict[str, str]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.settimeout(_ANSWER_WITHIN_S)
        try:
            _connect(wire, root.home(machine))
            wire.sendall(json.dumps(request).encode() + b"\n")
            return wire.recv(len(YES)) == YES
        except OSError:  # it is gone, too busy dying to answer, or its path is too long for one
            return False


def _connect(wire: socket.socket, home: Path) -> None:
    """As if in that directory: the path of a socket may be 108 letters at most."""
    if sys.platform != "linux":
        wire.connect(str(home / DOOR))
        return
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY)
    try:
        wire.connect(f"/proc/self/fd/{folder}/{DOOR}")
    finally:
        os.close(folder)
