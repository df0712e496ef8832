"""The journal writer: entries with unknown outcomes, retries, and non-blocking reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.core.errors import (
    AlreadyExistsError,
    JournalError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import CancelRequested, FitEnded, FitStarted, JournalEvent, LeaderElected
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_spec, an_agent_id
from tests.unit.control.fake_provisioner import DeferredCalls

CANCEL = CancelRequested(reason="enough")
B_LEADS = LeaderElected(leader=an_agent_id(1), epoch=2, coordinator_address="h:2")


class FailingStore(MemoryStore):
    """Fails calls on demand: `lost_requests` have no effect, `lost_responses` have one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception = TransientStoreError("no answer")
        self.lost_requests = 0
        self.lost_responses = 0
        self.unreadable = False
        self.reads = 0
        self.creates: list[bytes] = []

    def get(self, key: str) -> bytes:
        self.reads += 1
        if self.unreadable:
            raise TransientStoreError("unreadable")
        return super().get(key)

    def create(self, key: str, body: bytes) -> None:
        self.creates.append(body)
        if self.lost_requests:
            self.lost_requests -= 1
            raise self.error
        super().create(key, body)
        if self.lost_responses:
            self.lost_responses -= 1
            raise self.error


class LeaderHarness:
    """The writer of leader a0, and the ledger of another process."""

    def __init__(self, *, slow: bool = False) -> None:
        self.store = FailingStore()
        self.other = Ledger(self.store, RUN_ID, an_agent_id(1))
        self.append_as_other(
            FitStarted(spec=a_spec()),
            LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address="h:1"),
        )
        self.calls = DeferredCalls()
        """Only slow calls are in flight."""
        self.times = iter(range(1000))
        self.ledger = Ledger(self.store, RUN_ID, an_agent_id(0), wall_ms=lambda: next(self.times))
        self.writer = JournalWriter(self.ledger, self.calls if slow else SynchronousCalls())
        self.store.creates.clear()
        if not slow:
            self.writer.advance(0.0)

    def append_as_other(self, *events: JournalEvent) -> None:
        for event in events:
            self.other.append(event, after=self.other.catch_up())

    def is_settled(self) -> bool:
        """Whether the writer is settled."""
        return self.writer.is_settled

    def finish(self, now: float) -> None:
        """Complete all calls in flight and process their results."""
        self.calls.complete()
        self.writer.advance(now)

    def advance_until(self, condition: Callable[[], object]) -> float:
        now = 0.0
        while not condition():
            now += 0.05
            assert now < 60.0
            try:
                self.writer.advance(now)
            except TransientStoreError:
                continue
        return now


# --- reading -------------------------------------------------------------------------------------


def test_a_writer_is_not_settled_before_the_journal_was_read_to_its_end() -> None:
    harness = LeaderHarness(slow=True)
    assert not harness.is_settled()
    harness.writer.advance(0.0)
    assert not harness.is_settled(), "the caller is not blocked"
    harness.finish(0.1)
    assert harness.is_settled()
    assert harness.writer.view == harness.other.catch_up()
    assert harness.writer.last_read_at == 0.1


def test_nothing_is_decided_while_the_journal_is_missing() -> None:
    harness = LeaderHarness()
    deleted = {key: harness.store.get(key) for key in map(keys.entry, range(2))}
    for key in deleted:
        harness.store.delete(key)
    harness.writer.advance(60.0)
    assert harness.writer.missing_since == 60.0
    assert not harness.is_settled()
    for key, body in deleted.items():
        harness.store.put(key, body)
    harness.writer.advance(harness.writer.wake_at)
    assert harness.is_settled()


def test_no_entry_is_written_while_the_journal_is_missing() -> None:
    harness = LeaderHarness()
    harness.store.lost_requests = 2
    harness.writer.write(CANCEL, 59.9)
    for key in map(keys.entry, range(2)):
        harness.store.delete(key)
    with pytest.raises(TransientStoreError):
        harness.writer.advance(60.0)
    harness.store.creates.clear()
    harness.writer.advance(70.0)
    assert harness.writer.missing_since is not None
    assert harness.store.creates == []
    assert harness.writer.wake_at == 75.0


def test_a_read_requested_during_a_read_is_repeated() -> None:
    harness = LeaderHarness(slow=True)
    harness.writer.advance(0.0)
    harness.calls.complete()  # the read is done before the other process writes
    harness.append_as_other(CANCEL)
    harness.writer.request_read()
    harness.writer.advance(0.1)
    assert harness.writer.view.cancel_reason is None
    harness.finish(0.2)
    assert harness.writer.view.cancel_reason == "enough"


def test_a_received_copy_replaces_a_read_and_a_gap_triggers_one() -> None:
    harness = LeaderHarness()
    harness.append_as_other(CANCEL)
    read = harness.store.reads
    harness.writer.apply_entry(2, harness.store.get(keys.entry(2)))
    harness.writer.advance(1.0)
    assert harness.writer.view.cancel_reason == "enough"
    assert harness.store.reads == read + 1, "one read by the test itself"
    harness.append_as_other(B_LEADS, CANCEL)
    harness.writer.apply_entry(4, harness.store.get(keys.entry(4)))
    assert not harness.is_settled(), "a later entry is known"
    harness.writer.advance(1.0)
    assert harness.is_settled()
    assert harness.writer.view.next_slot == 5


def test_a_failed_read_is_retried_after_a_delay() -> None:
    harness = LeaderHarness()
    harness.store.unreadable = True
    harness.writer.request_read()
    with pytest.raises(TransientStoreError):
        harness.writer.advance(1.0)
    read = harness.store.reads
    harness.writer.advance(1.05)
    assert harness.store.reads == read, "one error per failed call, then a delay"
    assert harness.writer.wake_at == pytest.approx(1.1)
    harness.store.unreadable = False
    harness.writer.advance(1.1)
    assert harness.writer.last_read_at == 1.1
    assert harness.is_settled(), "a failed read does not invalidate the view"


def test_an_undecodable_entry_raises_after_the_earlier_ones_were_folded() -> None:
    harness = LeaderHarness(slow=True)
    harness.store.put(keys.entry(2), b"junk")
    harness.writer.advance(0.0)
    harness.finish(0.1)
    assert harness.ledger.journal_view.next_slot == 2
    assert not harness.is_settled()
    with pytest.raises(JournalError, match="entry 2"):
        harness.finish(0.2)


# --- duration of the fit -------------------------------------------------------------------------


def test_durations_of_several_processes_are_added() -> None:
    """Their clocks are unrelated: each one counts from the entries that it has received."""
    harness = LeaderHarness()
    first = harness.writer
    first.write(CANCEL, 90.0)  # the journal was read at 0
    assert harness.ledger.view.elapsed_s == 90.0
    second = JournalWriter(Ledger(harness.store, RUN_ID, an_agent_id(1)), SynchronousCalls())
    second.advance(5000.0)
    assert second.elapsed_s(5000.0) == 90.0
    second.write(CANCEL, 5030.0)
    assert second.ledger.view.elapsed_s == 120.0
    first.request_read()
    first.advance(125.0)
    assert first.elapsed_s(125.0) == 125.0, "it has measured more itself"


def test_the_duration_counts_from_the_start_of_each_fit() -> None:
    harness = LeaderHarness()
    harness.writer.write(CANCEL, 90.0)
    harness.append_as_other(FitEnded(outcome="cancelled"), FitStarted(spec=a_spec()))
    harness.writer.request_read()
    harness.writer.advance(200.0)
    assert harness.writer.elapsed_s(210.0) == 10.0


# --- writing -------------------------------------------------------------------------------------


def test_a_created_entry_needs_no_read() -> None:
    harness = LeaderHarness()
    read = harness.store.reads
    harness.writer.write(CANCEL, 1.0)
    assert harness.is_settled()
    assert harness.writer.view.cancel_reason == "enough"
    assert harness.store.reads == read
    assert harness.other.catch_up() == harness.writer.view


def test_a_writer_is_not_settled_while_an_entry_is_in_flight() -> None:
    harness = LeaderHarness(slow=True)
    harness.writer.advance(0.0)
    harness.finish(0.1)
    harness.writer.write(CANCEL, 1.0)
    assert not harness.is_settled()
    with pytest.raises(AssertionError):
        harness.writer.write(B_LEADS, 1.1)
    harness.writer.advance(30.0)
    assert not harness.is_settled(), "however long it takes"
    harness.finish(31.0)
    assert harness.is_settled()
    assert harness.writer.view.cancel_reason == "enough"


def test_a_writer_that_lost_the_slot_reads_the_winning_entry() -> None:
    harness = LeaderHarness()
    harness.append_as_other(B_LEADS)
    harness.writer.write(CANCEL, 1.0)
    assert harness.is_settled()
    assert harness.writer.view.is_leader(an_agent_id(1))
    assert harness.writer.view.cancel_reason is None, "it was decided from an old view"


@pytest.mark.parametrize("sent", [True, False])
def test_the_same_bytes_are_offered_until_the_outcome_is_known(*, sent: bool) -> None:
    """A lost request may be executed late, so no other entry may be offered for the slot."""
    harness = LeaderHarness()
    harness.store.lost_responses, harness.store.lost_requests = (1, 0) if sent else (0, 3)
    harness.writer.write(CANCEL, 0.0)
    assert not harness.is_settled()
    harness.advance_until(harness.is_settled)
    assert harness.writer.view.cancel_reason == "enough"
    assert len(harness.store.creates) >= 2
    assert len(set(harness.store.creates)) == 1, "the same bytes"
    assert harness.other.catch_up() == harness.writer.view


def test_a_pending_entry_is_dropped_once_another_has_the_slot() -> None:
    harness = LeaderHarness()
    harness.store.lost_requests = 1
    harness.writer.write(CANCEL, 0.0)
    harness.append_as_other(B_LEADS)
    harness.advance_until(harness.is_settled)
    assert harness.writer.view == harness.other.catch_up()
    assert harness.writer.view.cancel_reason is None


def test_a_received_entry_settles_the_slot_before_the_store_answers() -> None:
    harness = LeaderHarness(slow=True)
    harness.writer.advance(0.0)
    harness.finish(0.1)
    harness.writer.write(CANCEL, 1.0)
    harness.append_as_other(B_LEADS)
    harness.writer.apply_entry(2, harness.store.get(keys.entry(2)))
    harness.writer.advance(1.1)
    assert harness.is_settled()
    assert harness.writer.view.is_leader(an_agent_id(1))


def test_a_transient_error_does_not_drop_a_pending_entry() -> None:
    harness = LeaderHarness()
    harness.store.error, harness.store.lost_requests = StorePermissionError("expired"), 1
    harness.writer.write(CANCEL, 0.0)
    with pytest.raises(StorePermissionError):
        harness.writer.advance(0.01)
    harness.writer.advance(1.0)
    assert harness.writer.view.cancel_reason == "enough"


def test_the_same_bytes_are_offered_again_if_a_taken_slot_is_free() -> None:
    """A store may answer a conflict with "exists" although nothing was written."""
    harness = LeaderHarness()
    harness.store.error, harness.store.lost_requests = AlreadyExistsError("conflict"), 1
    harness.writer.write(CANCEL, 0.0)
    harness.advance_until(harness.is_settled)
    assert harness.writer.view.cancel_reason == "enough"
    assert len(harness.store.creates) == 2
    assert len(set(harness.store.creates)) == 1, "the same bytes"
    assert harness.other.catch_up() == harness.writer.view


def test_offers_for_a_free_slot_that_is_reported_as_taken_back_off() -> None:
    harness = LeaderHarness()
    harness.store.error, harness.store.lost_requests = AlreadyExistsError("conflict"), 1000
    harness.writer.write(CANCEL, 0.0)
    now, pauses = 0.0, []
    for _ in range(7):
        pauses.append(round(harness.writer.wake_at - now, 3))
        now = harness.writer.wake_at
        harness.writer.advance(now)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_retry_delays_grow_up_to_a_limit() -> None:
    harness = LeaderHarness()
    harness.store.lost_requests = 1000
    harness.writer.write(CANCEL, 0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        pauses.append(round(harness.writer.wake_at - now, 3))
        now = harness.writer.wake_at
        with pytest.raises(TransientStoreError):
            harness.writer.advance(now)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def test_without_work_there_is_no_wake_up() -> None:
    harness = LeaderHarness()
    assert harness.writer.wake_at == float("inf")
    slow = LeaderHarness(slow=True)
    slow.writer.advance(0.0)
    assert slow.writer.wake_at == float("inf"), "background calls wake the caller"


def test_an_inconsistent_store_is_polled_with_backoff() -> None:
    harness = LeaderHarness()
    harness.writer.apply_entry(7, b"")
    harness.writer.advance(1.0)
    read = harness.store.reads
    harness.writer.advance(1.05)
    assert harness.store.reads == read
    assert harness.writer.wake_at > 1.05
    assert not harness.is_settled()
