"""Tests of the journal poller: how often an agent reads the journal."""

from __future__ import annotations

import pytest

from spotfit.agent.agent import FAST_POLL_S, JournalPoller
from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.core.errors import StoreError, StorePermissionError, TransientStoreError
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitStarted
from spotfit.model.group import Unreachable
from spotfit.model.spec import RunTiming
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_spec, an_agent_id

TIMING = RunTiming(journal_poll_interval_s=2.0, lease_timeout_s=20.0)


class FlakyReadStore(MemoryStore):
    """A store whose reads fail on demand."""

    url = "s3://runs/digits"
    error: StoreError | None = None

    def get(self, key: str) -> bytes:
        if self.error is not None:
            raise self.error
        return super().get(key)


def make_poller(
    store: FlakyReadStore | None = None,
) -> tuple[JournalPoller, FlakyReadStore]:
    store = store or FlakyReadStore()
    ledger = Ledger(store, RUN_ID, an_agent_id(0))
    return JournalPoller(JournalWriter(ledger, SynchronousCalls())), store


def start_fit(store: FlakyReadStore) -> None:
    """Start the fit from another process."""
    ledger = Ledger(store, RUN_ID, an_agent_id(1))
    ledger.create_entry(0, ledger.encode_entry(FitStarted(spec=a_spec(timing=TIMING))))


def poll(
    poller: JournalPoller, now: float, *, is_leading: bool = False, is_connected: bool = False
) -> float:
    """Poll, and return the time until the next poll."""
    poller.poll(now, is_leading=is_leading, is_connected=is_connected)
    return poller.next_poll_at(now, is_leading=is_leading, is_connected=is_connected) - now


def test_an_unknown_run_is_polled_fast() -> None:
    poller, store = make_poller()
    assert poll(poller, 100.0) == pytest.approx(FAST_POLL_S)
    start_fit(store)
    assert poll(poller, 101.0) == TIMING.journal_poll_interval_s


def test_an_agent_that_receives_entries_from_the_leader_reads_rarely() -> None:
    poller, store = make_poller()
    start_fit(store)
    assert poll(poller, 100.0, is_connected=True) == TIMING.lease_timeout_s
    assert poll(poller, 120.0, is_connected=True, is_leading=True) == TIMING.journal_poll_interval_s


def test_fast_polling_reads_at_once_and_ends_after_a_while() -> None:
    poller, store = make_poller()
    start_fit(store)
    poll(poller, 100.0)
    poller.start_fast_polling(100.5)
    assert poll(poller, 100.5) == pytest.approx(TIMING.journal_poll_interval_s / 5)
    assert poller.polled_at == 100.5
    assert poll(poller, 104.0) == TIMING.journal_poll_interval_s


def test_an_unavailable_store_is_no_contact() -> None:
    poller, store = make_poller()
    store.error = TransientStoreError("no answer")
    poll(poller, 100.0)
    poll(poller, 130.0)
    assert poller.last_contact_at == 100.0  # the start
    store.error = None
    poll(poller, 200.0)
    assert poller.last_contact_at == 200.0


@pytest.mark.parametrize(
    ("error", "timeout_s", "what"),
    [
        (TransientStoreError("no answer"), 30.0, Unreachable.STORAGE),
        # No waiting cures it.
        (StoreError("the bucket is in another region"), 5.0, Unreachable.ACCESS),
        # A role may appear late.
        (StorePermissionError("denied"), 30.0, Unreachable.ACCESS),
    ],
)
def test_a_storage_that_cannot_be_read_is_reported_after_a_timeout(
    error: StoreError, timeout_s: float, what: Unreachable
) -> None:
    poller, store = make_poller()
    store.error = error
    poll(poller, 100.0)
    assert poller.start_failure(100.0 + timeout_s) is None
    failure = poller.start_failure(100.1 + timeout_s)
    assert failure is not None
    assert failure.what is what
    assert f"within {timeout_s:.0f} s: {error.message}" in failure.reason


def test_an_outage_after_the_first_read_is_no_start_failure() -> None:
    poller, store = make_poller()
    start_fit(store)
    poll(poller, 100.0)
    store.error = TransientStoreError("no answer")
    poll(poller, 105.0)
    assert poller.start_failure(200.0) is None


def test_a_first_read_that_is_only_slow_is_no_start_failure() -> None:
    poller, _ = make_poller()
    assert poller.start_failure(200.0) is None


@pytest.mark.parametrize("url", ["/shared/runs/digits", "s3://runs/digits"])
def test_a_storage_without_the_run_is_reported_after_30_seconds(url: str) -> None:
    store = FlakyReadStore()
    store.url = url
    poller, _ = make_poller(store)
    poll(poller, 100.0)
    assert poller.start_failure(129.9) is None
    failure = poller.start_failure(130.0)
    assert failure is not None
    assert failure.what is Unreachable.RUN
    assert url in failure.reason


def test_a_storage_with_the_run_is_no_start_failure() -> None:
    poller, store = make_poller()
    start_fit(store)
    poll(poller, 100.0)
    assert poller.start_failure(500.0) is None
