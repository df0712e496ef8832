"""Messages between an agent and its fork server over a SOCK_SEQPACKET socket, one JSON per packet.

The descriptors of a new child travel in the same packet as `ForkChild` (SCM_RIGHTS).
"""

from __future__ import annotations

from typing import Literal

import msgspec

ChildKind = Literal["worker", "callbacks", "hooks", "uploader", "validation", "feeder"]
"""The program that a child process runs; `fork_server.child_setup` maps it to a module."""

EXIT_FORK_SERVER_DIED = "died with the process it was forked from"
"""The exit reason of a child whose fork server was killed; not the fault of the child's code."""

EXIT_NOT_STARTED = "could not be started"
"""The beginning of the exit reason of a child that was never started."""

# --- agent -> fork server ----------------------------------------------------------------------


class ForkChild(msgspec.Struct, frozen=True, kw_only=True, tag="fork_child"):
    """Fork a child. Three descriptors accompany the message: its socket, stdout and stderr."""

    # Not the pid, which is unknown until the child is forked.
    request_id: int
    """Chosen by the agent; the replies about this child repeat it."""
    kind: ChildKind = "worker"


# --- fork server -> agent ----------------------------------------------------------------------


class ForkServerReady(msgspec.Struct, frozen=True, kw_only=True, tag="fork_server_ready"):
    """What workers need up to their first training step is imported; a fork takes milliseconds."""


# A forked child has only the forking thread; locks that other threads held stay locked there.
class ForkUnsafe(msgspec.Struct, frozen=True, kw_only=True, tag="fork_unsafe"):
    """The process cannot fork after this import, and exits."""

    module: str
    reason: str
    """What the import has left behind, such as threads."""


class ChildForked(msgspec.Struct, frozen=True, kw_only=True, tag="child_forked"):
    """The child runs. It leads a process group whose id is `pid`."""

    request_id: int
    pid: int


class ChildExited(msgspec.Struct, frozen=True, kw_only=True, tag="child_exited"):
    """The child is reaped, and the remaining processes of its group are killed."""

    request_id: int
    pid: int
    wait_status: int
    """The status returned by `os.waitpid`."""


FromForkServer = ForkServerReady | ForkUnsafe | ChildForked | ChildExited
