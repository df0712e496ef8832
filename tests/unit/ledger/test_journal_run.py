"""`Ledger`: entries, leases and members of one process."""

from __future__ import annotations

import pytest

from spotfit.core.codec import decoder
from spotfit.core.errors import AlreadyExistsError
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import CancelRequested, FitStarted, JournalEntry
from spotfit.model.topology import StandbyReport
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


def test_reports_of_agents_that_stand_by_are_read_by_group() -> None:
    store = MemoryStore()
    reports = {
        n: StandbyReport(
            member=a_member(n, token=Token(f"t-{n // 2}")), renewal=1, is_warm=n % 2 == 0
        )
        for n in range(4)
    }
    for n, report in reports.items():
        ledger_of(store, n).publish_standby(report)
    store.put(keys.standby(Token("t-1"), AgentId("broken")), b'{"renewal": "\xff"}')
    read = ledger_of(store).read_standby
    assert read([Token("t-1")]) == [reports[2], reports[3]]
    assert read([Token("t-9")]) == []


class AheadStore(MemoryStore):
    """Its clock is a minute ahead of a machine's clock that is always 7."""

    at_ms = 60_007

    def written_at_ms(self, key: str) -> int:
        self.get(key)
        return self.at_ms


def test_the_storages_clock_is_measured_by_the_first_renewal_of_a_lease() -> None:
    ledger = ledger_of(AheadStore())
    assert ledger.storage_ms() is None
    assert ledger.wall_ms() == 7
    ledger.renew_lease()
    assert (ledger.storage_ms(), ledger.wall_ms()) == (60_007, 60_007)


def test_a_storage_without_a_clock_has_that_of_the_machine() -> None:
    ledger = ledger_of(MemoryStore())
    ledger.renew_lease()
    assert ledger.storage_ms() == 7


def test_the_storages_clock_is_measured_again_at_every_hundredth_renewal() -> None:
    store = AheadStore()
    ledger = ledger_of(store)
    ledger.renew_lease()
    store.at_ms = 90_007
    for _ in range(98):
        ledger.renew_lease()
    assert ledger.storage_ms() == 60_007
    ledger.renew_lease()
    assert ledger.storage_ms() == 90_007


def test_a_clone_knows_the_storages_clock() -> None:
    ledger = ledger_of(AheadStore())
    ledger.renew_lease()
    assert ledger.clone().storage_ms() == 60_007
