"""The inbox: whoever waits reads for all, and everybody finds what he waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from spotfit.host.clocks import SystemClock
from spotfit.model.wire import Committed, Proceed, ToWorker
from spotfit.worker.inbox import Inbox
from tests.unit.worker.agent_end import AgentEnd

LONG_S = 30.0


@pytest.fixture
def agent() -> Iterator[AgentEnd]:
    with contextlib.closing(AgentEnd()) as agent:
        yield agent


class Reader:
    """Takes frames in, and waits for some."""

    def __init__(self, agent: AgentEnd) -> None:
        self.taken: list[ToWorker] = []
        self.inbox = Inbox(agent.talk, self.taken.append, SystemClock())

    def has(self, name: str) -> str | None:
        names = [frame.name for frame in self.taken if isinstance(frame, Committed)]
        return name if name in names else None

    def wait(self, name: str, timeout_s: float = LONG_S) -> str | None:
        return self.inbox.wait(lambda: self.has(name), timeout_s)


def test_what_is_waited_for_is_found_and_all_before_it_was_taken(agent: AgentEnd) -> None:
    reader = Reader(agent)
    agent.say(Committed("a", {}), Committed("b", {}), Committed("c", {}))
    assert reader.wait("b") == "b"
    assert len(reader.taken) == 2
    assert reader.wait("a") == "a", "it is there already"
    reader.inbox.drain()
    assert len(reader.taken) == 3


def test_a_wait_ends_with_its_time(agent: AgentEnd) -> None:
    assert Reader(agent).wait("never", 0.0) is None
    assert Reader(agent).wait("never", 0.01) is None


def test_several_threads_wait_at_once_and_each_finds_its_own(agent: AgentEnd) -> None:
    reader = Reader(agent)
    found: dict[str, str | None] = {}

    def look(name: str) -> None:
        found[name] = reader.wait(name)

    threads = [threading.Thread(target=look, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for name in "dbca":
        agent.say(Proceed("form"), Committed(name, {}))
    for thread in threads:
        thread.join(LONG_S)
    assert found == {name: name for name in "abcd"}
    assert len(reader.taken) == 8, "each frame was taken once"


def test_who_only_looks_does_not_wait_for_one_who_reads(agent: AgentEnd) -> None:
    reader = Reader(agent)
    thread = threading.Thread(target=reader.wait, args=("late",))
    thread.start()
    reader.inbox.drain()
    agent.say(Committed("late", {}))
    thread.join(LONG_S)
    assert not thread.is_alive()
