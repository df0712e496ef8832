"""One connection: what nobody takes is not kept for ever."""

import pytest

from spotfit.agent import wire
from spotfit.agent.loop import Loop
from spotfit.agent.ports import AgentLost
from spotfit.core.ids import AgentId
from spotfit.model.wire import News
from tests.unit.agent.wires import Skipping, events_of, join_of, net_in


def test_a_peer_that_takes_nothing_is_lost_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "QUEUE_LIMIT_BYTES", 2**20)
    loop = Loop(Skipping())
    hub, agent = net_in(loop), net_in(loop)
    agent.dial(hub.hub, join_of("b"))
    events_of(loop, hub)
    for _ in range(64):  # nobody turns the loop, so nobody reads
        hub.send_down(AgentId("b"), News(1, b"x" * 2**20))
    (lost,) = hub.events()
    assert lost == AgentLost(AgentId("b"), "it did not take what was sent")
    hub.close()
    agent.close()
    loop.close()
