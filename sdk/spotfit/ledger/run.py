"""`Ledger`: access of one process to the objects of a run, except for checkpoints and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import NotFoundError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger import keys
from spotfit.ledger.journal import EntryListener, Journal, JournalPage
from spotfit.model.events import JournalEntry, JournalEvent
from spotfit.model.topology import Member
from spotfit.model.view import JournalView, View
from spotfit.store.api import Store

_member_decoder = decoder(Member)


class Ledger:
    """The run below the root of `store`, as `agent_id` reads and writes it."""

    def __init__(
        self,
        store: Store,
        run_id: RunId,
        agent_id: AgentId,
        *,
        wall_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.agent_id = agent_id
        # Written for display only; with the default, equal runs write equal bytes.
        self._wall_ms = wall_ms
        self._journal = Journal(store)
        self._lease_counter = 0

    def clone(self) -> Ledger:
        """A new ledger of the same run with its own position, for use by another thread."""
        return Ledger(self.store, self.run_id, self.agent_id, wall_ms=self._wall_ms)

    def set_entry_listener(self, on_entry: EntryListener) -> None:
        """Call `on_entry` for every entry that is folded from now on."""
        self._journal.on_entry = on_entry

    @property
    def journal_view(self) -> JournalView:
        """The current view, which is a `View` once the journal has a `FitStarted` entry."""
        return self._journal.view

    @property
    def view(self) -> View:
        """The current view of the run, for callers that have found it in `journal_view`."""
        view = self._journal.view
        assert isinstance(view, View), "the journal has no FitStarted entry"
        return view

    def catch_up(self) -> JournalView:
        """Read and fold all new entries. Raises `JournalError` and `StoreError`."""
        return self._journal.catch_up()

    def read(self, slot: int) -> JournalPage:
        """Read a page of entries for `apply_page`; see `Journal.read`."""
        return self._journal.read(slot)

    def apply_page(self, page: JournalPage) -> bool:
        """Fold a page and return whether it reached the end; see `Journal.apply_page`."""
        return self._journal.apply_page(page)

    def apply_entry(self, slot: int, body: bytes) -> JournalView:
        """Fold a copy of an entry received from another process, if it is the next one."""
        return self._journal.apply_entry(slot, body)

    def append(self, event: JournalEvent, after: JournalView) -> JournalView:
        """Offer an event that was decided from `after`, then read; see `Journal.append`."""
        return self._journal.append(self._make_entry(event), after)

    def encode_entry(self, event: JournalEvent) -> bytes:
        """Encode the journal entry of an event by this agent."""
        return encode(self._make_entry(event))

    def create_entry(self, slot: int, body: bytes) -> None:
        """Create the entry of a slot; see `Journal.create_entry`."""
        self._journal.create_entry(slot, body)

    def renew_lease(self) -> None:
        """Increment the counter in this leader's lease object."""
        # Never persisted: a restarted process has another agent id, and thereby another lease.
        self._lease_counter += 1
        self.store.put(keys.lease(self.agent_id), str(self._lease_counter).encode())

    def read_lease(self, leader: AgentId) -> bytes:
        """The counter in the leader's lease object; b"" if there is none.

        Only changes are meaningful: no time is stored, because clocks of machines are not compared.
        """
        try:
            return self.store.get(keys.lease(leader))
        except NotFoundError:
            return b""

    def publish_member(self, member: Member) -> None:
        """Write this agent's `Member`, from which clients read the nodes of a run."""
        self.store.put(keys.member(self.agent_id), encode(member))

    def list_members(self) -> Iterator[Member]:
        """Yield every agent that has ever joined the run; skips objects that cannot be decoded."""
        for found in self.store.list(keys.MEMBERS.rstrip("/")):
            try:
                yield _member_decoder.decode(self.store.get(found.key))
            # Deleted since the listing, or written by another version of spotfit.
            except (NotFoundError, *DECODE_ERRORS):
                continue

    def _make_entry(self, event: JournalEvent) -> JournalEntry:
        return JournalEntry(
            run_id=self.run_id, author=self.agent_id, event=event, written_at_ms=self._wall_ms()
        )
