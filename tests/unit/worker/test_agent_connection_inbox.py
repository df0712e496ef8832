"""Inbox: one waiting thread reads for all, and each thread gets its message."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from spotfit.host.system import SystemClock
from spotfit.protocol.worker_agent import CommitConfirmed, OpenGate, ToWorker
from spotfit.worker.agent_connection import Inbox
from tests.unit.worker.agent_end import FakeAgentConnection

LONG_S = 30.0


@pytest.fixture
def agent() -> Iterator[FakeAgentConnection]:
    with contextlib.closing(FakeAgentConnection()) as agent:
        yield agent


class Reader:
    """Records messages, and waits for some."""

    def __init__(self, agent: FakeAgentConnection) -> None:
        self.received: list[ToWorker] = []
        self.inbox = Inbox(agent.connection, self.received.append, SystemClock())

    def has(self, name: str) -> str | None:
        names = [
            frame.checkpoint_name for frame in self.received if isinstance(frame, CommitConfirmed)
        ]
        return name if name in names else None

    def wait(self, name: str, timeout_s: float = LONG_S) -> str | None:
        return self.inbox.wait(lambda: self.has(name), timeout_s)


def test_wait_delivers_all_messages_up_to_the_expected_one(
    agent: FakeAgentConnection,
) -> None:
    reader = Reader(agent)
    agent.send(
        CommitConfirmed(checkpoint_name="a", metrics={}),
        CommitConfirmed(checkpoint_name="b", metrics={}),
        CommitConfirmed(checkpoint_name="c", metrics={}),
    )
    assert reader.wait("b") == "b"
    assert len(reader.received) == 2
    assert reader.wait("a") == "a", "received before"
    reader.inbox.drain()
    assert len(reader.received) == 3


def test_wait_returns_none_after_its_timeout(agent: FakeAgentConnection) -> None:
    assert Reader(agent).wait("never", 0.0) is None
    assert Reader(agent).wait("never", 0.01) is None


def test_threads_that_wait_at_once_each_receive_their_message(agent: FakeAgentConnection) -> None:
    reader = Reader(agent)
    found: dict[str, str | None] = {}

    def wait_for_name(name: str) -> None:
        found[name] = reader.wait(name)

    threads = [threading.Thread(target=wait_for_name, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for name in "dbca":
        agent.send(OpenGate(phase="setup"), CommitConfirmed(checkpoint_name=name, metrics={}))
    for thread in threads:
        thread.join(LONG_S)
    assert found == {name: name for name in "abcd"}
    assert len(reader.received) == 8, "each message is delivered once"


def test_drain_does_not_wait_for_a_thread_that_reads(agent: FakeAgentConnection) -> None:
    reader = Reader(agent)
    thread = threading.Thread(target=reader.wait, args=("late",))
    thread.start()
    reader.inbox.drain()
    agent.send(CommitConfirmed(checkpoint_name="late", metrics={}))
    thread.join(LONG_S)
    assert not thread.is_alive()
