"""Starts user processes as new interpreters where forking is unsafe (macOS, threaded imports).

Slower than the fork server by the time of the framework's import; equivalent otherwise.
"""

from __future__ import annotations

import os
import subprocess

from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import RuntimeKey
from spotfit.host.event_loop import EventLoop
from spotfit.protocol.agent_fork_server import ChildKind

# Popen does not report a child's exit through a descriptor on all platforms, so it is polled.
_POLL_S = 0.05


class Spawner:
    """Starts a new interpreter for each child, and reaps it."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._running: dict[int, tuple[subprocess.Popen[bytes], ChildProcess]] = {}

    @property
    def live_count(self) -> int:
        """The number of children that have not been reaped."""
        return len(self._running)

    def spawn(self, kind: ChildKind, runtime_key: RuntimeKey, child: ChildProcess) -> None:
        """Start a child. Raises `OSError` if the interpreter cannot be executed."""
        socket_fd, stdout_fd, stderr_fd = child.descriptors
        arguments = [str(socket_fd), str(os.getpid()), kind]
        started = subprocess.Popen(  # noqa: S603 - our own module in a given interpreter
            [runtime_key.python, "-m", "spotfit.fork_server", *arguments],
            env=runtime_key.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=[socket_fd],
            process_group=0,
        )
        child.on_started(started.pid)
        if not self._running:
            self._loop.call_later(_POLL_S, self._poll)
        self._running[started.pid] = started, child

    def _poll(self) -> None:
        for pid, (started, child) in list(self._running.items()):
            code = started.poll()
            if code is not None:
                del self._running[pid]
                # The inverse of what Popen made of the status of `waitpid`.
                child.on_reaped(-code if code < 0 else code << 8)
        if self._running:
            self._loop.call_later(_POLL_S, self._poll)
