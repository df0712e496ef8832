"""Ledger: the run as one of its readers and writers sees it."""

from __future__ import annotations

import pytest

from spotfit.core.codec import decoder
from spotfit.core.errors import TransientStoreError
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


class Deaf(MemoryStore):
    """Cannot be read while it is deaf; what is written arrives."""

    deaf = False

    def get(self, key: str) -> bytes:
        if self.deaf:
            raise TransientStoreError("deaf")
        return super().get(key)


def test_nothing_is_decided_before_what_was_offered_is_read_back() -> None:
    store = Deaf()
    ledger = ledger_of(store)
    ledger.append(FitStarted(a_spec()), after=ledger.view)
    store.deaf = True
    with pytest.raises(TransientStoreError):
        ledger.append(CancelRequested("enough"), after=ledger.view)
    assert ledger.unsure
    assert ledger.view.cancelled is None, "the entry stands, but nobody has read it"
    with pytest.raises(TransientStoreError):
        ledger.settled()
    store.deaf = False
    assert ledger.settled().cancelled == "enough"
    assert not ledger.unsure


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
