"""`Ledger`: entries, leases and members of one process."""

from __future__ import annotations

import pytest

from spotfit.core.codec import decoder
from spotfit.core.errors import AlreadyExistsError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import CancelRequested, FitStarted, JournalEntry
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_member, a_spec, an_agent_id


def ledger_of(store: MemoryStore, n: int = 0, wall_ms: int = 7) -> Ledger:
    return Ledger(store, RUN_ID, an_agent_id(n), wall_ms=lambda: wall_ms)


def test_an_entry_contains_run_author_and_time() -> None:
    store = MemoryStore()
    ledger = ledger_of(store, 3)
    ledger.append(FitStarted(spec=a_spec()), after=ledger.journal_view)
    entry = decoder(JournalEntry).decode(store.get(keys.entry(0)))
    assert (entry.run_id, entry.author, entry.written_at_ms) == (RUN_ID, an_agent_id(3), 7)


def test_two_ledgers_read_the_same_view() -> None:
    store = MemoryStore()
    one, two = ledger_of(store, 0), ledger_of(store, 1)
    one.append(FitStarted(spec=a_spec()), after=one.journal_view)
    assert two.catch_up() == one.view
    assert two.view.run_id == RUN_ID


def test_an_encoded_entry_can_be_created_and_read() -> None:
    store = MemoryStore()
    ledger = ledger_of(store)
    draft = ledger.encode_entry(FitStarted(spec=a_spec()))
    ledger.create_entry(0, draft)
    assert ledger.journal_view.next_slot == 0, "creating an entry does not fold it"
    assert ledger.apply_page(ledger.read(0))
    assert ledger.view.is_active
    with pytest.raises(AlreadyExistsError):
        ledger.create_entry(0, draft)


def test_the_entry_listener_receives_folded_entries() -> None:
    received: list[int] = []
    ledger = ledger_of(MemoryStore())
    ledger.set_entry_listener(lambda slot, _body, _entry: received.append(slot))
    ledger.append(FitStarted(spec=a_spec()), after=ledger.journal_view)
    ledger.append(CancelRequested(reason="enough"), after=ledger.view)
    assert received == [0, 1]


def test_a_clone_has_its_own_position() -> None:
    store = MemoryStore()
    ledger = ledger_of(store)
    ledger.append(FitStarted(spec=a_spec()), after=ledger.journal_view)
    received: list[int] = []
    ledger.set_entry_listener(lambda slot, _body, _entry: received.append(slot))
    other = ledger.clone()
    other.append(CancelRequested(reason="enough"), after=other.catch_up())
    assert (received, ledger.view.cancel_reason) == ([], None)
    assert ledger.catch_up().cancel_reason == "enough"


def test_a_lease_changes_with_every_renewal_and_is_empty_before() -> None:
    store = MemoryStore()
    leader, watcher = ledger_of(store, 0), ledger_of(store, 1)
    seen = [watcher.read_lease(an_agent_id(0))]
    for _ in range(3):
        leader.renew_lease()
        seen.append(watcher.read_lease(an_agent_id(0)))
    assert seen[0] == 0
    assert len(set(seen)) == 4
    assert watcher.read_lease(an_agent_id(1)) == 0, "each leader has its own"


def test_members_are_listed_and_undecodable_ones_skipped() -> None:
    store = MemoryStore()
    for n in range(2):
        ledger_of(store, n).publish_member(a_member(n))
    store.put(keys.member(AgentId("broken")), b'{"agent": "\xff"}')
    assert list(ledger_of(store).list_members()) == [a_member(0), a_member(1)]
