"""Whether the journal of an active run still exists."""

from __future__ import annotations

import pytest

from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.journal_presence import JournalPresence
from spotfit.core.errors import (
    BucketNotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.core.ids import RunId
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import CancelRequested, FitEnded, FitStarted
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_spec, an_agent_id
from tests.unit.control.fake_provisioner import DeferredCalls


class OutageStore(MemoryStore):
    """A store whose reads fail on demand."""

    error: StoreError | None = None

    def get(self, key: str) -> bytes:
        if self.error is not None:
            raise self.error
        return super().get(key)


class WatchedRun:
    """A run with two entries, watched since 0 s."""

    def __init__(self, calls: DeferredCalls | None = None) -> None:
        self.store = OutageStore()
        self.ledger = Ledger(self.store, RUN_ID, an_agent_id(0))
        self.presence = JournalPresence(self.ledger, calls or SynchronousCalls())
        self.append(FitStarted(spec=a_spec()), CancelRequested(reason="later"))
        self.presence.check_if_due(0.0)

    def append(self, *events: FitStarted | CancelRequested | FitEnded) -> None:
        for event in events:
            self.ledger.append(event, after=self.ledger.catch_up())

    def missing_since(self, now: float) -> float | None:
        self.presence.check_if_due(now)
        return self.presence.missing_since

    def delete(self, *slots: int) -> None:
        for slot in slots:
            self.store.delete(keys.entry(slot))


def test_a_deleted_journal_is_missing_until_it_is_restored() -> None:
    run = WatchedRun()
    body = run.store.get(keys.entry(0))
    run.delete(0, 1)
    assert run.missing_since(59.0) is None, "checked once a minute"
    assert run.missing_since(60.0) == 60.0
    assert run.presence.wake_at == 65.0
    assert run.missing_since(65.0) == 60.0
    run.store.put(keys.entry(0), body)
    assert run.missing_since(70.0) is None
    assert run.presence.wake_at == float("inf")


def test_an_entry_that_was_written_after_the_deletion_is_no_journal() -> None:
    run = WatchedRun()
    assert run.missing_since(60.0) is None
    run.delete(0, 1)
    run.ledger.create_entry(2, run.ledger.encode_entry(CancelRequested(reason="now")))
    run.ledger.catch_up()
    assert run.missing_since(120.0) == 120.0


def test_a_bucket_may_delete_old_entries() -> None:
    run = WatchedRun()
    run.delete(0)
    assert run.missing_since(60.0) is None


def test_a_journal_of_another_run_is_not_that_of_the_run() -> None:
    run = WatchedRun()
    run.delete(0, 1)
    other = Ledger(run.store, RunId("r-other"), an_agent_id(1))
    other.append(FitStarted(spec=a_spec()), after=other.catch_up())
    assert run.missing_since(60.0) == 60.0


def test_an_undecodable_entry_is_not_missing() -> None:
    run = WatchedRun()
    run.store.put(keys.entry(0), b"damaged")
    assert run.missing_since(60.0) is None


@pytest.mark.parametrize("error", [TransientStoreError, StorePermissionError, StoreError])
def test_an_outage_shows_nothing(error: type[StoreError]) -> None:
    run = WatchedRun()
    run.store.error = error("no answer")
    assert run.missing_since(60.0) is None
    run.store.error = None
    run.delete(0, 1)
    assert run.missing_since(120.0) == 120.0
    run.store.error = error("no answer")
    assert run.missing_since(900.0) == 120.0
    assert run.presence.missing_s == 0.0, "an outage does not count"
    run.store.error = None
    assert run.missing_since(905.0) == 120.0
    assert run.presence.missing_s == 785.0


def test_a_journal_of_a_deleted_bucket_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    run = WatchedRun()
    run.store.error = BucketNotFoundError("The bucket does not exist.")
    assert run.missing_since(60.0) == 60.0
    assert "journal.missing" in caplog.messages


def test_nothing_is_checked_after_the_end_of_the_fit() -> None:
    run = WatchedRun()
    run.append(FitEnded(outcome="cancelled", reason="enough"))
    run.delete(0, 1, 2)
    assert run.missing_since(60.0) is None
    assert run.presence.wake_at == float("inf")


def test_nothing_is_checked_before_the_run_was_read() -> None:
    presence = JournalPresence(Ledger(MemoryStore(), RUN_ID, an_agent_id(0)), SynchronousCalls())
    presence.check_if_due(60.0)
    presence.check_if_due(120.0)
    assert presence.missing_since is None


def test_a_missing_journal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    run = WatchedRun()
    run.delete(0, 1)
    for now in (60.0, 65.0, 70.0):
        run.presence.check_if_due(now)
    assert caplog.messages.count("journal.missing") == 1


def test_a_check_does_not_block() -> None:
    calls = DeferredCalls()
    run = WatchedRun(calls)
    run.delete(0, 1)
    assert run.missing_since(60.0) is None
    calls.complete()
    assert run.missing_since(61.0) == 61.0
