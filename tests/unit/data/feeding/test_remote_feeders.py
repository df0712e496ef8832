"""Workers and feeders of other machines, connected by TLS over loopback."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from spotfit.data.dataset import Dataset
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.feeder_server import FeederServer
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.feeding.remote_feeders import RemoteFeeders
from spotfit.data.loading.slices import SliceReader
from spotfit.host import env
from spotfit.host.system import SystemClock
from spotfit.model.topology import FeederAddress
from spotfit.security.run_key import RunKey, make_tls_contexts
from tests.unit.data.feeding.augmented_rows import NAME, RUN_ID, Pass, dataset_of, shipped
from tests.unit.data.feeding.test_local_feeders import execute_nothing, read_pass, wait_until

pytestmark = pytest.mark.real_time("starts processes")
SECRET = RunKey(b"k" * 32, RUN_ID).to_text()
OTHER_SECRET = RunKey(b"o" * 32, RUN_ID).to_text()

StartServer = Callable[..., FeederServer]


@pytest.fixture
def start_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServer]:
    monkeypatch.setenv(env.HOST.name, "127.0.0.1")
    servers: list[FeederServer] = []

    def start(dataset: Dataset, processes: int = 1) -> FeederServer:
        init = FeederInit(secret=SECRET, run_id=RUN_ID)
        pickled = cloudpickle.dumps(shipped(dataset))
        servers.append(FeederServer(init, pickled, processes=processes))
        threading.Thread(target=servers[-1].serve, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Worker:
    """A pool with connections to the feeders of other machines."""

    def __init__(self, dataset: Dataset | None = None, secret: str = SECRET) -> None:
        execute = execute_nothing if dataset is None else SliceReader({NAME: dataset}).read
        self.pool = FeederPool(execute, SystemClock())
        self.remote = RemoteFeeders(self.pool, make_tls_contexts(secret, RUN_ID).client)

    def use(self, *servers: FeederServer, connections: int = 1) -> None:
        self.remote.set_addresses(
            [FeederAddress(address=one.address, connections=connections) for one in servers]
        )


@pytest.fixture
def connect() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def create(*arguments: object, **options: object) -> Worker:
        workers.append(Worker(*arguments, **options))  # type: ignore[arg-type]
        return workers[-1]

    yield create
    for worker in workers:
        worker.pool.close()
        worker.remote.close()


def test_several_workers_get_equal_slices(
    start_server: StartServer, connect: Callable[..., Worker]
) -> None:
    dataset = dataset_of(120)
    server, one_pass = start_server(dataset), Pass(dataset)
    for worker in (connect(), connect()):
        worker.use(server)
        wait_until(lambda: worker.pool.feeder_count == 1)  # noqa: B023 - called in this iteration
        assert read_pass(worker.pool, one_pass) == one_pass.expected


def test_results_are_equal_while_processes_and_a_machine_are_killed(
    start_server: StartServer, connect: Callable[..., Worker], rng: random.Random
) -> None:
    dataset = dataset_of(600)
    one_pass = Pass(dataset, seed=rng.randrange(2**32))
    servers = [start_server(dataset), start_server(dataset, processes=2)]
    worker = connect(dataset)
    worker.use(*servers, connections=2)
    wait_until(lambda: worker.pool.feeder_count == 4)
    steps = iter(range(len(one_pass.expected)))

    def kill_some() -> None:
        step = next(steps)
        if step == 60:
            servers[0].close()
        if step % 20 == 10:
            pid = rng.choice(servers[1].pids)
            with contextlib.suppress(ProcessLookupError):  # it is being replaced
                os.kill(pid, signal.SIGKILL)

    assert read_pass(worker.pool, one_pass, kill_some) == one_pass.expected


def test_a_killed_process_is_replaced_and_connected_again(
    start_server: StartServer, connect: Callable[..., Worker]
) -> None:
    dataset = dataset_of(30)
    server, worker = start_server(dataset), connect()
    worker.use(server)
    wait_until(lambda: worker.pool.feeder_count == 1)
    (pid,) = server.pids
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pids != [pid])
    wait_until(lambda: worker.pool.feeder_count == 1)


def test_a_machine_that_is_not_listed_any_more_is_disconnected(
    start_server: StartServer, connect: Callable[..., Worker]
) -> None:
    worker = connect()
    worker.use(start_server(dataset_of(30)))
    wait_until(lambda: worker.pool.feeder_count == 1)
    worker.use()
    wait_until(lambda: worker.pool.feeder_count == 0)


def test_a_worker_with_another_key_gets_nothing(
    start_server: StartServer, connect: Callable[..., Worker]
) -> None:
    server = start_server(dataset_of(30))
    other, worker = connect(secret=OTHER_SECRET), connect()
    other.use(server)
    worker.use(server)
    wait_until(lambda: worker.pool.feeder_count == 1)
    assert other.pool.feeder_count == 0


def test_a_connection_that_sends_nothing_delays_no_worker(
    start_server: StartServer, connect: Callable[..., Worker]
) -> None:
    dataset = dataset_of(30)
    server, worker = start_server(dataset), connect()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        worker.use(server)
        wait_until(lambda: worker.pool.feeder_count == 1)
        one_pass = Pass(dataset)
        assert read_pass(worker.pool, one_pass) == one_pass.expected
