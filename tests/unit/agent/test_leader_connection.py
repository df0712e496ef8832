"""Tests of the connection to the leader: reconnection, heartbeats and the lease."""

from __future__ import annotations

from typing import Any

from spotfit.agent.leader_connection import LeaderConnection
from spotfit.agent.ports import AgentMessageReceived, LeaderDisconnected
from spotfit.control.background_calls import SynchronousCalls
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import LeaderElected
from spotfit.model.spec import RunTiming
from spotfit.model.view import View
from spotfit.protocol.agent_leader import ConnectionHeartbeat, Join
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_member, a_view, an_agent_id
from spotfit_localsim.virtual.sim_network import CONNECT_TIMEOUT_S
from tests.unit.agent.simulated_cluster import Infrastructure

TIMING = RunTiming(heartbeat_interval_s=1.0, heartbeat_timeout_s=6.0)
JOIN = Join(run_id=RUN_ID, member=a_member(1), next_slot=0)
LEADER_ADDRESS = a_member(0).coordinator_address
VIEW = a_view()
OTHER = a_view(
    leader=LeaderElected(
        leader=an_agent_id(2), epoch=2, coordinator_address=a_member(2).coordinator_address
    )
)


class Harness:
    """The connection of agent a1 to the leader a0."""

    def __init__(self) -> None:
        self.infrastructure = Infrastructure()
        self.store = MemoryStore()
        self.net = self.infrastructure.open_transport(a_member(1))
        self.peer = self.infrastructure.open_transport(a_member(0))
        self.leader = Ledger(self.store, RUN_ID, an_agent_id(0))
        self.connection = LeaderConnection(
            self.net, Ledger(self.store, RUN_ID, an_agent_id(1)), SynchronousCalls()
        )

    def connect(self, now: float, view: View = VIEW) -> None:
        self.connection.connect(view, JOIN, TIMING, now)

    def observe(self, now: float, view: View = VIEW, *, read_lease: bool = True) -> Any:
        self.connection.observe_leader(view, TIMING, now, read_lease=read_lease)
        return self.connection.leader_observation(now)

    def process_events(self, now: float) -> bool:
        """Process transport events; returns whether the connection was lost."""
        engine = self.infrastructure.engine
        engine.run(until=engine.now + CONNECT_TIMEOUT_S)
        lost = [event for event in self.net.drain_events() if isinstance(event, LeaderDisconnected)]
        return [self.connection.on_disconnected(event, now) for event in lost].count(True) > 0


def test_an_agent_connects_to_the_leader_once() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connect(2.0)
    assert (harness.net.dialed, harness.connection.address) == ([LEADER_ADDRESS], LEADER_ADDRESS)
    assert harness.peer.drain_events() == [AgentMessageReceived(an_agent_id(1), JOIN)]


def test_an_agent_connects_to_a_new_leader() -> None:
    harness = Harness()
    harness.connect(1.0, a_view(leader=None))
    harness.connect(
        2.0, a_view(leader=LeaderElected(leader=an_agent_id(9), epoch=1, coordinator_address=None))
    )
    assert harness.net.dialed == []
    harness.connect(3.0)
    harness.connect(4.0, OTHER)
    assert harness.net.dialed == [LEADER_ADDRESS, a_member(2).coordinator_address]


def test_an_agent_sends_heartbeats_to_the_leader() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.peer.drain_events()
    for now in (1.5, 2.0, 2.5, 3.0):
        harness.connection.on_message(now)
        harness.connection.check_heartbeat(TIMING, now, is_leading=False)
    assert (
        harness.peer.drain_events()
        == [AgentMessageReceived(an_agent_id(1), ConnectionHeartbeat())] * 2
    )


def test_a_silent_leader_is_reconnected() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connection.on_message(2.0)
    assert not harness.connection.check_heartbeat(TIMING, 8.0, is_leading=False)
    assert harness.connection.check_heartbeat(TIMING, 9.0, is_leading=False)
    assert harness.connection.address is None
    harness.connect(9.0)
    assert harness.net.dialed == [LEADER_ADDRESS, LEADER_ADDRESS]


def test_a_leader_does_not_disconnect_itself() -> None:
    harness = Harness()
    harness.connect(1.0)
    assert not harness.connection.check_heartbeat(TIMING, 99.0, is_leading=True)


# --- lost connections ----------------------------------------------------------------------------


def test_a_first_broken_connection_is_retried_immediately() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connection.on_message(1.0)
    harness.net.reset_connections()
    assert harness.process_events(2.0)
    assert harness.connection.leader_observation(2.0).vanished_at is None
    harness.connect(2.0)
    assert harness.net.dialed == [LEADER_ADDRESS, LEADER_ADDRESS]


def test_a_second_refused_connection_means_a_vanished_leader() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.observe(1.0)
    harness.peer.close()
    harness.process_events(2.0)
    harness.connect(2.0)
    harness.process_events(2.1)
    observation = harness.connection.leader_observation(2.1)
    assert (observation.vanished_at, observation.is_connected) == (2.1, False)
    harness.connect(3.0)
    assert harness.net.dialed == [LEADER_ADDRESS, LEADER_ADDRESS], (
        "no connection before the next election"
    )


def test_a_successful_retry_resets_the_observation() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connection.on_message(1.0)
    harness.net.reset_connections()
    harness.process_events(2.0)
    harness.connect(2.0)
    harness.connection.on_message(2.2)
    assert harness.observe(2.3).is_connected
    harness.net.reset_connections()
    harness.process_events(5.0)
    assert harness.connection.leader_observation(5.0).vanished_at is None


def test_a_timeout_is_retried_after_a_delay() -> None:
    harness = Harness()
    harness.infrastructure.network.silence_host(a_member(0).host)
    harness.connect(1.0)
    harness.process_events(1.0)
    assert harness.connection.leader_observation(1.0).vanished_at is None
    harness.connect(1.2)
    assert harness.net.dialed == [LEADER_ADDRESS]
    harness.connect(1.6)
    assert harness.net.dialed == [LEADER_ADDRESS, LEADER_ADDRESS]


def test_the_loss_of_an_old_connection_is_ignored() -> None:
    harness = Harness()
    harness.connect(1.0)
    assert not harness.connection.on_disconnected(
        LeaderDisconnected("10.9.9.9:1", "reset", closed_by_peer=True), 2.0
    )
    assert harness.connection.address == LEADER_ADDRESS


def test_a_rejected_join_is_retried_after_a_delay() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connection.on_rejected(1.0)
    harness.connect(1.1)
    assert harness.net.dialed == [LEADER_ADDRESS]
    harness.connect(1.5)
    assert harness.net.dialed == [LEADER_ADDRESS, LEADER_ADDRESS]


# --- observation of the leader -------------------------------------------------------------------


def test_with_a_healthy_connection_the_lease_is_not_read() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connection.on_message(1.0)
    harness.store.get = _unread  # type: ignore[method-assign]
    observation = harness.observe(3.0)
    assert (observation.is_connected, observation.lease_changed_at) == (True, 3.0)


def _unread(key: str) -> bytes:
    raise AssertionError(f"{key} was read")


def test_without_a_connection_a_changed_lease_proves_the_leader_alive() -> None:
    harness = Harness()
    harness.infrastructure.network.silence_host(a_member(0).host)
    harness.observe(1.0)
    harness.leader.renew_lease()
    assert harness.observe(5.0).lease_changed_at == 5.0
    assert harness.observe(7.0).lease_changed_at == 5.0
    harness.leader.renew_lease()
    assert harness.observe(8.0, read_lease=False).lease_changed_at == 5.0, "the lease was not read"
    assert harness.observe(9.0).lease_changed_at == 9.0


def test_a_lease_that_was_written_again_does_not_prove_the_leader_alive() -> None:
    harness = Harness()
    key = keys.lease(an_agent_id(0))
    harness.leader.renew_lease()
    old = harness.store.get(key)
    harness.leader.renew_lease()
    new = harness.store.get(key)
    assert harness.observe(5.0).lease_changed_at == 5.0
    for now, body in ((7.0, old), (9.0, new), (11.0, b"junk"), (13.0, new)):
        harness.store.put(key, body)
        assert harness.observe(now).lease_changed_at == 5.0


def test_an_accepted_connection_does_not_prove_the_leader_alive() -> None:
    harness = Harness()
    harness.connect(1.0)
    harness.connection.on_message(1.0)
    harness.observe(1.0)
    for now in range(2, 23):
        harness.connection.check_heartbeat(TIMING, now, is_leading=False)
        harness.connect(now)
        harness.observe(now + 0.1)
    observation = harness.connection.leader_observation(22.1)
    assert not observation.is_connected
    assert observation.lease_changed_at < 8.0


def test_observations_are_reset_for_a_new_leader() -> None:
    harness = Harness()
    harness.leader.renew_lease()
    harness.observe(1.0)
    harness.connect(2.0)
    harness.peer.close()
    harness.process_events(2.0)
    harness.connect(2.0)
    harness.process_events(2.1)
    observation = harness.observe(50.0, OTHER)
    assert (observation.lease_changed_at, observation.vanished_at) == (50.0, None)


# --- a leader that is alive and does not answer --------------------------------------------------


def dial_for(harness: Harness, seconds: int, *, renews_lease: bool = True) -> None:
    """Let the agent dial its leader from 1.0 on, as its ticks do."""
    for now in range(1, 1 + seconds):
        harness.connect(float(now))
        harness.process_events(float(now))
        if renews_lease and now % 5 == 0:
            harness.leader.renew_lease()
        harness.observe(float(now))


def test_a_leader_that_is_alive_and_never_answers_is_reported_after_30_s() -> None:
    harness = Harness()
    harness.infrastructure.network.silence_host(a_member(0).host)
    dial_for(harness, 30)
    assert harness.connection.unreachable_leader(TIMING, 30.9) == ""
    reason = harness.connection.unreachable_leader(TIMING, 31.0)
    assert f"{a_member(1).coordinator_address} did not reach the leader at {LEADER_ADDRESS}" in (
        reason
    )


def test_a_leader_that_has_died_is_not_reported() -> None:
    harness = Harness()
    harness.infrastructure.network.silence_host(a_member(0).host)
    dial_for(harness, 40, renews_lease=False)
    assert harness.connection.unreachable_leader(TIMING, 41.0) == ""


def test_a_leader_that_died_while_it_was_dialled_is_not_reported() -> None:
    harness = Harness()
    harness.infrastructure.network.silence_host(a_member(0).host)
    dial_for(harness, 11)
    assert harness.connection.unreachable_leader(TIMING, 41.0) == ""


def test_a_leader_that_has_answered_before_is_not_reported() -> None:
    harness = Harness()
    harness.connect(0.5)
    harness.connection.on_message(0.5)
    harness.infrastructure.network.silence_host(a_member(0).host)
    harness.net.reset_connections()
    dial_for(harness, 40)
    assert harness.connection.unreachable_leader(TIMING, 41.0) == ""


def test_the_time_starts_again_with_another_leader() -> None:
    harness = Harness()
    harness.infrastructure.network.silence_host(a_member(0).host)
    dial_for(harness, 25)
    harness.connection.disconnect()
    harness.connect(26.0, OTHER)
    assert harness.connection.unreachable_leader(TIMING, 35.0) == ""


def test_a_leader_that_is_elected_again_is_not_considered_to_have_vanished() -> None:
    """A firewall that answers for it with a reset must not cause endless elections."""
    harness = Harness()
    harness.peer.close()
    harness.connect(1.0)
    harness.process_events(1.0)
    harness.connect(1.1)
    harness.process_events(1.1)
    assert harness.connection.leader_observation(1.1).vanished_at == 1.1
    harness.connection.reset_observation()
    again = a_view(
        leader=LeaderElected(
            leader=an_agent_id(0), epoch=3, coordinator_address=a_member(0).coordinator_address
        )
    )
    for now in (2.0, 2.1, 2.2, 3.0):
        harness.connect(now, again)
        harness.process_events(now)
    assert harness.connection.leader_observation(3.0).vanished_at is None
    assert len(harness.net.dialed) == 5, "the third refusal in a row is not retried at once"
