"""Prewarmed machines: started before a group is submitted, they import the framework meanwhile.

A prewarmed machine reads the path of its first node from a pipe held by the driver. It exits if the
pipe is closed, because the driver has released it, if the driver has exited, or after `MAX_WAIT_S`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spotfit.host.system import SystemClock
from spotfit_provisioners.local import machine_pool, processes
from spotfit_provisioners.local.processes import ProcessIdentity, current_process
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

MACHINE_COMMAND = (sys.executable, "-P", "-m", "spotfit_provisioners.local.machine")
WAIT_FLAG = "--wait"
"""Replaces the node directory on the command line; root, slots, framework and further modules to
import follow."""
MAX_WAIT_S = 900.0
"""How long a machine waits for its first node. `fit()` sends it within seconds, unless its storage
does not respond, for which it waits 15 minutes at most."""


class WarmMachine(NamedTuple):
    """A machine that waits for its first node."""

    root: LocalCloudDir
    process: ProcessIdentity
    digest: str
    """Digest of the environment in which it was started."""
    pipe: int
    """Descriptor of the driver's end of the pipe."""


_unassigned: list[WarmMachine] = []
_lock = threading.Lock()


@contextlib.contextmanager
def warm_machines(root: LocalCloudDir, nodes: int, arguments: Sequence[str]) -> Iterator[None]:
    """Keep `nodes` prewarmed machines inside the context; end those without a node afterwards.

    `arguments` are the number of workers of a machine, the framework, and further modules to
    import, for its command line. Starts none if this process is a machine itself: its machines
    would belong to its driver.
    """
    started: list[WarmMachine] = []
    try:
        if machine_pool.owner_process() == current_process():
            started += _start_machines(root, nodes, arguments)
        yield
    finally:
        with _lock:
            unused = [warm for warm in started if warm in _unassigned]
            for warm in unused:
                _unassigned.remove(warm)
                os.close(warm.pipe)
        # Outside of the lock: killing takes time, and other threads may assign their machines.
        for warm in unused:
            processes.kill_process_tree(warm.process)
            warm.root.remove_machine(warm.process)
            warm.root.collect_garbage()


def assign_warm_machine(node: LocalNode, digest: str) -> bool:
    """Assign the node to a prewarmed machine of that environment; False if there is none."""
    with _lock:
        matching = [warm for warm in _unassigned if (warm.root, warm.digest) == (node.root, digest)]
        while matching:
            warm = matching.pop(0)
            _unassigned.remove(warm)
            # Unbuffered: a buffered file would write again when it is closed, and fail again.
            with (
                os.fdopen(warm.pipe, "wb", buffering=0) as pipe,
                contextlib.suppress(BrokenPipeError),  # the machine has exited
            ):
                if warm.process.is_alive and node.claim(warm.process):
                    pipe.write(f"{node.path}\n".encode())
                    return True
    return False


def read_first_node(root: LocalCloudDir, owner: ProcessIdentity) -> LocalNode | None:
    """Read the first node from standard input (in the machine).

    None if the pipe is closed, the driver `owner` has exited, or no node came within `MAX_WAIT_S`.
    """
    with os.fdopen(os.dup(sys.stdin.fileno())) as pipe, Path(os.devnull).open() as nothing:
        line = pipe.readline() if _wait_for_line(pipe.fileno(), owner) else ""
        # Standard input is inherited by the agent and its workers, which must not read the pipe.
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return LocalNode(root, Path(line.removesuffix("\n"))) if line.endswith("\n") else None


def _wait_for_line(pipe: int, owner: ProcessIdentity) -> bool:
    """Wait for a line or the end of the pipe; False if the owner exits, or after `MAX_WAIT_S`."""
    clock = SystemClock()
    deadline = clock.now() + MAX_WAIT_S
    # The end of the pipe does not suffice: processes that the driver has forked hold it open.
    with processes.open_pidfd(owner) as exited:
        watched = [pipe] if exited is None else [pipe, exited]
        while owner.is_alive and clock.now() < deadline:
            if pipe in select.select(watched, [], [], processes.EXIT_CHECK_INTERVAL_S)[0]:
                return True
    # Once more: the driver may have sent the node directly before it exited.
    return bool(select.select([pipe], [], [], 0.0)[0])


def _start_machines(
    root: LocalCloudDir, nodes: int, arguments: Sequence[str]
) -> Iterator[WarmMachine]:
    environment = machine_pool.inherited_environment()
    for _ in range(nodes):
        read_end, write_end = os.pipe()
        # Locked, so that no other process collects the root as unused before the machine exists.
        with root.lock():
            process = processes.start_detached(
                [*MACHINE_COMMAND, WAIT_FLAG, str(root.path), *arguments],
                environment=environment | machine_pool.ownership_variables(root, environment),
                directory=root.path,
                output=Path(os.devnull),
                stdin=read_end,
            )
        # This process must not keep the read end open: its writes would not fail after the exit of
        # the machine.
        os.close(read_end)
        if process is None:
            os.close(write_end)
            continue
        digest = machine_pool.environment_digest(environment)
        warm = WarmMachine(root=root, process=process, digest=digest, pipe=write_end)
        with _lock:
            _unassigned.append(warm)
        yield warm
