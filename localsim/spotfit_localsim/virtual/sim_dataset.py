"""A simulated rank's shard: the production code of `spotfit.data`, with threads in virtual time.

Shards, positions, orders, readers, and the pool of feeders with its connections are those of
production. Simulated are the source of the rows, the links to feeders, and time.
"""

from __future__ import annotations

import shutil
import ssl
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from spotfit.data.data_config import DataConfig
from spotfit.data.dataset import Dataset
from spotfit.data.feeding import local_feeders, pool, remote_feeders, worker_feeders
from spotfit.data.feeding.messages import FailureReply, SliceReply
from spotfit.data.feeding.worker_feeders import FeederSources, WorkerFeeders
from spotfit.data.iteration import batch_passes, prefetching
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup
from spotfit.data.loading import task_pool
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader
from spotfit.data.order import OrderSettings
from spotfit.data.rank_shards import DatasetShards, TrainerDatasets
from spotfit.data.source import SourceUnits, int_array
from spotfit.model.spec import FeederSpec
from spotfit.model.topology import FeederAddress
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.virtual.engine import Engine, SequentialExecutor, patched_attribute
from spotfit_localsim.virtual.sim_feeders import SimFeederConnection, SimFeederNode
from spotfit_localsim.virtual.sim_threads import SimThreading, ThreadGroup
from spotfit_localsim.virtual.trained_rows import DATASET, RankBatch, TrainedRows, table_rows
from spotfit_localsim.virtual.workload import DatasetWorkload

T = TypeVar("T")
_CONNECT_S = (0.001, 0.05)
_CONNECT_TIMEOUT_S = 10.0
# An epoch has a batch, and a pass after a resume may be empty.
_MAX_EMPTY_PASSES = 3


@dataclass(frozen=True, slots=True)
class SimRows:
    """A source of numbered rows in memory."""

    unit_rows: tuple[int, ...]
    row_bytes: int

    identity = "simulated rows"

    def list_units(self) -> SourceUnits:
        rows = np.array(self.unit_rows, dtype=np.int64)
        return SourceUnits(
            files=(),
            unit_files=int_array(np.zeros(len(rows), dtype=np.int64)),
            unit_positions=int_array(np.cumsum(rows) - rows),
            unit_rows=int_array(rows),
            unit_bytes=int_array(rows * self.row_bytes),
        )

    def schema(self, units: SourceUnits) -> pa.Schema:
        return pa.schema({"id": pa.int64(), "value": pa.float64()})

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        first = int(units.unit_positions[unit])
        ids = np.arange(first, first + self.unit_rows[unit])
        table = pa.table({"id": ids, "value": ids * 0.5})
        return table if columns is None else table.select(list(columns))


def add_noise(batch: dict[str, Any]) -> dict[str, Any]:
    """Replace the values by numbers of a global generator."""
    return {"id": batch["id"], "value": np.random.standard_normal(len(batch["id"]))}


def negate(batch: dict[str, Any]) -> dict[str, Any]:
    """Change the values, as a function that is worth a cache does."""
    return {"id": batch["id"], "value": -batch["value"]}


def open_dataset(plan: DatasetWorkload, cache_directory: Path | None = None) -> Dataset:
    """Return the dataset that the training function gets, with its cache if there is a directory.

    Rows and order do not depend on the cache.
    """
    dataset = Dataset.of_source(SimRows(plan.unit_rows, plan.row_bytes))
    if plan.cache is not None:
        dataset = dataset.map_batches(negate)
        if cache_directory is not None:
            limits = plan.cache.memory_bytes, plan.cache.disk_bytes
            dataset = dataset.cache(
                memory_bytes=limits[0],
                disk_bytes=limits[1],
                directory=cache_directory if limits[1] else None,
            )
    if plan.shuffle == "units":
        dataset = dataset.randomize_block_order()
    elif plan.shuffle == "rows":
        dataset = dataset.random_shuffle()
    return dataset.map_batches(add_noise) if plan.augments else dataset


class SimDataset:
    """The dataset of a simulated training, and what all of its ranks share."""

    def __init__(
        self,
        plan: DatasetWorkload,
        engine: Engine,
        *,
        stream: RandomStream,
        world_sizes: tuple[int, ...],
        report_violation: Callable[[str], None],
        is_reachable: Callable[[str, str], bool],
        feeder_nodes: Mapping[str, SimFeederNode],
    ) -> None:
        """`feeder_nodes` are the running feeders, by address."""
        self.plan = plan
        self.rows = open_dataset(plan)
        self.group = ShardGroup(world_sizes=world_sizes, seed=plan.seed)
        self.report_violation = report_violation
        self.threads = SimThreading(engine)
        self.history = TrainedRows(self.rows, plan, self.group, report_violation=report_violation)
        self._engine = engine
        self._stream = stream
        self._is_reachable = is_reachable
        self._feeder_nodes = feeder_nodes
        self._thread_groups: list[ThreadGroup] = []
        self._caches = _temporary_directory(self) if plan.cache is not None else None
        self.slices_of_feeders = 0

    def create_shard(
        self, host: str, *, rank: int, world_size: int, resume_worker: Callable[[], None]
    ) -> SimShard:
        """Create the shard of a new worker process."""
        threads = ThreadGroup(self._engine, host)
        self._thread_groups.append(threads)
        group = replace(self.group, rank=rank, world_size=world_size)
        return SimShard(self, self._open_rows(host), group, threads, resume_worker)

    def _open_rows(self, machine: str) -> Dataset:
        """Return the rows as a new process of a machine opens them."""
        if self._caches is None:
            return self.rows
        assert self.plan.cache is not None
        directory = self._caches / machine.replace("/", "_")
        for path in sorted(directory.glob("*/*/*")):
            if path.name != "lock" and self._stream.bernoulli(self.plan.cache.damage_probability):
                self._damage(path)
        return open_dataset(self.plan, directory)

    def _damage(self, path: Path) -> None:
        content = path.read_bytes()
        if not content:  # truncated before, by a process that never read it
            return
        place = self._stream.randrange(len(content))
        match self._stream.choice(["flip", "truncate", "delete"]):
            case "flip":
                flipped = bytes([content[place] ^ 1])
                path.write_bytes(content[:place] + flipped + content[place + 1 :])
            case "truncate":
                path.write_bytes(content[:place])
            case _:
                path.unlink()

    def close(self) -> None:
        """Release all threads at the end of the simulation."""
        for group in self._thread_groups:
            group.discard()

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Patch the production code inside the context: threads and clocks in virtual time."""
        module = self.threads.as_module()
        # Tasks run inside the call that submits them, which holds the lock of its pool.
        reentrant = SimpleNamespace(Lock=threading.RLock, main_thread=threading.main_thread)
        machine = remote_feeders._Machine  # noqa: SLF001 - replaced by itself
        with ExitStack() as stack:
            for target, name, replacement in (
                (task_pool, "ThreadPoolExecutor", SequentialExecutor),
                (task_pool, "threading", reentrant),
                (prefetching, "_TaskThread", _SequentialThread),
                (batch_passes, "SystemClock", self._create_clock),
                (worker_feeders, "SystemClock", self._create_clock),
                (worker_feeders, "threading", module),
                (local_feeders, "threading", module),
                (pool, "threading", module),
                (remote_feeders, "threading", module),
                # Its default has the real event, from when the class was created.
                (remote_feeders, "_Machine", lambda at: machine(at, is_unwanted=module.Event())),
                (remote_feeders, "_connect", self._connect),
                (remote_feeders, "FeederLink", _SimFeederLink),
            ):
                stack.enter_context(patched_attribute(target, name, replacement))
            yield

    def _create_clock(self) -> SimpleNamespace:
        return SimpleNamespace(now=lambda: self._engine.now)

    def _connect(self, address: str, _tls: object) -> SimFeederConnection:
        """Connect the worker of the running thread to the feeders of a machine."""
        group, faults = self.threads.group, self.plan.feeders
        self.threads.sleep(self._stream.uniform_in(_CONNECT_S))
        if not self._is_reachable(group.host, address):
            self.threads.sleep(_CONNECT_TIMEOUT_S)
            raise TimeoutError(f"{address} does not answer")
        if (node := self._feeder_nodes.get(address)) is None:
            raise ConnectionRefusedError(f"{address} has no feeders")
        connection = SimFeederConnection(
            self._engine,
            self.threads,
            partial(self._is_reachable, group.host, address),
            # Each feeder has its own caches, which are lost with it.
            partial(self._execute, SliceReader({DATASET: self._open_rows(address)})),
            stream=self._stream,
            faults=faults,
        )
        node.connections.append(connection)
        group.exit_listeners.append(connection.close)
        return connection

    def _execute(
        self, reader: SliceReader, number: int, task: SliceTask
    ) -> SliceReply | FailureReply:
        if self._stream.bernoulli(self.plan.feeders.failure_probability):
            return FailureReply(number, "simulated error in a feeder")
        table = reader.read(task)
        self.slices_of_feeders += 1
        return SliceReply(number, table, table.nbytes)


def _temporary_directory(owner: object) -> Path:
    """Return a directory that is removed with its owner."""
    path = mkdtemp(prefix="spotfit-sim-")
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _make_tls() -> ssl.SSLContext:
    """Return a context that no connection uses."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _SimFeederLink:
    """Replaces `FeederLink`."""

    def __init__(self, connection: SimFeederConnection, name: str) -> None:
        self.name = name
        self.send = connection.send
        self.receive = connection.receive
        self.check_idle = connection.check
        self.close = connection.close


class _SequentialThread(SequentialExecutor):
    """Replaces the thread of `prefetching`: calls run when they are submitted."""

    def close(self) -> None:
        pass


class SimShard:
    """The shard of one worker process, which reads batch by batch.

    The methods that return generators yield while the worker has to wait.
    """

    def __init__(
        self,
        shared: SimDataset,
        rows: Dataset,
        group: ShardGroup,
        threads: ThreadGroup,
        resume_worker: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._rows = rows
        self._group = group
        self._threads = threads
        self._resume_worker = resume_worker
        self._shards: DatasetShards | None = None
        self._iterator: DataIterator | None = None
        self._batches: Iterator[dict[str, Any]] | None = None
        self.feeders: tuple[FeederAddress, ...] = ()
        """The machines with feeders, as the leader says."""

    def open(
        self,
        read_positions: Callable[[], Mapping[str, Mapping[str, Any]]],
        feeders: FeederSpec | None,
        report_wait: Callable[[float, float], None],
    ) -> Generator[None, None, None]:
        """Open the shard, as `get_dataset_shard` does.

        `read_positions` returns the positions of the checkpoint from which the round has started.
        """
        shared = self._shared

        def open_shards() -> None:
            datasets = {DATASET: self._rows}
            worker_feeders_ = None
            if feeders is not None:
                worker_feeders_ = WorkerFeeders(
                    datasets,
                    b"",
                    FeederSources(lambda: self.feeders, report_wait, make_tls=_make_tls),
                    processes=0,
                    workers_of_machine=1,
                    max_nodes=feeders.max_nodes,
                )
            self._shards = DatasetShards(
                TrainerDatasets(datasets, DataConfig()),
                self._group,
                read_positions,
                feeders=worker_feeders_,
            )
            self._iterator = self._shards.get(DATASET)
            self._iterator.position.counts_steps = shared.plan.counts_steps

        yield from self._call(open_shards)

    def next_batch(self) -> Generator[None, None, RankBatch]:
        """Return the rows of the next step, also of the next epoch."""
        return (yield from self._call(self._next_batch))

    def count_step(self) -> None:
        """Count the oldest batch that does not count yet, as `Checkpointer(loader=shard)` does."""
        if self._shared.plan.counts_steps:
            assert self._iterator is not None
            self._iterator.position.count_step()

    def positions(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint contains of the dataset."""
        return self._shards.positions() if self._shards is not None else {}

    def resume(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue at the positions of a snapshot that was restored, with a new pass."""
        assert self._shards is not None
        self._batches = None
        self._shards.resume(positions)

    def close(self) -> None:
        """The process ends."""
        self._threads.end()

    def _call(self, function: Callable[[], T]) -> Generator[None, None, T]:
        """Call a function, which may wait, in a thread of the worker."""
        results: list[T] = []

        def run() -> None:
            try:
                results.append(function())
            except Exception:  # noqa: BLE001  # reported: the run must not fail
                self._shared.report_violation(
                    f"rank {self._group.rank} cannot read its shard: {traceback.format_exc()}"
                )
            self._resume_worker()

        self._shared.threads.run(self._threads, run)
        while not results:
            yield None
        return results[0]

    def _next_batch(self) -> RankBatch:
        assert self._iterator is not None
        for _ in range(_MAX_EMPTY_PASSES):
            if self._batches is None:
                self._batches = iter(self._iterator.iter_batches(**self._batch_options()))
            batch = next(self._batches, None)
            if batch is not None:
                state = self._iterator.position.state()
                order = OrderSettings(**{name: state[name] for name in OrderSettings._fields})
                return RankBatch(state["epoch"], order, tuple(table_rows(batch)))
            self._batches = None
        raise AssertionError(f"{_MAX_EMPTY_PASSES} passes without a batch")

    def _batch_options(self) -> dict[str, Any]:
        plan = self._shared.plan
        return {
            "global_batch_size" if plan.is_global else "batch_size": plan.batch_rows,
            "prefetch_batches": plan.prefetch_batches,
            "drop_last": plan.drop_last,
            "local_shuffle_buffer_size": plan.buffer_rows,
        }
