"""AgentConnection: complete frames from any thread, and an exit without an agent."""

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from spotfit.core.codec import decoder, encode
from spotfit.protocol import framing
from spotfit.protocol.worker_agent import (
    CommitConfirmed,
    FromWorker,
    FunctionStarted,
    MetricsReport,
    RankZeroBroadcastResult,
)
from spotfit.worker.agent_connection import AgentConnection

_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, worker = socket.socketpair()
    with agent, worker:
        yield agent, worker


def receive_message(agent: socket.socket) -> FromWorker:
    body = framing.read_frame(agent)
    assert body is not None
    return _frames.decode(body)


@pytest.mark.parametrize("name", [None, 'odd "name"'])
def test_send_report_sends_the_same_message_as_send(
    ends: tuple[socket.socket, socket.socket], name: str | None
) -> None:
    agent, worker = ends
    connection = AgentConnection(worker)
    connection.send_report(3, b'{"loss":0.5}', name)
    connection.send(
        MetricsReport(
            report_index=3, metrics=msgspec.Raw(b'{"loss":0.5}'), checkpoint_dir_name=name
        )
    )
    fast, slow = receive_message(agent), receive_message(agent)
    assert isinstance(fast, MetricsReport)
    assert isinstance(slow, MetricsReport)
    assert (fast.report_index, bytes(fast.metrics), fast.checkpoint_dir_name) == (
        3,
        b'{"loss":0.5}',
        name,
    )
    assert (slow.report_index, bytes(slow.metrics), slow.checkpoint_dir_name) == (
        3,
        b'{"loss":0.5}',
        name,
    )


def test_frames_of_several_threads_are_not_interleaved(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = ends
    connection = AgentConnection(worker)
    body = b'"' + b"x" * 50_000 + b'"'

    def send_reports() -> None:
        for number in range(20):
            connection.send_report(number, body)

    threads = [threading.Thread(target=send_reports) for _ in range(4)]
    for thread in threads:
        thread.start()
    received = [receive_message(agent) for _ in range(80)]
    for thread in threads:
        thread.join()
    assert all(
        isinstance(frame, MetricsReport) and bytes(frame.metrics) == body for frame in received
    )


def test_receive_available_returns_pending_messages_without_waiting(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = ends
    connection = AgentConnection(worker)
    assert connection.receive_available() == []
    sent = [CommitConfirmed(checkpoint_name=f"c{n}", metrics={}) for n in range(3)]
    for frame in sent:
        framing.write_frame(agent, encode(frame))
    assert connection.receive_available() == sent
    assert connection.receive_available() == []


def test_receive_returns_none_after_its_timeout(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = ends
    connection = AgentConnection(worker)
    assert connection.receive(0.01) is None
    first, second = (
        RankZeroBroadcastResult(kind="barrier", seq=0),
        RankZeroBroadcastResult(kind="barrier", seq=1),
    )
    agent.sendall(framing.encode_frame(encode(first)) + framing.encode_frame(encode(second)))
    assert [connection.receive(5), connection.receive(None)] == [first, second]


@pytest.mark.parametrize("operation", ["send", "receive", "receive_available"])
def test_a_worker_exits_when_its_agent_is_gone(operation: str) -> None:
    agent, worker = socket.socketpair()
    agent.close()
    child = os.fork()
    if child == 0:
        connection = AgentConnection(worker)
        {
            "send": lambda: connection.send(FunctionStarted()),
            "receive": lambda: connection.receive(None),
            "receive_available": connection.receive_available,
        }[operation]()
        os._exit(0)
    worker.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
