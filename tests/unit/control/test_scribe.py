"""The scribe: what is offered is insisted on until it is known, and nobody stands still for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotfit.control.errands import Inline
from spotfit.control.scribe import Scribe
from spotfit.core.errors import JournalError, StorePermissionError, TransientStoreError
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.events import CancelRequested, Event, FitStarted, LeaderElected
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, a_spec, an_agent
from tests.unit.control.paper import Slow

CANCEL = CancelRequested("enough")
B_LEADS = LeaderElected(an_agent(1), 2, "h:2")


class Moody(MemoryStore):
    """Calls fail as the test says: `unsent` ones have no effect, of `unheard` ones nobody hears."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble: Exception = TransientStoreError("no answer")
        self.unsent = 0
        self.unheard = 0
        self.deaf = False
        self.reads = 0
        self.creates: list[bytes] = []

    def get(self, key: str) -> bytes:
        self.reads += 1
        if self.deaf:
            raise TransientStoreError("deaf")
        return super().get(key)

    def create(self, key: str, body: bytes) -> None:
        self.creates.append(body)
        if self.unsent:
            self.unsent -= 1
            raise self.trouble
        super().create(key, body)
        if self.unheard:
            self.unheard -= 1
            raise self.trouble


class Desk:
    """a0's scribe in a run that a0 leads, and a rival's ledger."""

    def __init__(self, *, slow: bool = False) -> None:
        self.store = Moody()
        self.rival = Ledger(self.store, RUN, an_agent(1))
        self.write_as_rival(FitStarted(a_spec()), LeaderElected(an_agent(0), 1, "h:1"))
        self.errands = Slow()
        """Only who is slow has any under way."""
        self.times = iter(range(1000))
        self.ledger = Ledger(self.store, RUN, an_agent(0), wall_ms=lambda: next(self.times))
        self.scribe = Scribe(self.ledger, self.errands if slow else Inline())
        self.store.creates.clear()
        if not slow:
            self.scribe.go_on(0.0)

    def write_as_rival(self, *events: Event) -> None:
        for event in events:
            self.rival.append(event, after=self.rival.catch_up())

    def knows(self) -> bool:
        """Whether a decision may be made."""
        return self.scribe.settled

    def finish(self, now: float) -> None:
        """Whatever is under way comes back, and is taken in."""
        self.errands.finish()
        self.scribe.go_on(now)

    def go_on_until(self, happened: Callable[[], object]) -> float:
        now = 0.0
        while not happened():
            now += 0.05
            assert now < 60.0
            try:
                self.scribe.go_on(now)
            except TransientStoreError:
                continue
        return now


# --- reading -------------------------------------------------------------------------------------


def test_nothing_is_decided_before_the_journal_was_read_to_its_end() -> None:
    desk = Desk(slow=True)
    assert not desk.knows()
    desk.scribe.go_on(0.0)
    assert not desk.knows(), "and nobody stands still for it"
    desk.finish(0.1)
    assert desk.knows()
    assert desk.scribe.view == desk.rival.catch_up()
    assert desk.scribe.read_at == 0.1


def test_who_asks_while_a_reading_is_under_way_is_read_to_once_more() -> None:
    desk = Desk(slow=True)
    desk.scribe.go_on(0.0)
    desk.errands.finish()  # it has read; only then somebody writes
    desk.write_as_rival(CANCEL)
    desk.scribe.ask()
    desk.scribe.go_on(0.1)
    assert desk.scribe.view.cancelled is None
    desk.finish(0.2)
    assert desk.scribe.view.cancelled == "enough"


def test_a_copy_spares_a_read_and_a_gap_is_read() -> None:
    desk = Desk()
    desk.write_as_rival(CANCEL)
    read = desk.store.reads
    desk.scribe.told(2, desk.store.get(keys.entry(2)))
    desk.scribe.go_on(1.0)
    assert desk.scribe.view.cancelled == "enough"
    assert desk.store.reads == read + 1, "the test's own"
    desk.write_as_rival(B_LEADS, CANCEL)
    desk.scribe.told(4, desk.store.get(keys.entry(4)))
    assert not desk.knows(), "somebody knows more than this view"
    desk.scribe.go_on(1.0)
    assert desk.knows()
    assert desk.scribe.view.next_slot == 5


def test_a_store_that_fails_is_asked_again_after_a_pause() -> None:
    desk = Desk()
    desk.store.deaf = True
    desk.scribe.ask()
    with pytest.raises(TransientStoreError):
        desk.scribe.go_on(1.0)
    read = desk.store.reads
    desk.scribe.go_on(1.05)
    assert desk.store.reads == read, "each trouble is told once, and there is a pause"
    assert desk.scribe.wake_at == pytest.approx(1.1)
    desk.store.deaf = False
    desk.scribe.go_on(1.1)
    assert desk.scribe.read_at == 1.1
    assert desk.knows(), "reading that failed makes no view wrong"


def test_what_is_no_entry_of_ours_is_told_where_it_is_folded() -> None:
    desk = Desk(slow=True)
    desk.store.put(keys.entry(2), b"junk")
    desk.scribe.go_on(0.0)
    with pytest.raises(JournalError, match="Entry 2"):
        desk.finish(0.1)


# --- writing -------------------------------------------------------------------------------------


def test_what_the_store_took_needs_no_reading() -> None:
    desk = Desk()
    read = desk.store.reads
    desk.scribe.write(CANCEL, 1.0)
    assert desk.knows()
    assert desk.scribe.view.cancelled == "enough"
    assert desk.store.reads == read
    assert desk.rival.catch_up() == desk.scribe.view


def test_while_an_entry_is_on_its_way_nothing_may_be_decided() -> None:
    desk = Desk(slow=True)
    desk.scribe.go_on(0.0)
    desk.finish(0.1)
    desk.scribe.write(CANCEL, 1.0)
    assert not desk.knows()
    with pytest.raises(AssertionError):
        desk.scribe.write(B_LEADS, 1.1)
    desk.scribe.go_on(30.0)
    assert not desk.knows(), "however long it takes"
    desk.finish(31.0)
    assert desk.knows()
    assert desk.scribe.view.cancelled == "enough"


def test_who_lost_the_slot_reads_who_won_it() -> None:
    desk = Desk()
    desk.write_as_rival(B_LEADS)
    desk.scribe.write(CANCEL, 1.0)
    assert desk.knows()
    assert desk.scribe.view.leads(an_agent(1))
    assert desk.scribe.view.cancelled is None, "it was decided from an old view"


@pytest.mark.parametrize("sent", [True, False])
def test_the_very_same_entry_is_offered_until_it_is_known_who_has_the_slot(*, sent: bool) -> None:
    """One that was lost may arrive late. Until the slot is taken, another must not be offered."""
    desk = Desk()
    desk.store.unheard, desk.store.unsent = (1, 0) if sent else (0, 3)
    desk.scribe.write(CANCEL, 0.0)
    assert not desk.knows()
    desk.go_on_until(desk.knows)
    assert desk.scribe.view.cancelled == "enough"
    assert len(desk.store.creates) >= 2
    assert len(set(desk.store.creates)) == 1, "byte for byte"
    assert desk.rival.catch_up() == desk.scribe.view


def test_what_was_offered_is_void_once_somebody_else_has_the_slot() -> None:
    desk = Desk()
    desk.store.unsent = 1
    desk.scribe.write(CANCEL, 0.0)
    desk.write_as_rival(B_LEADS)
    desk.go_on_until(desk.knows)
    assert desk.scribe.view == desk.rival.catch_up()
    assert desk.scribe.view.cancelled is None


def test_news_of_the_slot_settles_it_before_the_store_answers() -> None:
    desk = Desk(slow=True)
    desk.scribe.go_on(0.0)
    desk.finish(0.1)
    desk.scribe.write(CANCEL, 1.0)
    desk.write_as_rival(B_LEADS)
    desk.scribe.told(2, desk.store.get(keys.entry(2)))
    desk.scribe.go_on(1.1)
    assert desk.knows()
    assert desk.scribe.view.leads(an_agent(1))


def test_a_refusal_for_now_is_no_reason_to_give_up_an_entry() -> None:
    desk = Desk()
    desk.store.trouble, desk.store.unsent = StorePermissionError("expired"), 1
    desk.scribe.write(CANCEL, 0.0)
    with pytest.raises(StorePermissionError):
        desk.scribe.go_on(0.01)
    desk.scribe.go_on(1.0)
    assert desk.scribe.view.cancelled == "enough"


def test_pauses_grow_while_a_store_fails_and_end() -> None:
    desk = Desk()
    desk.store.unsent = 1000
    desk.scribe.write(CANCEL, 0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        pauses.append(round(desk.scribe.wake_at - now, 3))
        now = desk.scribe.wake_at
        with pytest.raises(TransientStoreError):
            desk.scribe.go_on(now)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def test_nothing_to_do_is_nothing_to_wake_for() -> None:
    desk = Desk()
    assert desk.scribe.wake_at == float("inf")
    slow = Desk(slow=True)
    slow.scribe.go_on(0.0)
    assert slow.scribe.wake_at == float("inf"), "errands wake whoever sent them"


def test_a_store_that_does_not_show_what_it_says_is_there_is_not_asked_without_end() -> None:
    desk = Desk()
    desk.scribe.told(7, b"")
    desk.scribe.go_on(1.0)
    read = desk.store.reads
    desk.scribe.go_on(1.05)
    assert desk.store.reads == read
    assert desk.scribe.wake_at > 1.05
    assert not desk.knows()
