"""The feeders of one worker: processes beside it, and those of other machines."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.local_feeders import LocalFeeders
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.feeding.remote_feeders import RemoteFeeders
from spotfit.data.feeding.slice_feeders import PoolSliceFeeders
from spotfit.data.loading.slices import SliceReader
from spotfit.host import log, machine
from spotfit.host.system import SystemClock
from spotfit.model.topology import FeederAddress

if TYPE_CHECKING:
    from spotfit.data.plans.row_plan import ShuffledRows

_MAX_DEFAULT_PROCESSES = 8
"""Processes beside a worker by default at most; each holds the libraries of the user in memory."""
_POLL_S = 1.0
"""Interval at which the list of machines is read."""
_REPORT_S = 10.0
"""Interval at which the leader learns how long the training loop has waited for rows."""


class FeederSources(NamedTuple):
    """What a worker's session provides. The functions are called in a thread of their own."""

    read_addresses: Callable[[], Sequence[FeederAddress]]
    """Returns the machines with feeders, as the leader knows them."""
    report_wait: Callable[[float, float], None]
    """Takes for how many seconds the training loop has waited, and of how many."""
    make_tls: Callable[[], ssl.SSLContext]
    """Returns the context that proves the run key to feeders."""


class WorkerFeeders:
    """Starts feeders when a dataset with user code is opened; they end with the process.

    Args:
        pickled_datasets: What feeder processes load: an object whose `datasets` are these.
        processes: Processes beside this worker; None: one less than its share of the processors.
        max_nodes: Machines for feeders that the run has at most.
        scratch_dir: The scratch directory of the run on this machine; '' if it has none.
    """

    def __init__(
        self,
        datasets: Mapping[str, ShuffledRows],
        pickled_datasets: bytes,
        sources: FeederSources,
        *,
        processes: int | None,
        workers_of_machine: int,
        max_nodes: int,
        log_level: str = "INFO",
        scratch_dir: str = "",
    ) -> None:
        self._datasets = datasets
        self._sources = sources
        self._processes = (
            default_process_count(workers_of_machine) if processes is None else processes
        )
        self._max_nodes = max_nodes
        self._clock = SystemClock()
        reader = SliceReader(datasets)
        self.pool = FeederPool(reader.read, self._clock, prefetch=reader.prefetch)
        init = FeederInit(log_level=log_level, scratch_dir=scratch_dir)
        self._local = LocalFeeders(self.pool, init, pickled_datasets)
        self._is_started = False
        self._is_closed = threading.Event()
        self._waited_s: Callable[[], float | None] = lambda: None

    def measure_wait(self, waited_s: Callable[[], float | None]) -> None:
        """Report the differences of `waited_s()`: for how long the loop has waited in total."""
        self._waited_s = waited_s

    def open(self, name: str, dataset: ShuffledRows) -> PoolSliceFeeders | None:
        """Return the feeders of a dataset; None if this process is to transform it.

        That is without user code, and for a dataset that feeders do not know by that name, such as
        one of `DataConfig.configure`.
        """
        has_user_code = any(transform.runs_user_code for transform in dataset.transforms)
        if self._datasets.get(name) is not dataset or not has_user_code:
            return None
        if not self._is_started:
            self._is_started = True
            self._local.start(self._processes)
            if self._max_nodes:
                threading.Thread(
                    target=self._follow_machines, name="spotfit-feeders", daemon=True
                ).start()
        return PoolSliceFeeders(self.pool, name)

    def close(self) -> None:
        """End all processes and connections; datasets are then transformed by this process."""
        self._is_closed.set()
        self.pool.close()
        self._local.close()

    def _follow_machines(self) -> None:
        """Keep the connections to machines as the leader says, and report how long the loop waits.

        Runs in a thread until `close`.
        """
        remote = RemoteFeeders(self.pool, self._sources.make_tls())
        before_s, reported_at = self._waited_s(), self._clock.now()
        while not self._is_closed.wait(_POLL_S):
            remote.set_addresses(self._sources.read_addresses())
            elapsed_s = self._clock.now() - reported_at
            if elapsed_s >= _REPORT_S:
                now_s, reported_at = self._waited_s(), self._clock.now()
                # Before the first batch the loop prepares; waiting would not be of the feeders.
                if now_s is not None and before_s is not None:
                    self._sources.report_wait(max(now_s - before_s, 0.0), elapsed_s)
                before_s = now_s
        remote.close()


def default_process_count(workers_of_machine: int) -> int:
    """Return how many processes one of several workers of this machine starts by default.

    Its share of the processors, less the one of its training loop.
    """
    share = machine.cpu_count() // max(workers_of_machine, 1)
    count = max(1, min(share - 1, _MAX_DEFAULT_PROCESSES))
    log.debug("feeder.processes", count=count)
    return count
