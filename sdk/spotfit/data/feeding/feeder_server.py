"""The feeder processes of a machine, which serve the workers of other machines."""

from __future__ import annotations

import socket
import threading
from collections import deque

from spotfit.core.errors import ConfigError
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.processes import FeederProcess
from spotfit.host import log, machine

_BACKLOG = 1024
_CHECK_INTERVAL_S = 1.0
"""Interval at which processes that have ended are replaced."""


class FeederServer:
    """Accepts connections of workers, and passes each to one of several feeder processes."""

    def __init__(self, init: FeederInit, pickled_datasets: bytes, *, processes: int) -> None:
        """Listen on a free port of `machine.own_address()`, and start the processes.

        Raises `ConfigError` if the machine has no such address, and `OSError` for the processes.
        """
        self._init = init
        self._pickled_datasets = pickled_datasets
        host = machine.own_address()
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"The feeder on {machine.hostname()} cannot listen on {host!r}: {error}",
                do="Set SPOTFIT_HOST to an address of the machine.",
            ) from error
        self._listener.settimeout(_CHECK_INTERVAL_S)
        self._is_closed = threading.Event()
        self._processes = deque(self._start() for _ in range(processes))
        """The next connection is passed to the first one."""

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [process.pid for process in self._processes]

    def serve(self) -> None:
        """Accept connections until `close`; blocks."""
        while not self._is_closed.is_set():
            self._replace_ended_processes()
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                log.debug("feeder.accept_failed", reason=str(error))
                self._is_closed.wait(_CHECK_INTERVAL_S)
                continue
            with sock:
                self._pass(sock)

    def close(self) -> None:
        """Stop accepting connections and kill the processes."""
        self._is_closed.set()
        self._listener.close()
        for process in self._processes:
            process.close()

    def _pass(self, sock: socket.socket) -> None:
        self._processes.rotate(-1)
        try:
            self._processes[-1].pass_connection(sock)
        except OSError as error:
            # It has ended. The worker connects again.
            log.debug("feeder.connection_dropped", reason=str(error))

    def _replace_ended_processes(self) -> None:
        for index, process in enumerate(self._processes):
            if not process.is_running and not self._is_closed.is_set():
                log.warning("feeder.ended", pid=process.pid, reason=process.wait())
                process.close()
                self._processes[index] = self._start()

    def _start(self) -> FeederProcess:
        return FeederProcess(self._init, self._pickled_datasets)
