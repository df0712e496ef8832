"""The wire between agents: in order or not at all, told once when lost, deaf to strangers."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from spotfit.agent.loop import Loop
from spotfit.agent.net import TlsNet
from spotfit.agent.ports import AgentLost, FromAgent, FromHub, HubLost
from spotfit.core.errors import ConfigError
from spotfit.core.ids import AgentId
from spotfit.model.wire import Beat, Halt, News, Rejected, Stopped
from tests.unit.agent.wires import (
    OTHER_SECRET,
    RUN,
    Skipping,
    events_of,
    join_of,
    net_in,
    turns_until,
)

B = AgentId("b")


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(Skipping())
    yield loop
    loop.close()


@pytest.fixture
def hub(loop: Loop) -> Iterator[TlsNet]:
    net = net_in(loop)
    yield net
    net.close()


@pytest.fixture
def agent(loop: Loop) -> Iterator[TlsNet]:
    net = net_in(loop)
    yield net
    net.close()


@pytest.fixture
def joined(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    agent.dial(hub.hub, join_of("b"))
    assert events_of(loop, hub) == [FromAgent(B, join_of("b"))]


def knock(hub: TlsNet) -> socket.socket:
    host, _, port = hub.hub.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def is_shut_out(loop: Loop, stranger: socket.socket) -> bool:
    """Whether the hub closes the connection; it may say why in TLS."""
    stranger.settimeout(0)
    over = False

    def closed() -> bool:
        nonlocal over
        try:
            over = stranger.recv(4096) == b""
        except BlockingIOError:
            over = False
        except ConnectionResetError:
            over = True
        return over

    turns_until(loop, closed)
    return over


# --- among friends ---------------------------------------------------------------------------


@pytest.mark.usefixtures("joined")
def test_messages_arrive_in_order_both_ways(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    for number in range(500):
        agent.send_up(Stopped(number))
        hub.send_down(B, Halt(number))
    assert events_of(loop, hub, 500) == [FromAgent(B, Stopped(n)) for n in range(500)]
    assert events_of(loop, agent, 500) == [FromHub(Halt(n)) for n in range(500)]


@pytest.mark.usefixtures("joined")
def test_a_message_bigger_than_any_buffer_arrives(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    news = News(1, b"x" * 3_000_000)
    hub.send_down(B, news)
    assert events_of(loop, agent) == [FromHub(news)]


@pytest.mark.usefixtures("joined")
def test_a_lost_agent_is_told_once(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    agent.close()
    (lost,) = events_of(loop, hub)
    assert isinstance(lost, AgentLost)
    assert lost.agent == B
    hub.send_down(B, Beat())
    loop.turn(0)
    assert hub.events() == []


@pytest.mark.usefixtures("joined")
def test_a_lost_hub_is_told_once_as_vanished(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    hub.close()
    (lost,) = events_of(loop, agent)
    assert isinstance(lost, HubLost)
    assert (lost.address, lost.vanished) == (hub.hub, True)
    agent.send_up(Beat())
    assert agent.events() == []


@pytest.mark.usefixtures("joined")
def test_who_hangs_up_hears_no_more_of_it(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    agent.hang_up()
    events_of(loop, hub)
    assert agent.events() == []


@pytest.mark.usefixtures("joined")
def test_who_is_dismissed_loses_the_hub_but_not_a_word_said_before(
    loop: Loop, hub: TlsNet, agent: TlsNet
) -> None:
    hub.send_down(B, Rejected("not_leading"))
    hub.dismiss(B)
    said, lost = events_of(loop, agent, 2)
    assert said == FromHub(Rejected("not_leading"))
    assert isinstance(lost, HubLost)
    assert hub.events() == []


@pytest.mark.usefixtures("joined")
def test_an_agent_that_dials_again_is_lost_first(loop: Loop, hub: TlsNet) -> None:
    again = net_in(loop)
    again.dial(hub.hub, join_of("b"))
    lost, back = events_of(loop, hub, 2)
    assert isinstance(lost, AgentLost)
    assert back == FromAgent(B, join_of("b"))
    again.close()


def test_nobody_there_is_vanished(loop: Loop, agent: TlsNet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    agent.dial(address, join_of("b"))
    (lost,) = events_of(loop, agent)
    assert isinstance(lost, HubLost)
    assert (lost.address, lost.vanished) == (address, True)


def test_silence_is_given_up_and_is_not_vanished(loop: Loop, agent: TlsNet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        agent.dial(f"127.0.0.1:{mute.getsockname()[1]}", join_of("b"))
        loop.turn(0)
        skip(loop, 5.1)
        (lost,) = events_of(loop, agent)
    assert isinstance(lost, HubLost)
    assert not lost.vanished


def test_a_name_is_not_looked_up(loop: Loop, agent: TlsNet) -> None:
    agent.dial("a-name.localhost:1", join_of("b"))
    (lost,) = agent.events()
    assert isinstance(lost, HubLost)
    assert not lost.vanished


def test_our_own_hub_needs_no_wire(loop: Loop, hub: TlsNet) -> None:
    hub.dial(hub.hub, join_of("b"))
    hub.send_up(Beat())
    hub.send_down(B, Halt(1))
    assert hub.waiting
    assert hub.events() == [FromAgent(B, join_of("b")), FromAgent(B, Beat()), FromHub(Halt(1))]
    hub.dismiss(B)
    hub.send_up(Beat())
    assert [type(event) for event in hub.events()] == [HubLost]
    assert not hub.waiting


def test_a_port_that_is_taken_is_told_at_once(loop: Loop, hub: TlsNet) -> None:
    port = int(hub.hub.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        TlsNet(loop, secret=OTHER_SECRET, run_id=RUN, host="127.0.0.1", port=port)


# --- strangers -------------------------------------------------------------------------------


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        b"\x00" * 4096,
        struct.pack(">I", 2**31) + b"x" * 100,
        bytes(range(256)) * 64,
    ],
    ids=["plain text", "zeros", "a frame without TLS", "garbage"],
)
def test_who_speaks_no_tls_is_shut_out_and_hurts_nobody(
    loop: Loop, hub: TlsNet, agent: TlsNet, said: bytes
) -> None:
    with knock(hub) as stranger:
        stranger.sendall(said)
        assert is_shut_out(loop, stranger)
    agent.send_up(Beat())
    assert events_of(loop, hub) == [FromAgent(B, Beat())]


def test_the_key_of_another_run_opens_nothing(loop: Loop, hub: TlsNet) -> None:
    stranger = net_in(loop, secret=OTHER_SECRET)
    stranger.dial(hub.hub, join_of("b"))
    (lost,) = events_of(loop, stranger)
    assert isinstance(lost, HubLost)
    assert hub.events() == []
    stranger.close()


def test_a_join_for_another_run_is_rejected(loop: Loop, hub: TlsNet, agent: TlsNet) -> None:
    agent.dial(hub.hub, join_of("b", run="another"))
    assert events_of(loop, agent, 2)[0] == FromHub(Rejected("other_run"))
    assert hub.events() == []


def test_who_does_not_begin_with_a_join_is_shut_out(
    loop: Loop, hub: TlsNet, agent: TlsNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.agent.net.encode", lambda _: json.dumps({"type": "beat"}).encode())
    agent.dial(hub.hub, join_of("b"))
    (lost,) = events_of(loop, agent)
    assert isinstance(lost, HubLost)
    assert hub.events() == []


@pytest.mark.usefixtures("joined")
def test_an_agent_that_talks_nonsense_is_lost_with_a_reason(
    loop: Loop, hub: TlsNet, agent: TlsNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.agent.net.encode", lambda _: b'{"type":"unheard_of"}')
    agent.send_up(Beat())
    (lost,) = events_of(loop, hub)
    assert isinstance(lost, AgentLost)
    assert "unheard_of" in lost.why


def test_who_never_joins_is_shut_out_in_time(loop: Loop, hub: TlsNet) -> None:
    with knock(hub) as stranger:
        loop.turn(1)
        skip(loop, 5.1)
        assert is_shut_out(loop, stranger)


def test_a_frame_above_the_limit_ends_the_connection(
    loop: Loop, hub: TlsNet, agent: TlsNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spotfit.agent.wire.framed", lambda body: struct.pack(">I", 65 * 2**20) + body
    )
    agent.dial(hub.hub, join_of("b"))
    assert [type(event) for event in events_of(loop, agent)] == [HubLost]
    assert hub.events() == []


def skip(loop: Loop, seconds: float) -> None:
    assert isinstance(loop.clock, Skipping)
    loop.clock.skipped += seconds
    loop.turn(0)
