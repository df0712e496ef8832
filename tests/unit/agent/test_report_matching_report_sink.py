"""The report sink writes chunks in order, without losing or overwriting reports."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.agent import report_matching as report_matching
from spotfit.agent.report_matching import MatchedReport, ReportSink
from spotfit.core.errors import NotFoundError
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, an_agent_id
from tests.unit.control.fake_provisioner import DeferredCalls

ME = an_agent_id(0)


class Harness:
    """A sink, its background calls and its bucket."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.background_calls = DeferredCalls()
        self.sink = ReportSink(
            Ledger(self.store, RUN_ID, ME, wall_ms=lambda: 1_700_000_000_123), self.background_calls
        )

    def add(self, *reports: int) -> None:
        for n in reports:
            self.sink.add(1, MatchedReport(n, (msgspec.Raw(b'{"step":%d}' % n),), None))

    def flush(self, now: float, *, at_once: bool = False) -> None:
        self.sink.flush(now, force=at_once)
        self.background_calls.complete()
        self.sink.flush(now, force=at_once)

    def chunk(self, n: int) -> list[int] | None:
        try:
            body = self.store.get(keys.reports(ME, n))
        except NotFoundError:
            return None
        return [msgspec.json.decode(line)["report_index"] for line in body.splitlines()]


def test_a_line_is_one_report_of_the_group() -> None:
    harness = Harness()
    harness.sink.add(
        3, MatchedReport(7, (msgspec.Raw(b'{"loss":0.5}'), msgspec.Raw(b"{}")), 'a "b"')
    )
    harness.flush(10.0)
    line = msgspec.json.decode(harness.store.get(keys.reports(ME, 0)))
    assert line == {
        "round": 3,
        "report_index": 7,
        "t": 1_700_000_000_123,
        "checkpoint": 'a "b"',
        "metrics": {"loss": 0.5},
        "other_ranks": [{}],
    }


def test_a_report_is_added_once() -> None:
    harness = Harness()
    for _ in range(2):
        harness.add(0)
    harness.flush(10.0)
    assert harness.sink.added_count == 1


def test_reports_are_buffered_for_a_second() -> None:
    harness = Harness()
    harness.add(0)
    harness.flush(10.0)
    harness.add(1, 2)
    harness.flush(10.9)
    assert (harness.chunk(0), harness.chunk(1)) == ([0], None)
    assert harness.sink.has_unwritten
    harness.flush(11.0)
    assert harness.chunk(1) == [1, 2]
    assert not harness.sink.has_unwritten


def test_added_and_written_reports_are_counted() -> None:
    harness = Harness()
    harness.add(0, 1)
    harness.sink.flush(10.0, force=True)
    harness.add(2)
    assert (harness.sink.added_count, harness.sink.written_count) == (3, 0)
    harness.flush(10.0)
    assert (harness.sink.added_count, harness.sink.written_count) == (3, 2)
    harness.flush(11.0)
    assert harness.sink.written_count == 3


def test_a_forced_flush_writes_immediately() -> None:
    harness = Harness()
    harness.add(0)
    harness.flush(10.0)
    harness.add(1)
    harness.flush(10.1, at_once=True)
    assert harness.chunk(1) == [1]


def test_a_full_chunk_is_written_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_matching, "_CHUNK_BYTES", 100)
    harness = Harness()
    harness.add(0)
    harness.flush(10.0)
    harness.add(*range(1, 10))
    harness.flush(10.1)
    assert harness.chunk(1) == list(range(1, 10))


def test_reports_during_a_write_go_into_the_next_chunk() -> None:
    harness = Harness()
    harness.add(0)
    harness.sink.flush(10.0, force=True)
    harness.add(1)
    harness.sink.flush(20.0, force=True)
    harness.background_calls.complete()
    harness.sink.flush(20.0, force=True)
    harness.flush(21.0)
    assert (harness.chunk(0), harness.chunk(1)) == ([0], [1])


def test_a_failed_chunk_is_retried() -> None:
    harness = Harness()
    harness.add(0)
    put, harness.store.put = harness.store.put, _failing  # type: ignore[method-assign]  # for a while
    harness.flush(10.0)
    assert harness.sink.has_unwritten
    harness.store.put = put  # type: ignore[method-assign]
    harness.flush(11.0)
    assert harness.chunk(0) == [0]


def _failing(key: str, body: bytes | memoryview) -> None:
    raise ConnectionError(key, len(body))
