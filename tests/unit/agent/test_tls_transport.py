"""Tests of the TLS transport: order, losses, and rejected connections."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    LeaderDisconnected,
    LeaderMessageReceived,
)
from spotfit.agent.tls_transport import TlsTransport
from spotfit.core.errors import ConfigError
from spotfit.core.ids import AgentId
from spotfit.host.event_loop import EventLoop
from spotfit.protocol.agent_leader import (
    AbortRound,
    ConnectionHeartbeat,
    JoinRejected,
    JournalEntryCopy,
    WorkersStopped,
)
from tests.unit.agent.transports import (
    OTHER_SECRET,
    RUN,
    SkippableClock,
    make_join,
    make_net,
    run_loop_until,
    wait_for_events,
)
from tests.unit.host.descriptors import no_free_descriptors

B = AgentId("b")


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop(SkippableClock())
    yield loop
    loop.close()


@pytest.fixture
def leader(loop: EventLoop) -> Iterator[TlsTransport]:
    net = make_net(loop)
    yield net
    net.close()


@pytest.fixture
def agent(loop: EventLoop) -> Iterator[TlsTransport]:
    net = make_net(loop)
    yield net
    net.close()


@pytest.fixture
def joined(loop: EventLoop, leader: TlsTransport, agent: TlsTransport) -> None:
    agent.connect(leader.address, make_join("b"))
    assert wait_for_events(loop, leader) == [AgentMessageReceived(B, make_join("b"))]


def open_socket(leader: TlsTransport) -> socket.socket:
    host, _, port = leader.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def is_rejected(loop: EventLoop, socket_: socket.socket) -> bool:
    """Whether the leader closes the connection, possibly after a TLS alert."""
    socket_.settimeout(0)
    over = False

    def closed() -> bool:
        nonlocal over
        try:
            over = socket_.recv(4096) == b""
        except BlockingIOError:
            over = False
        except ConnectionResetError:
            over = True
        return over

    run_loop_until(loop, closed)
    return over


# --- accepted connections --------------------------------------------------------------------


@pytest.mark.usefixtures("joined")
def test_messages_arrive_in_order_both_ways(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    for number in range(500):
        agent.send_to_leader(WorkersStopped(round=number))
        leader.send_to_agent(B, AbortRound(round=number))
    assert wait_for_events(loop, leader, 500) == [
        AgentMessageReceived(B, WorkersStopped(round=n)) for n in range(500)
    ]
    assert wait_for_events(loop, agent, 500) == [
        LeaderMessageReceived(AbortRound(round=n)) for n in range(500)
    ]


@pytest.mark.usefixtures("joined")
def test_a_message_bigger_than_any_buffer_arrives(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    entry_copy = JournalEntryCopy(slot=1, body=b"x" * 3_000_000)
    leader.send_to_agent(B, entry_copy)
    assert wait_for_events(loop, agent) == [LeaderMessageReceived(entry_copy)]


@pytest.mark.usefixtures("joined")
def test_a_lost_agent_is_reported_once(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    agent.close()
    (lost,) = wait_for_events(loop, leader)
    assert isinstance(lost, AgentDisconnected)
    assert lost.agent == B
    leader.send_to_agent(B, ConnectionHeartbeat())
    loop.run_once(0)
    assert leader.drain_events() == []


@pytest.mark.usefixtures("joined")
def test_a_lost_leader_is_reported_once_as_closed_by_peer(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    leader.close()
    (lost,) = wait_for_events(loop, agent)
    assert isinstance(lost, LeaderDisconnected)
    assert (lost.address, lost.closed_by_peer) == (leader.address, True)
    agent.send_to_leader(ConnectionHeartbeat())
    assert agent.drain_events() == []


@pytest.mark.usefixtures("joined")
def test_disconnect_reports_no_event(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    agent.disconnect()
    wait_for_events(loop, leader)
    assert agent.drain_events() == []


@pytest.mark.usefixtures("joined")
def test_a_disconnected_agent_receives_earlier_messages(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    leader.send_to_agent(B, JoinRejected(reason="not_leading"))
    leader.disconnect_agent(B)
    rejection, lost = wait_for_events(loop, agent, 2)
    assert rejection == LeaderMessageReceived(JoinRejected(reason="not_leading"))
    assert isinstance(lost, LeaderDisconnected)
    assert leader.drain_events() == []


@pytest.mark.usefixtures("joined")
def test_a_second_connection_of_an_agent_replaces_the_first(
    loop: EventLoop, leader: TlsTransport
) -> None:
    again = make_net(loop)
    again.connect(leader.address, make_join("b"))
    lost, back = wait_for_events(loop, leader, 2)
    assert isinstance(lost, AgentDisconnected)
    assert back == AgentMessageReceived(B, make_join("b"))
    again.close()


def test_a_refused_connection_is_closed_by_peer(loop: EventLoop, agent: TlsTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    agent.connect(address, make_join("b"))
    (lost,) = wait_for_events(loop, agent)
    assert isinstance(lost, LeaderDisconnected)
    assert (lost.address, lost.closed_by_peer) == (address, True)


def test_a_connect_timeout_is_not_closed_by_peer(loop: EventLoop, agent: TlsTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        agent.connect(f"127.0.0.1:{mute.getsockname()[1]}", make_join("b"))
        loop.run_once(0)
        skip(loop, 5.1)
        (lost,) = wait_for_events(loop, agent)
    assert isinstance(lost, LeaderDisconnected)
    assert not lost.closed_by_peer


def test_host_names_are_not_resolved(loop: EventLoop, agent: TlsTransport) -> None:
    agent.connect("a-name.localhost:1", make_join("b"))
    (lost,) = agent.drain_events()
    assert isinstance(lost, LeaderDisconnected)
    assert not lost.closed_by_peer


def test_a_connection_to_itself_is_in_memory(loop: EventLoop, leader: TlsTransport) -> None:
    leader.connect(leader.address, make_join("b"))
    leader.send_to_leader(ConnectionHeartbeat())
    leader.send_to_agent(B, AbortRound(round=1))
    assert leader.has_events
    assert leader.drain_events() == [
        AgentMessageReceived(B, make_join("b")),
        AgentMessageReceived(B, ConnectionHeartbeat()),
        LeaderMessageReceived(AbortRound(round=1)),
    ]
    leader.disconnect_agent(B)
    leader.send_to_leader(ConnectionHeartbeat())
    assert [type(event) for event in leader.drain_events()] == [LeaderDisconnected]
    assert not leader.has_events


def test_a_port_in_use_raises_config_error(loop: EventLoop, leader: TlsTransport) -> None:
    port = int(leader.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        TlsTransport(loop, secret=OTHER_SECRET, run_id=RUN, host="127.0.0.1", port=port)


# --- rejected connections --------------------------------------------------------------------


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: leader\r\n\r\n",
        b"\x00" * 4096,
        struct.pack(">I", 2**31) + b"x" * 100,
        bytes(range(256)) * 64,
    ],
    ids=["plain text", "zeros", "a frame without TLS", "garbage"],
)
def test_a_connection_without_tls_is_rejected(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, sent: bytes
) -> None:
    with open_socket(leader) as socket_:
        socket_.sendall(sent)
        assert is_rejected(loop, socket_)
    agent.send_to_leader(ConnectionHeartbeat())
    assert wait_for_events(loop, leader) == [AgentMessageReceived(B, ConnectionHeartbeat())]


def test_the_key_of_another_run_is_rejected(loop: EventLoop, leader: TlsTransport) -> None:
    socket_ = make_net(loop, secret=OTHER_SECRET)
    socket_.connect(leader.address, make_join("b"))
    (lost,) = wait_for_events(loop, socket_)
    assert isinstance(lost, LeaderDisconnected)
    assert leader.drain_events() == []
    socket_.close()


def test_a_join_for_another_run_is_rejected(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport
) -> None:
    agent.connect(leader.address, make_join("b", run="another"))
    assert wait_for_events(loop, agent, 2)[0] == LeaderMessageReceived(
        JoinRejected(reason="other_run")
    )
    assert leader.drain_events() == []


def test_a_first_frame_that_is_not_a_join_is_rejected(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spotfit.agent.tls_transport.encode", lambda _: json.dumps({"type": "beat"}).encode()
    )
    agent.connect(leader.address, make_join("b"))
    (lost,) = wait_for_events(loop, agent)
    assert isinstance(lost, LeaderDisconnected)
    assert leader.drain_events() == []


@pytest.mark.usefixtures("joined")
def test_an_invalid_message_disconnects_the_agent(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.agent.tls_transport.encode", lambda _: b'{"type":"unheard_of"}')
    agent.send_to_leader(ConnectionHeartbeat())
    (lost,) = wait_for_events(loop, leader)
    assert isinstance(lost, AgentDisconnected)
    assert "unheard_of" in lost.reason


def test_a_connection_without_join_times_out(loop: EventLoop, leader: TlsTransport) -> None:
    with open_socket(leader) as socket_:
        loop.run_once(1)
        skip(loop, 5.1)
        assert is_rejected(loop, socket_)


def test_a_frame_above_the_limit_ends_the_connection(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spotfit.agent.tls_transport.encode_frame",
        lambda body: struct.pack(">I", 65 * 2**20) + body,
    )
    agent.connect(leader.address, make_join("b"))
    assert [type(event) for event in wait_for_events(loop, agent)] == [LeaderDisconnected]
    assert leader.drain_events() == []


def skip(loop: EventLoop, seconds: float) -> None:
    assert isinstance(loop.clock, SkippableClock)
    loop.clock.skipped_s += seconds
    loop.run_once(0)


@pytest.mark.parametrize(
    "body", [b"\xff", b'{"type":"workers_stopped","round":1,"x":' + b"[" * 5_000, b"", b"[1]"]
)
def test_a_frame_that_cannot_be_decoded_closes_only_its_connection(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, joined: None, body: bytes
) -> None:
    other = make_net(loop)
    other.connect(leader.address, make_join("c"))
    wait_for_events(loop, leader)
    assert agent._leader_connection is not None
    agent._leader_connection.send(body)
    [lost] = wait_for_events(loop, leader)
    assert isinstance(lost, AgentDisconnected)
    assert lost.agent == B
    assert "invalid message" in lost.reason
    other.send_to_leader(WorkersStopped(round=1))
    assert wait_for_events(loop, leader) == [
        AgentMessageReceived(AgentId("c"), WorkersStopped(round=1))
    ]
    other.close()


def test_a_frame_above_the_limit_closes_only_its_connection(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, joined: None
) -> None:
    assert agent._leader_connection is not None
    agent._leader_connection._tls.write(struct.pack(">I", 2**31))
    agent._leader_connection._flush()
    [lost] = wait_for_events(loop, leader)
    assert isinstance(lost, AgentDisconnected)
    assert "exceeds the limit" in lost.reason


def test_a_message_that_is_too_large_to_send_closes_the_connection(
    loop: EventLoop, leader: TlsTransport, agent: TlsTransport, joined: None
) -> None:
    leader.send_to_agent(B, JournalEntryCopy(slot=1, body=b"x" * (60 * 2**20)))
    [lost] = leader.drain_events()
    assert isinstance(lost, AgentDisconnected)
    assert "exceeds the limit" in lost.reason


# A leader with 80 descriptors that starts a worker once an agent has joined.
LEADER_WITH_FEW_DESCRIPTORS = """
import resource
from spotfit.fork_server.child_process import ChildProcess
from spotfit.host.event_loop import EventLoop
from spotfit.host.system import SystemClock
from tests.unit.agent.transports import make_net, wait_for_events
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
loop = EventLoop(SystemClock())
net = make_net(loop)
print(net.address, flush=True)
print(type(wait_for_events(loop, net)[0]).__name__, flush=True)
print(len(ChildProcess(loop, on_messages=print, on_line=print, on_exit=print).descriptors))
"""


def test_idle_connections_without_the_key_do_not_exhaust_the_descriptors(
    loop: EventLoop, agent: TlsTransport
) -> None:
    command = [sys.executable, "-c", LEADER_WITH_FEW_DESCRIPTORS]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader,
        contextlib.ExitStack() as idle,
    ):
        assert leader.stdout is not None
        address = leader.stdout.readline().strip()
        host, _, port = address.rpartition(":")
        for _ in range(300):
            idle.enter_context(socket.create_connection((host, int(port))))
        agent.connect(address, make_join("b"))
        output, ended = leader.stdout, list[str]()
        reader = threading.Thread(target=lambda: ended.append(output.read()))
        reader.start()
        run_loop_until(loop, lambda: bool(ended))
        assert ended == ["AgentMessageReceived\n3\n"]
        reader.join()


def test_without_descriptors_the_oldest_connection_is_closed_and_others_are_accepted(
    loop: EventLoop, leader: TlsTransport, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_socket(leader)
    run_loop_until(loop, lambda: len(leader._pending_connections) == 1)
    second = open_socket(leader)
    with no_free_descriptors():
        run_loop_until(loop, lambda: not leader._pending_connections)
        assert is_rejected(loop, first)
        run_loop_until(loop, lambda: len(leader._pending_connections) == 1)
    assert "net.accept_failed" in caplog.messages
    first.close()
    second.close()


def test_without_descriptors_and_connections_accepting_pauses(
    loop: EventLoop, leader: TlsTransport
) -> None:
    waiting = open_socket(leader)
    with no_free_descriptors():
        run_loop_until(loop, lambda: not is_watched(loop, leader._listener))
        loop.run_once(0)
    clock = loop.clock
    assert isinstance(clock, SkippableClock)
    clock.skipped_s += 1.0
    run_loop_until(loop, lambda: len(leader._pending_connections) == 1)
    waiting.close()


def is_watched(loop: EventLoop, sock: socket.socket) -> bool:
    return sock.fileno() in loop._selector.get_map()
