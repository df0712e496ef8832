"""The journal: one entry per slot, reads in order, and errors for invalid entries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.core.codec import encode
from spotfit.core.errors import JournalError, TransientStoreError
from spotfit.core.ids import RunId, Token
from spotfit.ledger import journal, keys
from spotfit.ledger.journal import Journal, check_no_gaps
from spotfit.model.events import (
    CancelRequested,
    FitStarted,
    GroupsReleased,
    JournalEntry,
    LeaderElected,
)
from spotfit.model.view import JournalView, View
from spotfit.store.api import ObjectInfo
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import a_spec, an_agent_id, an_entry
from tests.unit.store.faulty_stores import DamagedResponses

START = an_entry(FitStarted(spec=a_spec()))
A_LEADS = an_entry(LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address="h:1"))
B_LEADS = an_entry(
    LeaderElected(leader=an_agent_id(1), epoch=1, coordinator_address="h:2"), author=an_agent_id(1)
)
CANCEL = an_entry(CancelRequested(reason="enough"))


class FailingStore(MemoryStore):
    """Fails once on demand, before or after the write."""

    fails: str = ""
    unreadable_key: str = ""

    def get(self, key: str) -> bytes:
        if key == self.unreadable_key:
            raise TransientStoreError("no answer")
        return super().get(key)

    def create(self, key: str, body: bytes) -> None:
        fails, self.fails = self.fails, ""
        if fails != "before":
            super().create(key, body)
        if fails:
            raise TransientStoreError("no answer")


def test_an_appended_entry_is_read_by_other_readers() -> None:
    store = MemoryStore()
    writer, reader = Journal(store), Journal(store)
    writer.append(START, writer.view)
    writer.append(A_LEADS, writer.view)
    assert reader.catch_up() == writer.view
    assert reader.view.is_leader(an_agent_id(0))


def test_of_two_entries_for_one_slot_one_wins_and_both_writers_read_it() -> None:
    store = MemoryStore()
    one, two = Journal(store), Journal(store)
    one.append(START, one.view)
    before = two.catch_up()
    assert one.append(A_LEADS, before).is_leader(an_agent_id(0))
    assert two.append(B_LEADS, before).is_leader(an_agent_id(0)), (
        "the loser reads the winning entry"
    )
    assert one.view == two.view


def test_an_entry_decided_from_an_old_view_is_dropped() -> None:
    store = MemoryStore()
    journal = Journal(store)
    old = journal.append(START, journal.view)
    journal.append(A_LEADS, old)
    after = journal.append(CANCEL, old)
    assert after.cancel_reason is None
    assert after.next_slot == 2


@pytest.mark.parametrize(("fails", "event_of"), [("before", False), ("after", True)])
def test_an_append_with_a_lost_answer_is_found_in_the_journal(fails: str, event_of: bool) -> None:
    store = FailingStore()
    journal = Journal(store)
    store.fails = fails
    view = journal.append(START, journal.view)
    assert view.is_active == event_of
    again = journal.append(START, view) if not event_of else view
    assert (again.next_slot, again.fit_count) == (1, 1), "it is in the journal exactly once"


def test_the_listener_receives_every_entry_once_and_in_order() -> None:
    received: list[tuple[int, JournalEntry]] = []
    journal = Journal(MemoryStore())

    def listen(slot: int, body: bytes, entry: JournalEntry) -> None:
        assert body == encode(entry)
        assert journal.view.next_slot == slot + 1, (
            "the view is updated before the listener is called"
        )
        received.append((slot, entry))

    journal.on_entry = listen
    for entry in (START, A_LEADS, CANCEL):
        journal.append(entry, journal.view)
    journal.catch_up()
    assert received == [(0, START), (1, A_LEADS), (2, CANCEL)]


def test_a_received_copy_replaces_a_read() -> None:
    store = MemoryStore()
    writer, reader = Journal(store), Journal(UnreadableStore())
    writer.append(START, writer.view)
    assert reader.apply_entry(0, encode(START)).is_active, "no read was needed"
    assert reader.apply_entry(0, encode(START)).next_slot == 1, "a repeated copy is ignored"


def test_a_copy_of_a_later_entry_is_ignored() -> None:
    reader = Journal(UnreadableStore())
    assert reader.apply_entry(2, encode(CANCEL)) == JournalView()


def test_a_page_can_be_read_in_one_thread_and_folded_in_another() -> None:
    store = MemoryStore()
    writer, reader = Journal(store), Journal(store)
    for entry in (START, A_LEADS):
        writer.append(entry, writer.view)
    pages = reader.read(0)
    assert reader.view == JournalView(), "reading does not change the view"
    reader.apply_entry(0, encode(START))
    assert reader.apply_page(pages), "an entry received meanwhile is folded once"
    assert reader.view == writer.view


def test_entries_read_before_a_store_error_are_kept() -> None:
    store = FailingStore()
    writer, reader = Journal(store), Journal(store)
    for entry in (START, A_LEADS, CANCEL):
        writer.append(entry, writer.view)
    store.unreadable_key = keys.entry(2)
    assert not reader.apply_page(reader.read(0)), "there may be more"
    assert reader.view.next_slot == 2
    with pytest.raises(TransientStoreError):
        reader.catch_up()
    store.unreadable_key = ""
    assert reader.catch_up() == writer.view


def test_an_entry_is_read_again_if_its_first_read_is_damaged() -> None:
    store = DamagedResponses(0)
    writer, reader = Journal(store), Journal(store)
    for entry in (START, A_LEADS, CANCEL):
        writer.append(entry, writer.view)
    store.reads.clear()
    store.damaged_reads = 1
    assert reader.catch_up() == writer.view


class UnreadableStore(MemoryStore):
    """A store whose reads fail the test."""

    def get(self, key: str) -> bytes:
        raise AssertionError(f"read {key}")


@pytest.mark.parametrize(
    "body",
    [
        encode(START)[:-20],
        b"",
        b'{"slot": 3}',
        b"\x80\x04\x95",
        b'{"run_id":"\xff"}',
        encode(START).replace(b"fit_started", b"moon_landed"),
        encode(START).replace(b"min_workers", b"least_workers"),
    ],
    ids=["cut", "empty", "foreign", "a pickle", "no text", "unknown event", "old field name"],
)
def test_an_undecodable_entry_raises_with_its_slot(body: bytes) -> None:
    store = MemoryStore()
    journal = Journal(store)
    journal.append(START, journal.view)
    store.put(keys.entry(1), body)
    with pytest.raises(JournalError, match=r"Journal entry 1 in .* cannot be decoded") as error:
        journal.catch_up()
    assert "the checkpoints in the folder are not changed" in error.value.do
    assert journal.view.next_slot == 1, "earlier entries stay folded"


def test_an_entry_of_another_run_raises() -> None:
    store = MemoryStore()
    journal = Journal(store)
    journal.append(START, journal.view)
    store.put(keys.entry(1), encode(an_entry(CANCEL.event, run_id=RunId("f" * 32))))
    with pytest.raises(JournalError, match="two runs were written to one folder"):
        journal.catch_up()


# --- long runs -----------------------------------------------------------------------------------


@pytest.fixture
def long_run() -> tuple[MemoryStore, Journal]:
    """A journal with two cached views and a few further entries."""
    store = MemoryStore()
    writer = Journal(store)
    writer.append(START, writer.view)
    for _ in range(2 * journal.VIEW_CACHE_INTERVAL + 5):
        writer.append(CANCEL, writer.view)
        assert isinstance(writer.view, View)
        if journal.is_cache_due(writer.view):
            journal.write_cached_view(store, writer.cached_view())
    return store, writer


def test_a_new_reader_starts_at_the_newest_cached_view(
    long_run: tuple[MemoryStore, Journal],
) -> None:
    store, writer = long_run
    for slot in range(2 * journal.VIEW_CACHE_INTERVAL):
        if slot != journal.VIEW_CACHE_INTERVAL:  # its existence shows that there are cached views
            store.delete(keys.entry(slot))
    assert Journal(store).catch_up() == writer.view


def test_without_cached_views_all_entries_are_read(long_run: tuple[MemoryStore, Journal]) -> None:
    store, writer = long_run
    for found in list(store.list(".spotfit/views")):
        store.delete(found.key)
    assert Journal(store).catch_up() == writer.view


# --- gaps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [0, 1])
def test_a_gap_in_the_journal_raises(slot: int) -> None:
    store = MemoryStore()
    for number in range(3):
        store.put(keys.entry(number), encode(an_entry(FitStarted(spec=a_spec()))))
    check_no_gaps(store)
    store.delete(keys.entry(slot))
    with pytest.raises(JournalError, match=f"Journal entry {slot} in .* is missing"):
        check_no_gaps(store)


def test_the_check_for_gaps_starts_at_the_newest_cached_view(
    long_run: tuple[MemoryStore, Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = long_run
    listed: list[str] = []
    list_keys = store.list

    def record(prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        for found in list_keys(prefix, after=after):
            listed.append(found.key)
            yield found

    monkeypatch.setattr(store, "list", record)
    check_no_gaps(store)
    entries = [key for key in listed if keys.is_entry(key)]
    newest = 2 * journal.VIEW_CACHE_INTERVAL
    assert entries == [keys.entry(slot) for slot in range(newest, writer.view.next_slot)]


@pytest.mark.parametrize("slot", [0, 2 * journal.VIEW_CACHE_INTERVAL + 1])
def test_a_gap_that_a_reader_would_meet_raises_in_a_long_journal(
    long_run: tuple[MemoryStore, Journal], slot: int
) -> None:
    store, _ = long_run
    store.delete(keys.entry(slot))
    with pytest.raises(JournalError, match=f"Journal entry {slot} in .* is missing"):
        check_no_gaps(store)


def test_an_empty_journal_has_no_gaps() -> None:
    check_no_gaps(MemoryStore())


def test_an_entry_with_an_unknown_token_raises() -> None:
    store = MemoryStore()
    store.put(keys.entry(0), encode(an_entry(GroupsReleased(token=Token("t-never-asked-for")))))
    with pytest.raises(
        JournalError,
        match=r"Journal entry 0 in memory://private references unknown 't-never-asked-for'",
    ):
        Journal(store).catch_up()


class StaleListing(MemoryStore):
    """A store whose listing lacks an entry that exists."""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        found = super().list(prefix, after=after)
        return (info for info in found if info.key != keys.entry(1))


def test_an_entry_that_is_missing_in_the_listing_only_is_no_gap() -> None:
    store = StaleListing()
    for slot in range(3):
        store.create(keys.entry(slot), b"{}")
    check_no_gaps(store)
    store.delete(keys.entry(1))
    with pytest.raises(JournalError, match=r"entry 1 in .* is missing"):
        check_no_gaps(store)


@pytest.mark.parametrize("name", [".DS_Store", "00000000000000000000.json.bak", "notes"])
def test_other_files_beside_the_entries_are_ignored(name: str) -> None:
    store = MemoryStore()
    store.create(keys.entry(0), b"{}")
    store.create(f"{keys.JOURNAL}{name}", b"")
    check_no_gaps(store)
