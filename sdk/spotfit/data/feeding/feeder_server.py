"""The feeder processes of a machine, which serve the workers of other machines."""

from __future__ import annotations

import socket
import threading
from collections import deque

from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.clock import Clock
from spotfit.core.errors import ConfigError
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.processes import FeederProcess
from spotfit.host import log, machine
from spotfit.host.system import SystemClock

_BACKLOG = 1024
_CHECK_INTERVAL_S = 1.0
"""Interval at which processes that have ended are replaced."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
"""Pauses after failed starts of a process, such as without memory; doubled after each."""
_MAX_FAILED_STARTS = 8
"""Failed starts in a row after which `serve` raises the error: two minutes."""


class FeederServer:
    """Accepts connections of workers, and passes each to one of several feeder processes."""

    def __init__(
        self,
        init: FeederInit,
        pickled_datasets: bytes,
        *,
        processes: int,
        clock: Clock | None = None,
    ) -> None:
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
        self._lock = threading.Lock()
        self._clock = clock or SystemClock()
        self._failed_starts = 0
        self._next_start_at = self._clock.now()
        self._processes: deque[FeederProcess] = deque()
        """The next connection is passed to the first one."""
        try:
            for _ in range(processes):
                self._processes.append(self._start())
        except OSError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        with self._lock:
            return [process.pid for process in self._processes]

    def serve(self) -> None:
        """Accept connections until `close`; blocks.

        Processes that end are replaced. Raises `OSError` if none could be started several times in
        a row, with growing pauses in which the other processes serve.
        """
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
        with self._lock:
            for process in self._processes:
                process.close()

    def _pass(self, sock: socket.socket) -> None:
        with self._lock:
            self._processes.rotate(-1)
            process = self._processes[-1]
        try:
            process.pass_connection(sock)
        except OSError as error:
            # It has ended. The worker connects again.
            log.debug("feeder.connection_dropped", reason=str(error))

    def _replace_ended_processes(self) -> None:
        if self._clock.now() < self._next_start_at:
            return
        # Only this thread replaces processes. It starts them without the lock, for which `close`
        # waits: a process that hangs does not read its datasets.
        for process in [process for process in self._processes if not process.is_running]:
            if self._is_closed.is_set():
                return
            try:
                started = self._start()
            except OSError as error:
                self._count_failed_start(error)
                return
            with self._lock:
                if not self._is_closed.is_set():
                    self._processes[self._processes.index(process)] = started
            if self._is_closed.is_set():
                started.close()
                return
            self._failed_starts = 0
            log.warning("feeder.ended", pid=process.pid, reason=process.wait())
            process.close()

    def _count_failed_start(self, error: OSError) -> None:
        """Set when to try again. Raises the error at the limit."""
        pause_s = exponential_backoff_s(
            self._failed_starts, shortest_s=_MIN_PAUSE_S, longest_s=_MAX_PAUSE_S
        )
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise error
        self._next_start_at = self._clock.now() + pause_s
        log.warning("feeder.start_failed", reason=str(error), pause_s=pause_s)

    def _start(self) -> FeederProcess:
        return FeederProcess(self._init, self._pickled_datasets)
