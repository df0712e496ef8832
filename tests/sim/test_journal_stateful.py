"""The journal under arbitrary sequences of calls, on a store that fails."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spotfit.core.codec import decoder
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger import keys
from spotfit.ledger.journal import Journal
from spotfit.model.events import CancelRequested, JournalEntry, LeaderElected
from spotfit.model.view import JournalView, fold
from spotfit.store.local import MemoryStore

RUN = RunId("a" * 32)
WRITERS = 3
writers = st.integers(0, WRITERS - 1)
fault = st.sampled_from(["none", "lost request", "lost response"])
_entries = decoder(JournalEntry)


class FaultyStore:
    """A writer's connection to the shared store; fails before or after the effect on demand."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.fault = "none"

    def create(self, key: str, body: bytes) -> None:
        if self.fault == "lost request":
            raise TransientStoreError("The request was never sent.", do="Try again.")
        self._store.create(key, body)
        if self.fault == "lost response":
            raise TransientStoreError("The answer was lost.", do="Read what is there.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class ManyWriters(RuleBasedStateMachine):
    """Several writers with views of different age append, read and receive copies of entries."""

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore()
        self.connections = [FaultyStore(self.store) for _ in range(WRITERS)]
        self.journals = [Journal(connection) for connection in self.connections]
        self.appended: list[tuple[int, JournalEntry]] = []
        self.applied_slots: list[list[int]] = [[] for _ in range(WRITERS)]
        for writer, journal in enumerate(self.journals):
            journal.on_entry = lambda slot, _body, _entry, writer=writer: self.applied_slots[
                writer
            ].append(slot)

    @rule(writer=writers, fault=fault, is_election=st.booleans())
    def append(self, writer: int, fault: str, *, is_election: bool) -> None:
        journal, me = self.journals[writer], AgentId(f"w{writer}")
        before = journal.view
        event = (
            LeaderElected(leader=me, epoch=before.epoch + 1)
            if is_election
            else CancelRequested(reason=f"by {me}")
        )
        entry = JournalEntry(run_id=RUN, author=me, event=event, written_at_ms=len(self.appended))
        self.appended.append((before.next_slot, entry))
        self.connections[writer].fault = fault
        after = journal.append(entry, before)
        self.connections[writer].fault = "none"
        is_written = self.entries()[before.next_slot : before.next_slot + 1] == [entry]
        assert is_written or fault == "lost request" or after.next_slot > before.next_slot

    @rule(writer=writers)
    def catch_up(self, writer: int) -> None:
        assert self.journals[writer].catch_up().next_slot == len(self.entries())

    @rule(writer=writers, slot=st.integers(0, 20))
    def apply_copy(self, writer: int, slot: int) -> None:
        if slot < len(self.entries()):
            self.journals[writer].apply_entry(slot, self.store.get(keys.entry(slot)))

    @invariant()
    def every_view_is_a_prefix_of_the_journal(self) -> None:
        views = [JournalView()]
        for entry in self.entries():
            views.append(fold(views[-1], entry))
        for journal, applied_slots in zip(self.journals, self.applied_slots, strict=True):
            assert journal.view == views[journal.view.next_slot]
            assert applied_slots == list(range(journal.view.next_slot))

    @invariant()
    def every_entry_has_the_slot_of_its_append(self) -> None:
        for slot, entry in enumerate(self.entries()):
            assert (slot, entry) in self.appended

    @invariant()
    def an_epoch_has_one_leader(self) -> None:
        epochs = [one.event.epoch for one in self.entries() if isinstance(one.event, LeaderElected)]
        assert epochs == sorted(set(epochs))

    def entries(self) -> list[JournalEntry]:
        """The stored entries, without gaps."""
        if not hasattr(self, "store"):
            return []
        stored_keys = [found.key for found in self.store.list(keys.JOURNAL.rstrip("/"))]
        assert stored_keys == [keys.entry(slot) for slot in range(len(stored_keys))]
        return [_entries.decode(self.store.get(key)) for key in stored_keys]


ManyWriters.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManyWriters = ManyWriters.TestCase
