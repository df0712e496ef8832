"""The journal under every order of calls that Hypothesis can think of, on a store that fails."""

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
trouble = st.sampled_from(["none", "unsent", "answer lost"])
_entries = decoder(JournalEntry)


class Shaky:
    """A writer's line to the one store: it may fail before or after the deed, when told so."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.trouble = "none"

    def create(self, key: str, body: bytes) -> None:
        if self.trouble == "unsent":
            raise TransientStoreError("The request was never sent.", do="Try again.")
        self._store.create(key, body)
        if self.trouble == "answer lost":
            raise TransientStoreError("The answer was lost.", do="Read what is there.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class ManyWriters(RuleBasedStateMachine):
    """Several writers, each with a view of its own age, append, read and are told news."""

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore()
        self.lines = [Shaky(self.store) for _ in range(WRITERS)]
        self.journals = [Journal(line) for line in self.lines]
        self.offered: list[tuple[int, JournalEntry]] = []
        self.told: list[list[int]] = [[] for _ in range(WRITERS)]
        for writer, journal in enumerate(self.journals):
            journal.on_entry = lambda slot, _body, _entry, writer=writer: self.told[writer].append(
                slot
            )

    @rule(writer=writers, trouble=trouble, elects=st.booleans())
    def append(self, writer: int, trouble: str, *, elects: bool) -> None:
        journal, me = self.journals[writer], AgentId(f"w{writer}")
        before = journal.view
        event = (
            LeaderElected(leader=me, epoch=before.epoch + 1)
            if elects
            else CancelRequested(reason=f"by {me}")
        )
        entry = JournalEntry(run_id=RUN, author=me, event=event, written_at_ms=len(self.offered))
        self.offered.append((before.next_slot, entry))
        self.lines[writer].trouble = trouble
        after = journal.append(entry, before)
        self.lines[writer].trouble = "none"
        mine = self.entries()[before.next_slot : before.next_slot + 1] == [entry]
        assert mine or trouble == "unsent" or after.next_slot > before.next_slot

    @rule(writer=writers)
    def catch_up(self, writer: int) -> None:
        assert self.journals[writer].catch_up().next_slot == len(self.entries())

    @rule(writer=writers, slot=st.integers(0, 20))
    def is_told(self, writer: int, slot: int) -> None:
        if slot < len(self.entries()):
            self.journals[writer].apply_entry(slot, self.store.get(keys.entry(slot)))

    @invariant()
    def every_view_is_a_prefix_of_the_truth(self) -> None:
        truth = [JournalView()]
        for entry in self.entries():
            truth.append(fold(truth[-1], entry))
        for journal, told in zip(self.journals, self.told, strict=True):
            assert journal.view == truth[journal.view.next_slot]
            assert told == list(range(journal.view.next_slot))

    @invariant()
    def every_entry_stands_where_it_was_offered(self) -> None:
        for slot, entry in enumerate(self.entries()):
            assert (slot, entry) in self.offered

    @invariant()
    def an_epoch_has_one_leader(self) -> None:
        epochs = [one.event.epoch for one in self.entries() if isinstance(one.event, LeaderElected)]
        assert epochs == sorted(set(epochs))

    def entries(self) -> list[JournalEntry]:
        """What is really there, up to the first hole."""
        if not hasattr(self, "store"):
            return []
        keys_there = [found.key for found in self.store.list(keys.JOURNAL.rstrip("/"))]
        assert keys_there == [keys.entry(slot) for slot in range(len(keys_there))]
        return [_entries.decode(self.store.get(key)) for key in keys_there]


ManyWriters.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManyWriters = ManyWriters.TestCase
