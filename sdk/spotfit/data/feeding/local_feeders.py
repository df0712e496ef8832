"""Feeder processes beside a worker: started by it, replaced when they end."""

from __future__ import annotations

import threading
from contextlib import closing

from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.feeding.processes import FeederProcess
from spotfit.host import log

_MAX_STARTS_WITHOUT_RESULT = 3
"""How often a process is started that ends without a result: the user's function may crash it."""


class LocalFeeders:
    """`count` feeder processes that serve a pool."""

    def __init__(self, pool: FeederPool, init: FeederInit, pickled_datasets: bytes) -> None:
        self._pool = pool
        self._init = init
        self._pickled_datasets = pickled_datasets
        self._lock = threading.Lock()
        self._processes: set[FeederProcess] = set()
        self._is_closed = False

    def start(self, count: int) -> None:
        """Start `count` processes, in threads; returns at once."""
        for number in range(count):
            name = f"spotfit-feeder-{number}"
            threading.Thread(target=self._keep_running, name=name, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that serve the pool."""
        with self._lock:
            return sorted(process.pid for process in self._processes)

    def close(self) -> None:
        """Kill all processes."""
        with self._lock:
            self._is_closed = True
            processes, self._processes = self._processes, set()
        for process in processes:
            process.close()

    def _keep_running(self) -> None:
        starts = 0
        while starts < _MAX_STARTS_WITHOUT_RESULT and not self._is_closed:
            starts = 0 if self._run_process() else starts + 1
        if not self._is_closed:
            log.warning(
                "feeder.abandoned",
                reason=f"{starts} processes in a row have ended without a result; the training "
                "process executes their tasks",
            )

    def _run_process(self) -> int:
        """Start a process, and return the number of its replies once it has ended."""
        replies = 0
        try:
            with closing(FeederProcess(self._init, self._pickled_datasets)) as process:
                with closing(FeederLink(process.connect(), f"process {process.pid}")) as link:
                    if not self._add(process):
                        return 0
                    replies = self._pool.serve(link)
                reason = process.wait()
                with self._lock:
                    self._processes.discard(process)
        except OSError as error:
            reason = str(error)
        if not self._is_closed:
            log.warning("feeder.ended", reason=reason, replies=replies)
        return replies

    def _add(self, process: FeederProcess) -> bool:
        """Return False if this object is closed."""
        with self._lock:
            if not self._is_closed:
                self._processes.add(process)
            return not self._is_closed
