"""The event loop of a feeder process, in a thread of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfit.data.dataset import Dataset
from spotfit.data.feeding.feeder_process import PLAIN, FeederInit, FeederLoop
from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.messages import FailureReply, SliceReply
from spotfit.data.loading.slices import SliceReader
from tests.unit.data.feeding.augmented_rows import NAME, RUN_ID, Pass, RaiseAt, dataset_of

TIMEOUT_S = 30.0


class Process:
    """A feeder process whose parent is the test."""

    def __init__(self, open_reader: Callable[[], SliceReader]) -> None:
        self.control, control = socket.socketpair()
        self._thread = threading.Thread(
            target=FeederLoop(control, open_reader, None).run, daemon=True
        )
        self._thread.start()
        self._links: list[FeederLink] = []

    def connect(self) -> FeederLink:
        own, other = socket.socketpair()
        own.settimeout(TIMEOUT_S)
        with other:
            socket.send_fds(self.control, [PLAIN], [other.fileno()])
        self._links.append(FeederLink(own, "feeder"))
        return self._links[-1]

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.control.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the loop did not end with its parent"


@pytest.fixture
def start() -> Iterator[Callable[[Dataset], Process]]:
    processes: list[Process] = []

    def start_process(dataset: Dataset) -> Process:
        processes.append(Process(lambda: SliceReader({NAME: dataset})))
        return processes[-1]

    yield start_process
    for process in processes:
        process.close()


Start = Callable[[Dataset], Process]


def test_requests_of_a_connection_are_answered_in_order(start: Start) -> None:
    one_pass = Pass(dataset_of(40))
    link = start(one_pass.dataset).connect()
    for number, task in enumerate(one_pass.tasks()):
        link.send(number, task)
    for number, expected in enumerate(one_pass.expected):
        reply = link.receive()
        assert isinstance(reply, SliceReply)
        assert (reply.number, reply.table) == (number, expected)


def test_connections_are_served_in_turn(start: Start) -> None:
    one_pass = Pass(dataset_of(40))
    process = start(one_pass.dataset)
    links = [process.connect(), process.connect()]
    for number, task in enumerate(one_pass.tasks()):
        for link in links:
            link.send(number, task)
    for number in range(len(one_pass.expected)):
        assert [link.receive().number for link in links] == [number] * 2


def test_an_exception_is_the_reply_and_the_next_task_is_executed(start: Start) -> None:
    link = start(dataset_of(12, RaiseAt(5))).connect()
    one_pass = Pass(dataset_of(12, RaiseAt(-1)))
    replies = []
    for number, task in enumerate(one_pass.tasks()):
        link.send(number, task)
        replies.append(link.receive())
    failures = [one for one in replies if isinstance(one, FailureReply)]
    assert len(failures) == 1
    assert "ValueError: bad row 5" in failures[0].traceback_text
    assert len(replies) == len(one_pass.expected)


def test_datasets_that_cannot_be_loaded_are_the_reply() -> None:
    def fail() -> Any:
        raise ImportError("no module named 'tokens'")

    process = Process(fail)
    link = process.connect()
    link.send(1, next(Pass(dataset_of(12)).tasks()))
    reply = link.receive()
    assert isinstance(reply, FailureReply)
    assert "no module named 'tokens'" in reply.traceback_text
    process.close()


def test_a_connection_that_breaks_does_not_affect_others(start: Start) -> None:
    one_pass = Pass(dataset_of(40))
    process = start(one_pass.dataset)
    lost, link = process.connect(), process.connect()
    for number, task in enumerate(one_pass.tasks()):
        lost.send(number, task)
    lost.close()
    link.send(3, next(one_pass.tasks()))
    reply = link.receive()
    assert isinstance(reply, SliceReply)
    assert reply.table == one_pass.expected[0]


def test_an_invalid_request_closes_the_connection(start: Start) -> None:
    process = start(dataset_of(12))
    own, other = socket.socketpair()
    own.settimeout(TIMEOUT_S)
    with other:
        socket.send_fds(process.control, [PLAIN], [other.fileno()])
    own.sendall(b"\0\0\0\2{}")
    assert own.recv(1) == b""
    own.close()


def test_the_key_is_not_shown() -> None:
    assert "hush" not in repr(FeederInit(secret="hush", run_id=RUN_ID))
