"""Tests of the journal poller: how often an agent reads the journal."""

from __future__ import annotations

import pytest

from spotfit.agent.agent import FAST_POLL_S, JournalPoller
from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.core.errors import TransientStoreError
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitStarted
from spotfit.model.spec import RunTiming
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_spec, an_agent_id

TIMING = RunTiming(journal_poll_interval_s=2.0, lease_timeout_s=20.0)


class FlakyReadStore(MemoryStore):
    """A store whose reads fail on demand."""

    is_down = False

    def get(self, key: str) -> bytes:
        if self.is_down:
            raise TransientStoreError("no answer")
        return super().get(key)


class DirectoryStore(FlakyReadStore):
    """A store in memory that looks like a directory."""

    url = "/shared/runs/digits"


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
    store.is_down = True
    poll(poller, 100.0)
    poll(poller, 130.0)
    assert poller.last_contact_at == 100.0  # the start
    store.is_down = False
    poll(poller, 200.0)
    assert poller.last_contact_at == 200.0


def test_a_journal_that_was_never_read_is_an_error_after_30_s() -> None:
    poller, store = make_poller()
    store.is_down = True
    poll(poller, 100.0)
    assert poller.first_read_error(130.0) == ""
    assert "no answer" in poller.first_read_error(130.1)


def test_an_outage_after_the_first_read_is_no_start_error() -> None:
    poller, store = make_poller()
    poll(poller, 100.0)
    store.is_down = True
    poll(poller, 105.0)
    assert poller.first_read_error(200.0) == ""


def test_a_first_read_that_is_only_slow_is_no_start_error() -> None:
    poller, _ = make_poller()
    assert poller.first_read_error(200.0) == ""


def test_a_directory_without_the_run_is_missing_after_30_seconds() -> None:
    poller, _ = make_poller(DirectoryStore())
    poll(poller, 100.0)
    assert not poller.is_run_missing(129.9)
    assert poller.is_run_missing(130.0)


def test_a_bucket_without_the_run_is_not_missing() -> None:
    poller, _ = make_poller()
    poll(poller, 100.0)
    assert not poller.is_run_missing(500.0)


def test_a_directory_with_the_run_is_not_missing() -> None:
    poller, store = make_poller(DirectoryStore())
    start_fit(store)
    poll(poller, 100.0)
    assert not poller.is_run_missing(500.0)


def test_a_directory_that_cannot_be_read_is_not_missing() -> None:
    poller, store = make_poller(DirectoryStore())
    store.is_down = True
    poll(poller, 100.0)
    assert not poller.is_run_missing(500.0), "the file system may be mounted later"
