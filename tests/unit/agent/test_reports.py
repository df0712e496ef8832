"""Reports on their way to the bucket: in chunks, in order, none lost, none written over."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.agent import reports as room
from spotfit.agent.hub import Told
from spotfit.agent.reports import ReportSink
from spotfit.core.errors import NotFoundError
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, an_agent
from tests.unit.control.paper import Slow

ME = an_agent(0)


class Desk:
    """A sink, its errands and its bucket."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.errands = Slow()
        self.sink = ReportSink(Ledger(self.store, RUN, ME), self.errands)

    def add(self, *reports: int) -> None:
        for n in reports:
            self.sink.add(1, Told(n, (msgspec.Raw(b'{"step":%d}' % n),), None))

    def flush(self, now: float, *, at_once: bool = False) -> None:
        self.sink.flush(now, at_once=at_once)
        self.errands.finish()
        self.sink.flush(now, at_once=at_once)

    def chunk(self, n: int) -> list[int] | None:
        try:
            body = self.store.get(keys.reports(ME, n))
        except NotFoundError:
            return None
        return [msgspec.json.decode(line)["n"] for line in body.splitlines()]


def test_a_line_is_a_report_of_the_whole_group() -> None:
    desk = Desk()
    desk.sink.add(3, Told(7, (msgspec.Raw(b'{"loss":0.5}'), msgspec.Raw(b"{}")), 'a "b"'))
    desk.flush(10.0)
    line = msgspec.json.decode(desk.store.get(keys.reports(ME, 0)))
    assert line == {"round": 3, "n": 7, "checkpoint": 'a "b"', "metrics": {"loss": 0.5}}


def test_reports_are_gathered_for_a_second() -> None:
    desk = Desk()
    desk.add(0)
    desk.flush(10.0)
    desk.add(1, 2)
    desk.flush(10.9)
    assert (desk.chunk(0), desk.chunk(1)) == ([0], None)
    assert desk.sink.waiting
    desk.flush(11.0)
    assert desk.chunk(1) == [1, 2]
    assert not desk.sink.waiting


def test_at_the_end_nothing_is_held_back() -> None:
    desk = Desk()
    desk.add(0)
    desk.flush(10.0)
    desk.add(1)
    desk.flush(10.1, at_once=True)
    assert desk.chunk(1) == [1]


def test_many_reports_are_not_held_back_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_CHUNK_BYTES", 100)
    desk = Desk()
    desk.add(0)
    desk.flush(10.0)
    desk.add(*range(1, 10))
    desk.flush(10.1)
    assert desk.chunk(1) == list(range(1, 10))


def test_what_comes_while_a_chunk_is_written_goes_into_the_next() -> None:
    desk = Desk()
    desk.add(0)
    desk.sink.flush(10.0, at_once=True)
    desk.add(1)
    desk.sink.flush(20.0, at_once=True)
    desk.errands.finish()
    desk.sink.flush(20.0, at_once=True)
    desk.flush(21.0)
    assert (desk.chunk(0), desk.chunk(1)) == ([0], [1])


def test_a_chunk_that_failed_is_written_again() -> None:
    desk = Desk()
    desk.add(0)
    put, desk.store.put = desk.store.put, _failing  # type: ignore[method-assign]  # for a while
    desk.flush(10.0)
    assert desk.sink.waiting
    desk.store.put = put  # type: ignore[method-assign]
    desk.flush(11.0)
    assert desk.chunk(0) == [0]


def _failing(key: str, body: bytes | memoryview) -> None:
    raise ConnectionError(key, len(body))
