"""Reuse of machine processes: after a run they wait, framework imported, for the next `fit()`.

A machine is owned by the driver process that started it, directly or through another machine. It is
reused only with the environment it was started in, and exits with its owner. The driver sends
requests to a Unix socket in the machine's directory; `machine.AssignmentServer` answers them.
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
from spotfit.host.system import SystemClock
from spotfit_provisioners.local.processes import ProcessIdentity, current_process
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

OWNER_ENV = "SPOTFIT_LOCAL_OWNER"
ROOT_ENV = "SPOTFIT_LOCAL_ROOT"
TMPDIR_ENV = "SPOTFIT_LOCAL_TMPDIR"
SOCKET_NAME = "door"
"""Name of the Unix socket in the directory of a machine."""
SERVE, LEAVE = "serve", "leave"
ACCEPTED, REJECTED = b"yes", b"no"

# Set for one run or machine: not inherited by the next one, and not part of the digest.
_PER_RUN_VARIABLES = (
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
    OWNER_ENV,
    ROOT_ENV,
    TMPDIR_ENV,
)
# Variables that differ between equivalent environments, and must not prevent reuse.
_IGNORED_VARIABLES = ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_")
# A machine answers at once, unless it is stopped or its disk is busy. Without an answer, another
# machine is started.
_RESPONSE_TIMEOUT_S = 0.5
_EXIT_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.01


def owner_process() -> ProcessIdentity:
    """Return the driver that owns machines of this process: itself, unless it is a machine."""
    return ProcessIdentity.parse(env.lookup(OWNER_ENV) or "") or current_process()


def inherited_environment() -> dict[str, str]:
    """Return the environment without variables of a single run or machine."""
    inherited = env.copy_environment()
    # A machine has a temporary directory of its own. The one of its owner is passed on to the next.
    if TMPDIR_ENV in inherited:
        inherited["TMPDIR"] = inherited[TMPDIR_ENV]
    if not inherited.get("TMPDIR"):
        inherited.pop("TMPDIR", None)
    return {name: text for name, text in inherited.items() if name not in _PER_RUN_VARIABLES}


def ownership_variables(root: LocalCloudDir, inherited: dict[str, str]) -> dict[str, str]:
    """Return the variables by which a machine and its descendants find their owner and root."""
    return {
        OWNER_ENV: str(owner_process()),
        ROOT_ENV: str(root.path),
        TMPDIR_ENV: inherited.get("TMPDIR", ""),
    }


def environment_digest(environment: dict[str, str]) -> str:
    """Return a digest of interpreter and environment; machines are reused if it is equal."""
    relevant = {name: text for name, text in environment.items() if name not in _IGNORED_VARIABLES}
    text = json.dumps([sys.executable, relevant], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def assign_waiting_machine(node: LocalNode, owner: ProcessIdentity, digest: str) -> bool:
    """Assign the node to a waiting machine of the owner; return False if there is none."""
    request = {"ask": SERVE, "owner": str(owner), "digest": digest, "node": str(node.path)}
    return any(_send_request(node.root, machine, request) for machine in node.root.machines())


def dismiss_at_exit(root: LocalCloudDir) -> None:
    """Dismiss the waiting machines of this process when it exits."""
    _at_exit(root, current_process())


@functools.cache  # registers once per root and process; a forked process has another identity
def _at_exit(root: LocalCloudDir, owner: ProcessIdentity) -> None:
    atexit.register(dismiss_machines, root, owner)


def dismiss_machines(root: LocalCloudDir, owner: ProcessIdentity) -> None:
    """End the waiting machines of the owner and wait for their exit; others keep running."""
    request = {"ask": LEAVE, "owner": str(owner)}
    leaving = [machine for machine in root.machines() if _send_request(root, machine, request)]
    # Waiting for the exit makes the root empty, so that it can be collected.
    clock = SystemClock()
    deadline = clock.now() + _EXIT_TIMEOUT_S
    while any(machine.is_alive for machine in leaving) and clock.now() < deadline:
        clock.wait(_POLL_INTERVAL_S)
    root.collect_garbage()


def _send_request(root: LocalCloudDir, machine: ProcessIdentity, request: dict[str, str]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_RESPONSE_TIMEOUT_S)
        try:
            _connect(connection, root.machine_dir(machine))
            connection.sendall(json.dumps(request).encode() + b"\n")
            return connection.recv(len(ACCEPTED)) == ACCEPTED
        except OSError:  # the machine has exited or is exiting, or the socket path is too long
            return False


def _connect(connection: socket.socket, home: Path) -> None:
    # Paths of Unix sockets are limited to 108 bytes; a path relative to a descriptor is short.
    if sys.platform != "linux":
        connection.connect(str(home / SOCKET_NAME))
        return
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
    finally:
        os.close(folder)
