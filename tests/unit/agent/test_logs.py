"""Output in the bucket: in order, in chunks, and never lost without a word."""

import json
import threading
from typing import Any

from spotfit.agent.logs import LogShipper
from spotfit.core.clock import Clock
from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.store.memory import MemoryStore
from spotfit.store.url import RootUrl

ME = AgentId("a-1")


class Quick:
    """A clock on which waiting takes no time."""

    def now(self) -> float:
        return 0.0

    def wait(self, seconds: float) -> None:
        """At once."""


class Moody(MemoryStore):
    """Loses answers, or refuses, as it was told; may be held up."""

    def __init__(self, root: RootUrl) -> None:
        super().__init__(root)
        self.moods: list[Exception] = []
        self.after_write = False
        self.open = threading.Event()
        self.open.set()

    def create(self, key: str, body: bytes) -> None:
        assert self.open.wait(10)
        if self.after_write:
            super().create(key, body)
        if self.moods:
            raise self.moods.pop(0)
        if not self.after_write:
            super().create(key, body)


def a_store(request_id: str) -> Moody:
    return Moody(RootUrl.parse(f"memory://logs-{request_id}"))


def a_shipper(store: Moody, *, pause_s: float = 0.0, held_bytes: int = 2**20) -> LogShipper:
    clock: Clock = Quick()
    return LogShipper(
        store, ME, wall_ms=lambda: 7, clock=clock, pause_s=pause_s, held_bytes=held_bytes
    )


def lines_in(store: Moody) -> list[dict[str, Any]]:
    chunks = [store.get(info.key) for info in store.list(".spotfit/logs")]
    return [json.loads(line) for chunk in chunks for line in chunk.splitlines()]


def texts_in(store: Moody) -> list[str]:
    return [line["text"] for line in lines_in(store) if "text" in line]


def test_lines_are_kept_in_order_and_the_last_one_says_so() -> None:
    store = a_store("order")
    logs = a_shipper(store)
    for number in range(300):
        logs.line(1, 2, "out", f"line {number}")
    logs.close()
    assert texts_in(store) == [f"line {number}" for number in range(300)]
    first, *_, last = lines_in(store)
    assert first == {"t": 7, "round": 1, "rank": 2, "stream": "out", "text": "line 0"}
    assert last == {"end": True}


def test_a_moment_s_lines_share_an_object() -> None:
    store = a_store("together")
    logs = a_shipper(store, pause_s=60)
    for number in range(300):
        logs.line(1, 2, "out", str(number))
    logs.close()
    assert len(list(store.list(".spotfit/logs"))) == 1


def test_a_bucket_that_is_away_is_asked_again() -> None:
    store = a_store("away")
    store.moods = [TransientStoreError("away"), TransientStoreError("still")]
    logs = a_shipper(store)
    logs.line(1, 0, "err", "kept")
    logs.close()
    assert texts_in(store) == ["kept"]


def test_a_lost_answer_writes_nothing_twice() -> None:
    store = a_store("answer")
    store.after_write, store.moods = True, [TransientStoreError("lost")]
    logs = a_shipper(store)
    logs.line(1, 0, "out", "once")
    logs.close()
    assert texts_in(store) == ["once"]


def test_what_cannot_be_held_is_counted_aloud() -> None:
    store = a_store("slow")
    store.open.clear()
    logs = a_shipper(store, held_bytes=1000)
    for number in range(1000):
        logs.line(1, 0, "out", f"line {number}")
    store.open.set()
    logs.close()
    kept = texts_in(store)
    told = [text for text in kept if text.startswith("[spotfit] ")]
    assert kept[-1] == told[-1]
    lost = sum(int(text.split()[1]) for text in told)
    assert lost + len(kept) - len(told) == 1000


def test_a_bucket_that_refuses_holds_nobody_up() -> None:
    store = a_store("refuses")
    store.moods = [StorePermissionError("no")]
    logs = a_shipper(store)
    logs.line(1, 0, "out", "lost")
    logs.close()
    assert lines_in(store) == []
