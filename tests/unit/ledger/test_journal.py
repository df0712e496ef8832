"""The journal: one winner a slot, read in order, and loud about what is not ours."""

from __future__ import annotations

import pytest

from spotfit.core.codec import encode
from spotfit.core.errors import JournalError, TransientStoreError
from spotfit.core.ids import RunId, Token
from spotfit.ledger import keys, snapshot
from spotfit.ledger.journal import Journal, check_whole
from spotfit.model.events import CancelRequested, Entry, FitStarted, LeaderElected, Released
from spotfit.model.view import View
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import a_spec, an_agent, an_entry

START = an_entry(FitStarted(a_spec()))
A_LEADS = an_entry(LeaderElected(an_agent(0), 1, "h:1"))
B_LEADS = an_entry(LeaderElected(an_agent(1), 1, "h:2"), by=an_agent(1))
CANCEL = an_entry(CancelRequested("enough"))


class Moody(MemoryStore):
    """Fails once when told to, before or after it has written."""

    fails: str = ""
    deaf_to: str = ""

    def get(self, key: str) -> bytes:
        if key == self.deaf_to:
            raise TransientStoreError("no answer")
        return super().get(key)

    def create(self, key: str, body: bytes) -> None:
        fails, self.fails = self.fails, ""
        if fails != "before":
            super().create(key, body)
        if fails:
            raise TransientStoreError("no answer")


def test_what_one_wrote_another_reads() -> None:
    store = MemoryStore()
    writer, reader = Journal(store), Journal(store)
    writer.append(START, writer.view)
    writer.append(A_LEADS, writer.view)
    assert reader.catch_up() == writer.view
    assert reader.view.leads(an_agent(0))


def test_of_two_who_decide_from_the_same_view_one_wins_and_both_know() -> None:
    store = MemoryStore()
    one, two = Journal(store), Journal(store)
    one.append(START, one.view)
    before = two.catch_up()
    assert one.append(A_LEADS, before).leads(an_agent(0))
    assert two.append(B_LEADS, before).leads(an_agent(0)), "the loser reads who won"
    assert one.view == two.view


def test_a_decision_from_an_old_view_is_void() -> None:
    store = MemoryStore()
    journal = Journal(store)
    old = journal.append(START, journal.view)
    journal.append(A_LEADS, old)
    after = journal.append(CANCEL, old)
    assert after.cancelled is None
    assert after.next_slot == 2


@pytest.mark.parametrize(("fails", "written"), [("before", False), ("after", True)])
def test_an_answer_that_was_lost_is_read_from_the_journal(fails: str, written: bool) -> None:
    store = Moody()
    journal = Journal(store)
    store.fails = fails
    view = journal.append(START, journal.view)
    assert view.active == written
    again = journal.append(START, view) if not written else view
    assert (again.next_slot, again.fits) == (1, 1), "it stands there exactly once"


def test_whoever_listens_hears_every_entry_once_and_in_order() -> None:
    heard: list[tuple[int, Entry]] = []
    journal = Journal(MemoryStore())

    def listen(slot: int, body: bytes, entry: Entry) -> None:
        assert body == encode(entry)
        assert journal.view.next_slot == slot + 1, "the view is ahead of the news"
        heard.append((slot, entry))

    journal.heard = listen
    for entry in (START, A_LEADS, CANCEL):
        journal.append(entry, journal.view)
    journal.catch_up()
    assert heard == [(0, START), (1, A_LEADS), (2, CANCEL)]


def test_a_copy_spares_a_read_and_is_worth_no_more() -> None:
    store = MemoryStore()
    writer, reader = Journal(store), Journal(Deaf())
    writer.append(START, writer.view)
    assert reader.told(0, encode(START)).active, "no read was needed"
    assert reader.told(0, encode(START)).next_slot == 1, "a copy that comes twice is old news"


def test_a_copy_that_came_too_early_is_left_to_be_read() -> None:
    reader = Journal(Deaf())
    assert reader.told(2, encode(CANCEL)) == View()


def test_what_one_thread_reads_another_may_fold_later() -> None:
    store = MemoryStore()
    writer, reader = Journal(store), Journal(store)
    for entry in (START, A_LEADS):
        writer.append(entry, writer.view)
    pages = reader.read(0)
    assert reader.view == View(), "nothing changes before it is taken"
    reader.told(0, encode(START))
    assert reader.take(pages), "what was told meanwhile is folded once"
    assert reader.view == writer.view


def test_what_was_read_until_the_store_failed_is_not_read_again() -> None:
    store = Moody()
    writer, reader = Journal(store), Journal(store)
    for entry in (START, A_LEADS, CANCEL):
        writer.append(entry, writer.view)
    store.deaf_to = keys.entry(2)
    assert not reader.take(reader.read(0)), "there may be more"
    assert reader.view.next_slot == 2
    with pytest.raises(TransientStoreError):
        reader.catch_up()
    store.deaf_to = ""
    assert reader.catch_up() == writer.view


class Deaf(MemoryStore):
    """Nobody may read it."""

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
    ],
    ids=["cut", "empty", "foreign", "a pickle", "no text", "newer"],
)
def test_what_is_no_entry_of_ours_is_told_with_its_slot(body: bytes) -> None:
    store = MemoryStore()
    journal = Journal(store)
    journal.append(START, journal.view)
    store.put(keys.entry(1), body)
    with pytest.raises(JournalError, match="Entry 1 of the journal cannot be read") as error:
        journal.catch_up()
    assert "the checkpoints in the folder are not touched" in error.value.do
    assert journal.view.next_slot == 1, "what was read before it still holds"


def test_two_runs_in_one_folder_are_noticed() -> None:
    store = MemoryStore()
    journal = Journal(store)
    journal.append(START, journal.view)
    store.put(keys.entry(1), encode(an_entry(CANCEL.event, run_id=RunId("f" * 32))))
    with pytest.raises(JournalError, match="Two runs were mixed"):
        journal.catch_up()


# --- long runs -----------------------------------------------------------------------------------


@pytest.fixture
def long_run() -> tuple[MemoryStore, Journal]:
    """A journal with two snapshots and a few entries beyond."""
    store = MemoryStore()
    writer = Journal(store)
    writer.append(START, writer.view)
    for _ in range(2 * snapshot.EVERY + 5):
        writer.append(CANCEL, writer.view)
        if snapshot.due(writer.view):
            snapshot.write(store, writer.view)
    return store, writer


def test_a_late_reader_begins_at_the_newest_snapshot(long_run: tuple[MemoryStore, Journal]) -> None:
    store, writer = long_run
    for slot in range(2 * snapshot.EVERY):
        if slot != snapshot.EVERY:  # that one tells that the run is long
            store.delete(keys.entry(slot))
    assert Journal(store).catch_up() == writer.view


def test_without_snapshots_everything_is_read(long_run: tuple[MemoryStore, Journal]) -> None:
    store, writer = long_run
    for found in list(store.list(".spotfit/snapshots")):
        store.delete(found.key)
    assert Journal(store).catch_up() == writer.view


# --- holes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [0, 1])
def test_a_hole_is_noticed_before_anybody_fills_it(slot: int) -> None:
    store = MemoryStore()
    for number in range(3):
        store.put(keys.entry(number), encode(an_entry(FitStarted(a_spec()))))
    check_whole(store)
    store.delete(keys.entry(slot))
    with pytest.raises(JournalError, match=f"Entry {slot} of the journal .* is missing"):
        check_whole(store)


def test_a_journal_without_entries_is_whole() -> None:
    check_whole(MemoryStore())


def test_an_entry_about_strangers_is_no_entry_of_this_journal() -> None:
    store = MemoryStore()
    store.put(keys.entry(0), encode(an_entry(Released(Token("t-never-asked-for")))))
    with pytest.raises(JournalError, match=r"Entry 0 .* speaks of 't-never-asked-for'"):
        Journal(store).catch_up()
