"""Reports of agents that stand by: when they are written, and when the leader trusts them."""

from __future__ import annotations

from msgspec.structs import replace

from spotfit.agent.standby import StandbyReporter, StandbyWatch
from spotfit.control.background_calls import SynchronousCalls
from spotfit.core.ids import Token
from spotfit.ledger.journal import Ledger
from spotfit.model.topology import StandbyReport
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, TOKEN, a_member, an_agent_id
from tests.unit.agent.simulated_cluster import FlakyStore
from tests.unit.control.fake_provisioner import DeferredCalls

INTERVAL_S, TIMEOUT_S = 5.0, 20.0
READY = StandbyReport(member=a_member(1), renewal=0, is_warm=True)


class Pair:
    """An agent that stands by, and the leader that reads its reports."""

    def __init__(self) -> None:
        self.store = FlakyStore()
        self.reporter = StandbyReporter(self._ledger(1), SynchronousCalls())
        self.watch = StandbyWatch(self._ledger(0), SynchronousCalls(), 0.0)
        self.tokens = [TOKEN]

    def _ledger(self, n: int) -> Ledger:
        return Ledger(self.store, RUN_ID, an_agent_id(n))

    def renew(self, now: float, report: StandbyReport = READY) -> float:
        return self.reporter.report(report, INTERVAL_S, now)

    def read(self, now: float) -> bool:
        return self.watch.read(lambda: self.tokens, TIMEOUT_S, now)

    @property
    def stored(self) -> list[StandbyReport]:
        return self._ledger(0).read_standby([TOKEN])

    def is_ready(self) -> bool:
        return any(one.is_ready for one in self.watch.statuses.values())


# --- the agent ------------------------------------------------------------------------------------


def test_a_report_is_renewed_at_its_interval() -> None:
    pair = Pair()
    assert pair.renew(0.0) == INTERVAL_S
    assert pair.renew(4.9) == INTERVAL_S
    assert pair.stored == [replace(READY, renewal=1)]
    assert pair.renew(5.0) == 2 * INTERVAL_S
    assert pair.stored == [replace(READY, renewal=2)]


def test_a_changed_report_is_written_at_once() -> None:
    pair = Pair()
    pair.renew(0.0)
    noticed = replace(READY, has_notice=True)
    pair.renew(0.1, noticed)
    assert pair.stored == [replace(noticed, renewal=2)]


def test_a_failed_write_is_repeated_soon() -> None:
    pair = Pair()
    pair.store.should_fail = lambda: True
    assert pair.renew(0.0) < 1.0
    pair.store.should_fail = lambda: False
    pair.renew(1.0)
    assert pair.stored == [replace(READY, renewal=2)]


def test_a_report_is_deleted_once_the_agent_has_joined() -> None:
    pair = Pair()
    pair.reporter.withdraw(0.0)
    pair.renew(0.0)
    pair.store.should_fail = lambda: True
    pair.reporter.withdraw(1.0)
    pair.store.should_fail = lambda: False
    pair.reporter.withdraw(2.0)
    assert pair.stored == []
    pair.renew(3.0)
    assert pair.stored == [replace(READY, renewal=2)], "the run has left its network again"


def test_a_report_is_deleted_after_its_write() -> None:
    store, calls = MemoryStore(), DeferredCalls()
    reporter = StandbyReporter(Ledger(store, RUN_ID, an_agent_id(1)), calls)
    reporter.report(READY, INTERVAL_S, 0.0)
    reporter.withdraw(1.0)
    calls.complete()
    reporter.withdraw(2.0)
    calls.complete()
    assert list(store.list()) == []


def test_a_report_does_not_wait_for_its_write() -> None:
    store, calls = MemoryStore(), DeferredCalls()
    reporter = StandbyReporter(Ledger(store, RUN_ID, an_agent_id(1)), calls)
    assert reporter.report(READY, INTERVAL_S, 0.0) == float("inf")
    noticed = replace(READY, has_notice=True)
    assert reporter.report(noticed, INTERVAL_S, 1.0) == float("inf"), "one write at a time"
    calls.complete()
    assert reporter.report(noticed, INTERVAL_S, 2.0) == 2.0 + INTERVAL_S
    reporter.report(noticed, INTERVAL_S, 2.1)
    assert len(calls.pending) == 1, "the change follows"


# --- the leader -----------------------------------------------------------------------------------


def test_an_agent_is_ready_once_its_report_was_renewed() -> None:
    pair = Pair()
    pair.renew(0.0)
    assert pair.read(1.0)
    assert list(pair.watch.statuses) == [an_agent_id(1)]
    assert not pair.is_ready(), "the report may be old"
    pair.renew(5.0)
    assert pair.read(6.0)
    assert pair.is_ready()
    pair.renew(10.0)
    assert not pair.read(11.0), "a renewal is no change"


def test_reports_are_read_at_an_interval() -> None:
    pair = Pair()
    pair.renew(0.0)
    pair.read(0.0)
    pair.renew(0.1, replace(READY, is_warm=False))
    assert not pair.read(1.9)
    assert pair.watch.next_wake() == 2.0
    assert pair.read(2.0)


def test_without_any_agent_reports_are_read_rarely() -> None:
    pair = Pair()
    pair.read(0.0)
    assert pair.watch.next_wake() == 10.0


def test_an_agent_that_does_not_renew_its_report_is_forgotten() -> None:
    pair = Pair()
    for now in range(0, 12, 2):
        pair.renew(now)
        pair.read(now)
    assert pair.is_ready()
    for now in range(12, 28, 2):
        assert not pair.read(now)
    assert pair.read(28), "the last renewal was at 6 s"
    assert pair.watch.statuses == {}


def test_a_storage_that_is_not_available_counts_for_no_agent() -> None:
    pair = Pair()
    for now in range(0, 12, 2):
        pair.renew(now)
        pair.read(now)
    pair.store.should_fail = lambda: True
    for now in range(12, 112, 2):
        assert not pair.read(now)
    pair.store.should_fail = lambda: False
    pair.read(112)
    assert pair.is_ready()


def test_an_older_report_that_is_written_again_is_no_renewal() -> None:
    pair = Pair()
    pair.renew(0.0)
    old = pair.store.get(".spotfit/standby/t-1/a1.json")
    pair.renew(5.0)
    pair.read(6.0)
    pair.store.put(".spotfit/standby/t-1/a1.json", old)
    pair.read(8.0)
    assert not pair.is_ready()


def test_without_groups_nothing_is_read_and_known_agents_are_forgotten() -> None:
    pair = Pair()
    pair.renew(0.0)
    pair.read(0.0)
    pair.tokens = []
    pair.store.should_fail = lambda: True
    assert pair.read(2.0)
    assert pair.watch.statuses == {}
    assert pair.store.failure_count == 0
    pair.store.should_fail = lambda: False
    pair.tokens = [TOKEN]
    pair.renew(5.0)
    pair.read(6.0)
    assert not pair.is_ready(), "it is not proven again"


def test_reports_of_other_groups_are_not_read() -> None:
    pair = Pair()
    pair.renew(0.0)
    pair.tokens = [Token("t-other")]
    assert not pair.read(1.0)


def test_a_read_is_awaited() -> None:
    calls = DeferredCalls()
    watch = StandbyWatch(Ledger(MemoryStore(), RUN_ID, an_agent_id(0)), calls, 0.0)
    assert not watch.read(lambda: [TOKEN], TIMEOUT_S, 0.0)
    assert watch.next_wake() == float("inf")
    calls.complete()
    assert not watch.read(list, TIMEOUT_S, 1.0)
    assert watch.next_wake() == 11.0
