"""Ledger: the run as one of its readers and writers sees it."""

from __future__ import annotations

import pytest

from spotfit.core.codec import decoder
from spotfit.core.errors import AlreadyExistsError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.events import CancelRequested, Entry, FitStarted
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, a_member, a_spec, an_agent


def ledger_of(store: MemoryStore, n: int = 0, wall_ms: int = 7) -> Ledger:
    return Ledger(store, RUN, an_agent(n), wall_ms=lambda: wall_ms)


def test_an_entry_says_whose_it_is_and_when_it_was_written() -> None:
    store = MemoryStore()
    ledger = ledger_of(store, 3)
    ledger.append(FitStarted(a_spec()), after=ledger.view)
    entry = decoder(Entry).decode(store.get(keys.entry(0)))
    assert (entry.run_id, entry.by, entry.at_ms) == (RUN, an_agent(3), 7)


def test_two_ledgers_tell_the_same_run() -> None:
    store = MemoryStore()
    one, two = ledger_of(store, 0), ledger_of(store, 1)
    one.append(FitStarted(a_spec()), after=one.view)
    assert two.catch_up() == one.view
    assert two.view.run_id == RUN


def test_a_draft_is_an_entry_like_any_other() -> None:
    store = MemoryStore()
    ledger = ledger_of(store)
    draft = ledger.draft(FitStarted(a_spec()))
    ledger.enter(0, draft)
    assert ledger.view.next_slot == 0, "offering folds nothing"
    assert ledger.take(ledger.read(0))
    assert ledger.view.active
    with pytest.raises(AlreadyExistsError):
        ledger.enter(0, draft)


def test_who_listens_hears_of_what_is_folded() -> None:
    heard: list[int] = []
    ledger = ledger_of(MemoryStore())
    ledger.listen(lambda slot, _body, _entry: heard.append(slot))
    ledger.append(FitStarted(a_spec()), after=ledger.view)
    ledger.append(CancelRequested("enough"), after=ledger.view)
    assert heard == [0, 1]


def test_another_reader_disturbs_nobody() -> None:
    store = MemoryStore()
    ledger = ledger_of(store)
    ledger.append(FitStarted(a_spec()), after=ledger.view)
    heard: list[int] = []
    ledger.listen(lambda slot, _body, _entry: heard.append(slot))
    other = ledger.another()
    other.append(CancelRequested("enough"), after=other.catch_up())
    assert (heard, ledger.view.cancelled) == ([], None)
    assert ledger.catch_up().cancelled == "enough"


def test_a_lease_changes_with_every_renewal_and_is_empty_before() -> None:
    store = MemoryStore()
    leader, watcher = ledger_of(store, 0), ledger_of(store, 1)
    seen = [watcher.lease_of(an_agent(0))]
    for _ in range(3):
        leader.renew_lease()
        seen.append(watcher.lease_of(an_agent(0)))
    assert seen[0] == b""
    assert len(set(seen)) == 4
    assert watcher.lease_of(an_agent(1)) == b"", "each leader has its own"


def test_offers_are_of_everybody_and_what_cannot_be_read_is_passed_over() -> None:
    store = MemoryStore()
    for n in range(2):
        ledger_of(store, n).offer(a_member(n))
    store.put(keys.offer(AgentId("broken")), b'{"agent": "\xff"}')
    assert list(ledger_of(store).offers()) == [a_member(0), a_member(1)]
