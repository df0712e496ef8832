"""Journal entries that were written, changed, moved or removed without the run key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotfit.core.codec import encode
from spotfit.core.errors import JournalError
from spotfit.core.ids import RunId
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import MAX_READS, AuthenticatedStore
from spotfit.ledger.journal import Journal, read_run_id
from spotfit.model.events import (
    CancelRequested,
    FitEnded,
    FitStarted,
    JournalEntry,
    LeaderElected,
)
from spotfit.model.view import View
from spotfit.security.run_key import RunKey
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, RUN_KEY, a_spec, an_agent_id, an_entry
from tests.unit.store.faulty_stores import DamagedResponses

START = an_entry(FitStarted(spec=a_spec()))
ELECTIONS = [
    an_entry(LeaderElected(leader=an_agent_id(n), epoch=n, coordinator_address="h:1"))
    for n in range(1, 5)
]
CANCEL = an_entry(CancelRequested(reason="enough"))
END = an_entry(FitEnded(outcome="finished"))


def reader(store: MemoryStore) -> Journal:
    return Journal(AuthenticatedStore(store, RUN_KEY))


@pytest.fixture
def store() -> MemoryStore:
    """A journal of five authentic entries: the start of the fit and four elections."""
    store = MemoryStore()
    append(store, START, *ELECTIONS)
    return store


def append(store: MemoryStore, *entries: JournalEntry) -> None:
    """Append authentic entries."""
    writer = reader(store)
    for entry in entries:
        writer.append(entry, writer.catch_up())


def leader(view: object) -> str:
    assert isinstance(view, View)
    assert view.leader is not None
    return view.leader.leader


def test_a_holder_of_the_key_reads_what_another_one_wrote(store: MemoryStore) -> None:
    journal = reader(store)
    assert leader(journal.catch_up()) == an_agent_id(4)
    assert journal.ignored_slots == ()


def test_a_reader_without_the_key_reads_the_same_state(store: MemoryStore) -> None:
    assert Journal(store).catch_up() == reader(store).catch_up()


FORGED = an_entry(LeaderElected(leader=an_agent_id(9), epoch=9, coordinator_address="evil:1"))


@pytest.mark.parametrize(
    "forge",
    [
        lambda _: encode(FORGED),
        lambda _: Journal(MemoryStore()).encode_entry(FORGED),
        lambda store: store.get(keys.entry(2)),
        lambda store: store.get(keys.entry(4)).replace(b'"epoch":4', b'"epoch":9'),
        lambda store: store.get(keys.entry(4))[:-1],
        lambda _: Journal(
            AuthenticatedStore(MemoryStore(), RunKey(b"x" * 32, RUN_ID))
        ).encode_entry(FORGED),
        lambda _: b"junk",
        lambda _: b"",
        lambda _: encode(an_entry(CANCEL.event, run_id=RunId("f" * 32))),
    ],
    ids=[
        "no mac",
        "written without the key",
        "replayed",
        "modified copy",
        "truncated copy",
        "other key",
        "junk",
        "empty",
        "cancel of another run",
    ],
)
def test_a_forged_entry_in_the_next_slot_changes_nothing_and_the_run_continues(
    store: MemoryStore, forge: object, caplog: pytest.LogCaptureFixture
) -> None:
    before = reader(store).catch_up()
    assert callable(forge)
    store.create(keys.entry(5), forge(store))
    journal = reader(store)
    after = journal.catch_up()
    assert (after.next_slot, leader(after)) == (6, leader(before))
    assert after.cancel_reason is None
    assert journal.ignored_slots == (5,)
    warning = vars(caplog.records[0])
    assert (warning["msg"], warning["slot"]) == ("journal.entry_not_authentic", 5)
    with pytest.raises(JournalError, match=r"Journal entry 5 in .* is not authentic") as error:
        journal.check_is_authentic()
    assert keys.entry(5) in error.value.do
    # The next authentic entry commits to the forged one, like any other.
    append(store, END)
    ended = reader(store)
    assert ended.catch_up().fit_end == END.event
    ended.check_is_authentic()


def test_an_entry_of_the_other_slot_is_rejected(store: MemoryStore) -> None:
    """Two exchanged entries, with a later one that commits to the original order."""
    bodies = [store.get(keys.entry(slot)) for slot in (2, 3)]
    for slot, body in zip((3, 2), bodies, strict=True):
        store.put(keys.entry(slot), body)
    with pytest.raises(JournalError, match=r"Journal entry 2 in .* was changed after entry 4"):
        reader(store).catch_up()


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.replace(b'"epoch":2', b'"epoch":3'),
        lambda body: body[:-5],
        lambda body: body[: len(body) // 2],
        lambda _: b"",
        lambda _: encode(CANCEL),
    ],
    ids=["modified", "mac truncated", "truncated", "empty", "replaced by a cancellation"],
)
def test_a_changed_entry_is_named(store: MemoryStore, change: object) -> None:
    assert callable(change)
    store.put(keys.entry(2), change(store.get(keys.entry(2))))
    with pytest.raises(JournalError, match=r"Journal entry 2 in .* was changed after entry 3"):
        reader(store).catch_up()


def test_a_changed_last_entry_raises_for_readers_of_an_ended_run(store: MemoryStore) -> None:
    append(store, END)
    store.put(keys.entry(5), store.get(keys.entry(5)).replace(b"finished", b"failed"))
    journal = reader(store)
    assert journal.catch_up().is_active
    with pytest.raises(JournalError, match=r"Journal entry 5 in .* is not authentic"):
        journal.check_is_authentic()


def test_an_entry_that_replaced_a_removed_one_is_detected(store: MemoryStore) -> None:
    """Entry 3 was removed; a writer that did not know it has filled the slot."""
    other = MemoryStore()
    for slot in range(3):
        other.put(keys.entry(slot), store.get(keys.entry(slot)))
    append(other, END)
    store.put(keys.entry(3), other.get(keys.entry(3)))
    with pytest.raises(JournalError, match=r"Journal entry 4 in .* does not follow"):
        reader(store).catch_up()


def test_without_its_last_entries_a_journal_has_an_earlier_state(store: MemoryStore) -> None:
    """Nothing in the bucket shows the removal; the next entry of a running leader does."""
    running = reader(store)
    running.catch_up()
    for slot in (3, 4):
        store.delete(keys.entry(slot))
    assert leader(reader(store).catch_up()) == an_agent_id(2)
    running.append(END, running.view)
    assert store.get(keys.entry(5))
    store.put(keys.entry(3), b"filled")
    store.put(keys.entry(4), b"filled")
    with pytest.raises(JournalError, match=r"Journal entry 3 in .* was changed after entry 5"):
        reader(store).catch_up()


def test_the_format_of_an_authenticated_entry_is_stable() -> None:
    """Other versions of spotfit must verify it; entries that were written never change."""
    store = MemoryStore()
    append(store, CANCEL)
    content, previous, mac = store.get(keys.entry(0)).split(b"\n")
    assert content == encode(CANCEL)
    assert previous == b"previous " + b"0" * 64
    assert mac == b"hmac-sha256 8be848401c5ab3efe4b5580f185553ade44e2671ffeab1f93b319b634bafe7b4"


@pytest.mark.parametrize("body", [encode(START), b"junk"])
def test_the_first_entry_must_be_authentic(body: bytes) -> None:
    store = MemoryStore()
    store.create(keys.entry(0), body)
    with pytest.raises(JournalError, match=r"Journal entry 0 in .* is not authentic"):
        reader(store).catch_up()


def test_a_journal_of_another_run_of_the_same_user_is_rejected(store: MemoryStore) -> None:
    key = RunKey.from_text(RUN_KEY.to_text(), RunId("f" * 32))
    with pytest.raises(JournalError, match=r"Journal entry 0 in .* is not authentic"):
        Journal(AuthenticatedStore(store, key)).catch_up()


def test_a_cancellation_needs_no_key(store: MemoryStore) -> None:
    outsider = Journal(store)
    outsider.append(CANCEL, outsider.catch_up())
    cancelled = reader(store)
    assert cancelled.catch_up().cancel_reason == "enough"
    cancelled.check_is_authentic()
    append(store, END)
    assert reader(store).catch_up().fit_end == END.event


class DamagedEntry(MemoryStore):
    """The journal of `original`, of which the first reads of entry 2 are damaged."""

    def __init__(self, original: MemoryStore, *damages: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._original = original
        self._damages = list(damages)

    def get(self, key: str) -> bytes:
        body = self._original.get(key)
        return self._damages.pop(0)(body) if key == keys.entry(2) and self._damages else body


@pytest.mark.parametrize(
    "damages",
    [
        [lambda body: body.replace(b'"epoch":2', b'"epoch":3')],
        [lambda body, n=n: body[:-n] for n in range(1, MAX_READS + 2)],
    ],
    ids=["once", "more often than an entry without a MAC is read"],
)
def test_an_answer_that_was_damaged_in_transit_is_read_again(
    store: MemoryStore, damages: list[Callable[[bytes], bytes]]
) -> None:
    journal = reader(DamagedEntry(store, *damages))
    journal.catch_up()
    assert journal.ignored_slots == ()
    assert leader(journal.view) == an_agent_id(4)


def test_a_copy_from_the_leader_is_verified(store: MemoryStore) -> None:
    journal = reader(MemoryStore())
    for slot in range(4):
        journal.apply_entry(slot, store.get(keys.entry(slot)))
    journal.apply_entry(4, store.get(keys.entry(4)).replace(b'"epoch":4', b'"epoch":9'))
    assert leader(journal.view) == an_agent_id(3)


def test_an_entry_is_valid_in_the_slot_that_it_was_encoded_for(store: MemoryStore) -> None:
    writer = reader(store)
    writer.catch_up()
    body = writer.encode_entry(END)
    store.create(keys.entry(5), b"junk")
    store.create(keys.entry(6), body)
    assert reader(store).catch_up().is_active


def test_the_run_id_is_read_without_the_key(store: MemoryStore) -> None:
    assert read_run_id(store) == RUN_ID
    assert read_run_id(MemoryStore()) is None


def test_a_damaged_read_of_a_cancellation_without_a_mac_is_not_used() -> None:
    """Its next entry would contain the hash of the damaged bytes."""
    store = DamagedResponses(damaged_reads=0)
    append(store, START)
    outsider = Journal(store)
    outsider.append(CANCEL, outsider.catch_up())
    store.reads.clear()
    store.damaged_reads = 2
    assert reader(store).catch_up().cancel_reason == "enough"
