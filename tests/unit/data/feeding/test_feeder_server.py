"""The processes of a machine for feeders."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.feeding import feeder_server
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.feeder_server import FeederServer
from spotfit.data.feeding.processes import FeederProcess
from spotfit.host import env
from tests.unit.data.feeding.augmented_rows import RUN_ID, dataset_of, shipped
from tests.unit.data.feeding.test_local_feeders import FastClock, wait_until

pytestmark = pytest.mark.real_time("starts processes")

LIMIT = feeder_server._MAX_FAILED_STARTS
INIT = FeederInit(secret="", run_id=RUN_ID)


def pickled_datasets() -> bytes:
    pickled: bytes = cloudpickle.dumps(shipped(dataset_of(3)))
    return pickled


def test_the_address_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.HOST.name, "127.0.0.1")
    server = FeederServer(INIT, pickled_datasets(), processes=2)
    try:
        host, _, port = server.address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert len(set(server.pids)) == 2
    finally:
        server.close()


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.HOST.name, "127.0.0.256")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_args, **_options: [(2,)])
    with pytest.raises(ConfigError, match=r"cannot listen on '127\.0\.0\.256'"):
        FeederServer(INIT, pickled_datasets(), processes=1)


class Failures:
    """Lets the next starts of processes fail."""

    def __init__(self) -> None:
        self.count = 0
        self.processes: list[FeederProcess] = []

    def start(self, init: FeederInit, pickled: bytes) -> FeederProcess:
        if self.count:
            self.count -= 1
            raise BlockingIOError("no memory for a process")
        self.processes.append(FeederProcess(init, pickled))
        return self.processes[-1]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failures]:
    monkeypatch.setenv(env.HOST.name, "127.0.0.1")
    monkeypatch.setattr(feeder_server, "_CHECK_INTERVAL_S", 0.01)
    failures = Failures()
    monkeypatch.setattr(feeder_server, "FeederProcess", failures.start)
    yield failures
    for process in failures.processes:
        process.close()


StartServer = Callable[[], FeederServer]


@pytest.fixture
def start_server(failures: Failures) -> Iterator[StartServer]:
    """Start a server whose only process has been killed."""
    servers: list[FeederServer] = []

    def start() -> FeederServer:
        servers.append(FeederServer(INIT, pickled_datasets(), processes=1, clock=FastClock()))
        os.kill(servers[-1].pids[0], signal.SIGKILL)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_process_that_cannot_be_replaced_is_started_again_after_growing_pauses(
    failures: Failures, start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    (pid,) = server.pids
    failures.count = LIMIT - 1
    thread = threading.Thread(target=server.serve)
    thread.start()
    wait_until(lambda: server.pids != [pid])
    server.close()
    thread.join()
    pauses = [record.pause_s for record in caplog.records if "start_failed" in record.getMessage()]  # type: ignore[attr-defined]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]


def test_a_process_that_cannot_be_replaced_for_minutes_is_an_error(
    failures: Failures, start_server: StartServer
) -> None:
    server = start_server()
    failures.count = LIMIT
    with pytest.raises(BlockingIOError, match="no memory for a process"):
        server.serve()
    assert failures.count == 0


def test_a_replacement_that_hangs_does_not_delay_the_close(
    failures: Failures, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    is_starting, may_end = threading.Event(), threading.Event()

    def start(init: FeederInit, pickled: bytes) -> FeederProcess:
        is_starting.set()
        may_end.wait()
        return failures.start(init, pickled)

    monkeypatch.setattr(feeder_server, "FeederProcess", start)
    serving, closing = threading.Thread(target=server.serve), threading.Thread(target=server.close)
    serving.start()
    is_starting.wait()
    closing.start()
    closing.join(10)
    was_closed = not closing.is_alive()
    may_end.set()
    serving.join()
    closing.join()
    assert was_closed
    assert not failures.processes[-1].is_running


def test_a_server_without_a_process_leaves_no_socket_or_other_process(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners: list[socket.socket] = []
    create_server = socket.create_server

    def recorded(*arguments: object, **options: object) -> socket.socket:
        listeners.append(create_server(*arguments, **options))  # type: ignore[arg-type]
        return listeners[-1]

    class SecondFails(Failures):
        def start(self, init: FeederInit, pickled: bytes) -> FeederProcess:
            self.count = len(self.processes)
            return super().start(init, pickled)

    second_fails = SecondFails()
    monkeypatch.setattr(socket, "create_server", recorded)
    monkeypatch.setattr(feeder_server, "FeederProcess", second_fails.start)
    with pytest.raises(BlockingIOError):
        FeederServer(INIT, pickled_datasets(), processes=2)
    assert listeners[0].fileno() == -1
    assert not second_fails.processes[0].is_running
