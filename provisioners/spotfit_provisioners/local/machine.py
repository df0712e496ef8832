"""Main program of a machine: `python -m spotfit_provisioners.local.machine <node directory>`.

A machine runs the agents of one node after the other. The first node is given on the command line,
further ones by the driver that owns the machine. Its fork servers are kept between nodes, so that
the framework is imported only once. With `--wait <root> <slots> <framework> [module …]` the machine
imports the framework and the modules at once, and reads its first node from standard input.

    state      | event                                       | next
    -----------|---------------------------------------------|----------------------------
    prewarmed  | the driver sends a node                     | serving
    prewarmed  | the pipe is closed, or the owner exits      | exited
    prewarmed  | `prewarm.MAX_WAIT_S` passes                 | exited
    serving    | the agent returns 0                         | waiting
    serving    | the agent returns another code, or raises   | exited
    waiting    | the driver assigns a node                   | serving
    waiting    | idle_s passes, LEAVE, or the owner exits    | exited
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
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.fork_server.fork_client import ForkServerPool, RuntimeKey, build_worker_environment
from spotfit.host import env, log
from spotfit.host.process import limit_exit, set_process_name
from spotfit.provision.launch import AgentAssignment, AgentExitCode
from spotfit_provisioners.local import machine_pool, prewarm
from spotfit_provisioners.local.processes import (
    EXIT_CHECK_INTERVAL_S,
    ProcessIdentity,
    current_process,
    open_pidfd,
)
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

_REQUEST_TIMEOUT_S = 0.5
_MAX_REQUEST_BYTES = 65_536


def main(arguments: Sequence[str]) -> int:
    """Serve the first node, then nodes assigned by the driver. Returns the exit code."""
    log.use_default_handler()
    set_process_name("spotfit-machine")
    with contextlib.suppress(PermissionError):  # this process leads a session already
        os.setsid()
    # A shell starts background jobs with SIGINT ignored; agents and workers need the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[0] == prewarm.WAIT_FLAG:
        _, root, slots, framework, *preload = arguments
        return _serve_when_assigned(
            LocalCloudDir(Path(root)), int(slots), framework=framework, preload=preload
        )
    path = Path(arguments[0])
    first, me = LocalNode(LocalCloudDir(path.parents[2]), path), current_process()
    if not first.claim(me):
        return 0  # another machine has claimed the node
    with _machine_dir(first.root, me) as home, contextlib.closing(ForkServerPool()) as fork_servers:
        return _serve_all(first, home, fork_servers)


def _serve_when_assigned(
    root: LocalCloudDir, slots: int, *, framework: str, preload: Sequence[str]
) -> int:
    """Import the framework in a fork server, then serve the node that the driver sends."""
    me = current_process()
    with _machine_dir(root, me) as home, contextlib.closing(ForkServerPool()) as fork_servers:
        inherited = _base_environment(home)
        env.replace_all(
            inherited | machine_pool.ownership_variables(root, machine_pool.inherited_environment())
        )
        variables = build_worker_environment(slots, {})
        fork_servers.get_or_start(RuntimeKey.of(framework, sys.executable, variables, preload))
        first = prewarm.read_first_node(root, machine_pool.owner_process())
        return _serve_all(first, home, fork_servers) if first is not None and first.claim(me) else 0


def _base_environment(home: Path) -> dict[str, str]:
    return machine_pool.inherited_environment() | {"TMPDIR": str(home / "tmp")}


def _serve_all(first: LocalNode, home: Path, fork_servers: ForkServerPool) -> int:
    inherited = _base_environment(home)
    server: AssignmentServer | None = None
    node: LocalNode | None = first
    while node is not None:
        assignment = node.read_assignment()
        if assignment is None:
            return 0  # the group was cancelled before the agent started
        # Not earlier: owner and digest are in the assignment. One server serves all nodes.
        server = server or AssignmentServer(
            home, owner=assignment["owner"], digest=assignment["digest"]
        )
        if not _serve_node(node, assignment, inherited=inherited, fork_servers=fork_servers):
            return 1
        node = server.next_node(previous=node, timeout_s=assignment["idle_s"])
    return 0


@contextlib.contextmanager
def _machine_dir(root: LocalCloudDir, me: ProcessIdentity) -> Iterator[Path]:
    home = root.machine_dir(me)
    # The lock recreates the root if it was collected after the starter of this machine exited.
    with root.lock():
        (home / "tmp").mkdir(mode=0o700, parents=True)
    os.chdir(home)
    try:
        yield home
    finally:
        root.remove_machine(me)
        root.collect_garbage()


# --- one node ---------------------------------------------------------------------------------


def _serve_node(
    node: LocalNode,
    assignment_body: dict[str, Any],
    *,
    inherited: dict[str, str],
    fork_servers: ForkServerPool,
) -> bool:
    """Run the agent of the node to its end. Returns False if the machine should exit."""
    _redirect_output(node.output_path)
    node.delete_assignment()  # it contains the run key
    env.replace_all(inherited | assignment_body["environment"])
    try:
        assignment = AgentAssignment.from_environment(env.copy_environment())
        fork_servers.prewarm(assignment)  # concurrently with the import of the agent
        code = _load_agent_function(assignment_body["agent"])(assignment, fork_servers=fork_servers)
    except Exception as error:  # noqa: BLE001  # any failure of the agent is the node's state
        traceback.print_exc()
        node.mark_failed(f"its agent failed with {type(error).__name__}")
        return False
    finally:
        env.replace_all(inherited)
        # The agent handled SIGTERM as its notice. Between two nodes the machine just exits, and
        # SystemExit runs the cleanup of its directory.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(limit_exit(0)))
    if code == AgentExitCode.DRAINED:
        node.mark_reclaimed("drained before its preemption")
    elif code == AgentExitCode.RELEASED:
        node.remove()
    elif code != 0:
        node.mark_failed(f"its agent exited with code {code}")
    return code == 0


def _load_agent_function(agent: str) -> Callable[..., int]:
    module, _, function = agent.partition(":")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ConfigError(
            f"LocalOptions(agent={agent!r}) does not name a function.",
            do="Write agent='module:function', or omit the option.",
        )
    return found  # type: ignore[no-any-return]  # the result is only compared with 0


def _redirect_output(output: Path) -> None:
    """Append stdout and stderr of this process and its children to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(FileNotFoundError):  # the group was cancelled
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


# --- between two nodes ------------------------------------------------------------------------


class AssignmentServer:
    """Answers requests of the driver in a thread: assignment of the next node, or exit."""

    def __init__(self, home: Path, *, owner: str, digest: str) -> None:
        self._root = LocalCloudDir(home.parents[1])
        self._owner = ProcessIdentity.parse(owner)
        self._digest = digest
        self._lock = threading.Lock()
        self._is_waiting = False
        self._assigned: queue.Queue[LocalNode | None] = queue.Queue()
        if self._owner is not None and self._owner.is_alive:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Relative to the current directory: paths of Unix sockets are limited to 108 bytes.
            listening.bind(machine_pool.SOCKET_NAME)
            listening.listen()
            threading.Thread(target=self._listen, args=[listening], daemon=True).start()

    def next_node(self, *, previous: LocalNode, timeout_s: float) -> LocalNode | None:
        """Remove the previous node and wait for the next one; None after `timeout_s` or LEAVE."""
        # Accept assignments before the previous node is removed: a driver that waits for the
        # removal may assign the next node immediately afterwards.
        with self._lock:
            self._is_waiting = self._owner is not None and self._owner.is_alive and timeout_s > 0
        previous.remove()
        if not self._is_waiting and self._assigned.empty():
            return None
        with contextlib.suppress(queue.Empty):
            return self._assigned.get(timeout=timeout_s)
        # A node may have been assigned between the timeout and this lock; it was claimed already.
        with self._lock:
            self._is_waiting = False
        return None if self._assigned.empty() else self._assigned.get()

    def _listen(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            with open_pidfd(self._owner) as owner_exit:
                if owner_exit is not None:
                    selector.register(owner_exit, selectors.EVENT_READ)
                while self._owner is not None and self._owner.is_alive:
                    selector.select(EXIT_CHECK_INTERVAL_S)
                    self._handle_request(listening)
        self._stop_waiting()

    def _handle_request(self, listening: socket.socket) -> None:
        listening.settimeout(0)
        # No connection was pending, or the client closed it before sending or reading.
        with contextlib.suppress(OSError, ValueError, KeyError):
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                request = json.loads(connection.recv(_MAX_REQUEST_BYTES))
                connection.sendall(
                    machine_pool.ACCEPTED if self._accepts(request) else machine_pool.REJECTED
                )

    def _accepts(self, request: dict[str, str]) -> bool:
        if request["owner"] != str(self._owner):
            return False
        if request["ask"] == machine_pool.LEAVE or request["digest"] != self._digest:
            return self._stop_waiting() and request["ask"] == machine_pool.LEAVE
        with self._lock:
            # Claimed under the lock: of two drivers' requests the first one gets the machine.
            node = LocalNode(self._root, Path(request["node"]))
            granted = self._is_waiting and node.claim(current_process())
            if granted:
                self._is_waiting = False
                self._assigned.put(node)
        return granted

    def _stop_waiting(self) -> bool:
        """Accept no further nodes; return whether the machine was waiting for one."""
        with self._lock:
            was_open, self._is_waiting = self._is_waiting, False
            if was_open:
                self._assigned.put(None)
        return was_open


if __name__ == "__main__":
    sys.exit(limit_exit(main(sys.argv[1:])))
