"""Starts feeder processes: beside a worker, and on a machine for feeders."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from spotfit.core.codec import encode
from spotfit.data.feeding.feeder_process import PLAIN, TLS, FeederInit
from spotfit.data.feeding.messages import send_bytes
from spotfit.host import env

_PROGRAM = (
    "import sys; from spotfit.data.feeding.feeder_process import main; main(int(sys.argv[1]))"
)
_EXIT_TIMEOUT_S = 5.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""The last two take precedence over the first, where a library reads them."""


class FeederProcess:
    """A running feeder process, seen from its parent.

    It is spawned, not forked: the parent has threads, and may have initialized an accelerator.
    """

    def __init__(self, init: FeederInit, pickled_datasets: bytes) -> None:
        """Start the process and send it the datasets. Raises `OSError` if that fails."""
        self._control, child_end = socket.socketpair()
        with child_end:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own program
                    [sys.executable, "-c", _PROGRAM, str(child_end.fileno())],
                    pass_fds=[child_end.fileno()],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                self._control.close()
                raise
        try:
            send_bytes(self._control, encode(init))
            send_bytes(self._control, pickled_datasets)
        except OSError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """Return a connection to the process. Raises `OSError` if it has ended."""
        own, child_end = socket.socketpair()
        with child_end:
            try:
                socket.send_fds(self._control, [PLAIN], [child_end.fileno()])
            except OSError:
                own.close()
                raise
        return own

    def pass_connection(self, accepted: socket.socket) -> None:
        """Let the process serve a connection of another machine; the caller closes its copy.

        Raises `OSError` if the process has ended.
        """
        socket.send_fds(self._control, [TLS], [accepted.fileno()])

    def wait(self) -> str:
        """Wait for the end of a process without a connection; return its exit code.

        It is killed if it does not end, such as one that hangs.
        """
        try:
            return f"exit code {self._process.wait(_EXIT_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            self.close()
            return "killed: its connection was closed and it did not exit"

    def close(self) -> None:
        """Kill the process: it holds nothing that is needed. Harmless if repeated."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """The environment of this process, whose imports also the child finds.

    Without accelerators: their memory belongs to the training. With one thread for each library,
    because there are as many processes as processors; what the worker has set is for its training.
    """
    return {
        **env.copy_environment(),
        **_ONE_THREAD,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",
    }
