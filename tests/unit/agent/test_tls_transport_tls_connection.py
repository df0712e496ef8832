"""Tests of a single TLS connection."""

import pytest

from spotfit.agent import tls_transport
from spotfit.agent.ports import AgentDisconnected
from spotfit.core.ids import AgentId
from spotfit.host.event_loop import EventLoop
from spotfit.protocol.agent_leader import JournalEntryCopy
from tests.unit.agent.transports import SkippableClock, make_join, make_net, wait_for_events


def test_a_peer_that_takes_nothing_is_lost_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_transport, "MAX_SEND_BUFFER_BYTES", 2**20)
    loop = EventLoop(SkippableClock())
    leader, agent = make_net(loop), make_net(loop)
    agent.connect(leader.address, make_join("b"))
    wait_for_events(loop, leader)
    for _ in range(64):  # the loop does not run, so the peer does not read
        leader.send_to_agent(AgentId("b"), JournalEntryCopy(slot=1, body=b"x" * 2**20))
    (lost,) = leader.drain_events()
    assert lost == AgentDisconnected(AgentId("b"), "the peer does not read: over 1 MiB are unsent")
    leader.close()
    agent.close()
    loop.close()
