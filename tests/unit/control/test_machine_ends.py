"""The ends of machines that are released at the end of a fit, recorded by a supervising process."""

from __future__ import annotations

from spotfit.control.background_calls import BackgroundCalls, SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.machine_ends import WAIT_S, EndRecorder
from spotfit.core.errors import MissingExtraError
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    MachinesObserved,
    MachineTimes,
)
from spotfit.model.group import GroupHandle, NodeState, NodeStatus
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, TOKEN, a_request, a_spec, an_agent_id
from tests.unit.control.fake_provisioner import LAUNCH, DeferredCalls, FakeProvisioner

PRICE = Price(usd_per_hour=1.0, source="given", as_of_s=0.0)
OFFER = Offer(name="spot", provisioner="local", market=Market.SPOT, price=PRICE)
RUNNING = NodeStatus(state=NodeState.RUNNING, started_at_ms=100)
GONE = NodeStatus(state=NodeState.GONE, started_at_ms=100, ended_at_ms=900)


class EndHarness:
    """A fit that has ended; its group of one machine was released and is still running."""

    def __init__(self, calls: BackgroundCalls | None = None, *offers: Offer) -> None:
        self.cloud = FakeProvisioner(status_lag_s=0.0)
        self.open_error: Exception | None = None
        self.events: list[JournalEvent] = []
        self.ledger = Ledger(MemoryStore(), RUN_ID, an_agent_id(0))
        plan = self.cloud.plan(a_request(workers=1))
        handle = self.cloud.submit(plan, LAUNCH)
        assert isinstance(handle, GroupHandle)
        self.cloud.groups[TOKEN] = [RUNNING]
        start = MachineTimes(node=0, started_ms=(100, 100))
        for event in (
            FitStarted(spec=a_spec(cost=CostSpec(offers=offers))),
            GroupPlanned(request=a_request(workers=1), plan=plan),
            GroupSubmitted(token=TOKEN, handle=handle),
            FitEnded(outcome="finished"),
            GroupsReleased(token=TOKEN, times={TOKEN: (start,)}),
        ):
            self.ledger.append(event, after=self.ledger.journal_view)
        self.ledger.set_entry_listener(lambda _slot, _body, entry: self.events.append(entry.event))
        writer = JournalWriter(self.ledger, SynchronousCalls())
        writer.advance(0.0)
        self.recorder = EndRecorder(writer, self.open, calls or SynchronousCalls())

    def open(self, name: str, options: dict[str, object]) -> FakeProvisioner:
        if self.open_error is not None:
            raise self.open_error
        return self.cloud


ENDED = MachinesObserved(times={TOKEN: (MachineTimes(node=0, ended_ms=(900, 900)),)})


def test_the_end_is_recorded_once_the_backend_reports_it() -> None:
    harness = EndHarness()
    harness.recorder.observe(0.0)
    assert harness.events == []
    harness.cloud.groups[TOKEN] = [GONE]
    harness.recorder.observe(0.5)
    assert harness.events == [], "the backend is observed once a second"
    assert harness.recorder.wake_at(0.5) == 1.0
    harness.recorder.observe(1.0)
    assert harness.events == [ENDED]
    assert harness.ledger.view.usage.ending_groups == {}
    assert harness.recorder.wake_at(1.0) == float("inf")


def test_a_call_in_flight_is_awaited() -> None:
    calls = DeferredCalls()
    harness = EndHarness(calls)
    harness.cloud.groups[TOKEN] = [GONE]
    harness.recorder.observe(0.0)
    assert 0.0 < harness.recorder.wake_at(0.0) < 1.0
    calls.complete()
    harness.recorder.observe(0.2)
    assert harness.events == [ENDED]


def test_an_end_that_is_recorded_meanwhile_is_not_recorded_again() -> None:
    calls = DeferredCalls()
    harness = EndHarness(calls)
    harness.cloud.groups[TOKEN] = [GONE]
    harness.recorder.observe(0.0)
    harness.ledger.append(ENDED, after=harness.ledger.journal_view)
    calls.complete()
    harness.recorder.observe(0.2)
    assert harness.events == [ENDED]


def test_a_process_waits_some_time_for_ends_with_a_known_price() -> None:
    for offers, waits in (((), False), ((OFFER,), True)):
        harness = EndHarness(None, *offers)
        harness.recorder.observe(0.0)
        assert harness.recorder.is_waiting(WAIT_S - 0.1) == waits
        assert not harness.recorder.is_waiting(WAIT_S)


def test_a_transient_error_is_retried() -> None:
    harness = EndHarness(None, OFFER)
    harness.cloud.call_error = ConnectionError("reset")
    harness.recorder.observe(0.0)
    harness.cloud.call_error = None
    harness.cloud.groups[TOKEN] = [GONE]
    harness.recorder.observe(1.0)
    assert harness.events == [ENDED]


def test_a_backend_that_cannot_be_opened_is_not_observed_again() -> None:
    harness = EndHarness(None, OFFER)
    harness.open_error = MissingExtraError("no package", do="install it")
    harness.recorder.observe(0.0)
    assert not harness.recorder.is_waiting(0.0)
    harness.open_error = None
    harness.recorder.observe(5.0)
    assert harness.cloud.observed_tokens == []


def test_nothing_is_observed_while_the_fit_is_active() -> None:
    harness = EndHarness(None, OFFER)
    harness.ledger.append(FitStarted(spec=a_spec()), after=harness.ledger.journal_view)
    harness.recorder.observe(0.0)
    assert harness.cloud.observed_tokens == []
    assert not harness.recorder.is_waiting(0.0)
