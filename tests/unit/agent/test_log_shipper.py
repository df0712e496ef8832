"""Tests of the log shipper: order, chunks, and dropped lines."""

import json
import threading
from typing import Any

import pytest

from spotfit.agent import log_shipper
from spotfit.agent.log_shipper import LogShipper
from spotfit.core.clock import Clock
from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl

ME = AgentId("a-1")


class InstantClock:
    """A clock on which waiting takes no time."""

    def now(self) -> float:
        return 0.0

    def wait(self, seconds: float) -> None:
        """Return at once."""


class FailingStore(MemoryStore):
    """Raises the given errors before or after a write; writes may be blocked."""

    def __init__(self, root: RootUrl) -> None:
        super().__init__(root)
        self.errors: list[Exception] = []
        self.after_write = False
        self.unblocked = threading.Event()
        self.unblocked.set()

    def put(self, key: str, body: bytes | memoryview) -> None:
        assert self.unblocked.wait(10)
        if self.after_write:
            super().put(key, body)
        if self.errors:
            raise self.errors.pop(0)
        if not self.after_write:
            super().put(key, body)

    def create(self, key: str, body: bytes) -> None:
        raise AssertionError("a single denied request would end the log")


def a_store(request_id: str) -> FailingStore:
    return FailingStore(RootUrl.parse(f"memory://logs-{request_id}"))


def a_shipper(store: FailingStore, *, pause_s: float = 0.0) -> LogShipper:
    clock: Clock = InstantClock()
    return LogShipper(store, ME, wall_ms=lambda: 7, clock=clock, flush_interval_s=pause_s)


def lines_in(store: FailingStore) -> list[dict[str, Any]]:
    chunks = [store.get(info.key) for info in store.list(".spotfit/logs")]
    return [json.loads(line) for chunk in chunks for line in chunk.splitlines()]


def texts_in(store: FailingStore) -> list[str]:
    return [line["text"] for line in lines_in(store) if "text" in line]


def test_lines_are_stored_in_order_with_an_end_marker() -> None:
    store = a_store("order")
    logs = a_shipper(store)
    for number in range(300):
        logs.add_line(1, 2, "out", f"line {number}")
    logs.close()
    assert texts_in(store) == [f"line {number}" for number in range(300)]
    first, *_, last = lines_in(store)
    assert first == {"t": 7, "round": 1, "rank": 2, "stream": "out", "text": "line 0"}
    assert last == {"end": True}


def test_lines_within_the_flush_interval_share_a_chunk() -> None:
    store = a_store("together")
    logs = a_shipper(store, pause_s=60)
    for number in range(300):
        logs.add_line(1, 2, "out", str(number))
    logs.close()
    assert len(list(store.list(".spotfit/logs"))) == 1


def test_a_transient_error_is_retried() -> None:
    store = a_store("away")
    store.errors = [TransientStoreError("away"), TransientStoreError("still")]
    logs = a_shipper(store)
    logs.add_line(1, 0, "err", "kept")
    logs.close()
    assert texts_in(store) == ["kept"]


def test_a_lost_answer_does_not_duplicate_a_chunk() -> None:
    store = a_store("answer")
    store.after_write, store.errors = True, [TransientStoreError("lost")]
    logs = a_shipper(store)
    logs.add_line(1, 0, "out", "once")
    logs.close()
    assert texts_in(store) == ["once"]


def test_dropped_lines_are_counted_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_shipper, "MAX_BUFFER_BYTES", 1000)
    store = a_store("slow")
    store.unblocked.clear()
    logs = a_shipper(store)
    for number in range(1000):
        logs.add_line(1, 0, "out", f"line {number}")
    store.unblocked.set()
    logs.close()
    texts = texts_in(store)
    messages = [text for text in texts if text.startswith("[spotfit] ")]
    assert texts[-1] == messages[-1]
    lost = sum(int(text.split()[1]) for text in messages)
    assert lost + len(texts) - len(messages) == 1000


def test_a_permission_error_stops_the_writer() -> None:
    store = a_store("refuses")
    store.errors = [StorePermissionError("no")]
    logs = a_shipper(store)
    logs.add_line(1, 0, "out", "lost")
    logs.close()
    assert lines_in(store) == []


def test_a_line_counts_as_unwritten_until_it_is_stored(request: pytest.FixtureRequest) -> None:
    store = a_store(request.node.name)
    store.unblocked.clear()
    shipper = a_shipper(store)
    observed = [shipper.has_unwritten]
    shipper.add_line(1, 0, "out", "last words")
    observed.append(shipper.has_unwritten)
    store.unblocked.set()
    shipper.close()
    assert [*observed, shipper.has_unwritten] == [False, True, False]
    assert texts_in(store) == ["last words"]
