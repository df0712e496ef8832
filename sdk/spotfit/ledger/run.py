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
    """The run below the root of `store`, as `agent_id` reads and writes it.

    Each object has its own position in the journal. Methods that access the store block, raise its
    `StoreError`s and do not retry. `agent_id` names an agent or a driver.
    """

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
        """Return a ledger of the same run that has read nothing yet, for use by another thread.

        It shares the store, and has no entry listener.
        """
        return Ledger(self.store, self.run_id, self.agent_id, wall_ms=self._wall_ms)

    def set_entry_listener(self, on_entry: EntryListener) -> None:
        """Call `on_entry(slot, body, entry)` for every entry that this ledger folds from now on.

        Replaces an earlier listener. It is called in slot order, by the thread that folds, after
        the view was updated. Entries before a cached view that was used are not passed to it.
        """
        self._journal.on_entry = on_entry

    @property
    def journal_view(self) -> JournalView:
        """The state after the entries folded so far; reads nothing from the store.

        It is a `View` once the journal has a `FitStarted` entry, an empty `JournalView` before.
        """
        return self._journal.view

    @property
    def view(self) -> View:
        """`journal_view` as a `View`; reads nothing from the store.

        Only for callers that know that the run was started: raises `AssertionError` otherwise.
        """
        view = self._journal.view
        assert isinstance(view, View), "the journal has no FitStarted entry"
        return view

    def catch_up(self) -> JournalView:
        """Read and fold all new entries from the store, and return the resulting view. Blocks.

        Raises `JournalError` for an entry that cannot be decoded or does not fit, and `StoreError`.
        """
        return self._journal.catch_up()

    def read(self, slot: int) -> JournalPage:
        """Read a page of entries from `slot` on, without folding them. Any thread may call it.

        Blocks. Pass the result to `apply_page`. Raises `StoreError` if no entry could be read; see
        `Journal.read`.
        """
        return self._journal.read(slot)

    def apply_page(self, page: JournalPage) -> bool:
        """Fold a page and return True if no entry followed it when it was read.

        Does not access the store. Entries that are folded already are ignored. Raises
        `JournalError`.
        """
        return self._journal.apply_page(page)

    def apply_entry(self, slot: int, body: bytes) -> JournalView:
        """Fold the encoded entry `body` that another process sent, if `slot` is the next one.

        Any other slot is ignored. Returns the resulting view, and does not access the store. Raises
        `JournalError` if the entry cannot be decoded or does not fit.
        """
        return self._journal.apply_entry(slot, body)

    def append(self, event: JournalEvent, after: JournalView) -> JournalView:
        """Offer an event for the slot after the view `after`, then read; return the resulting view.

        If another process has taken the slot, or the write failed temporarily, the event is not in
        that view: check the view, decide again. Blocks. Raises `StoreError` and `JournalError`; see
        `Journal.append`.
        """
        return self._journal.append(self._make_entry(event), after)

    def encode_entry(self, event: JournalEvent) -> bytes:
        """Encode an event by this agent as the body for `create_entry`, with the present wall time.

        Two calls may give different bytes: to repeat an offer, reuse the first result.
        """
        return encode(self._make_entry(event))

    def create_entry(self, slot: int, body: bytes) -> None:
        """Create the entry of a slot from its body, without folding it. Any thread may call it.

        Blocks. Raises `AlreadyExistsError` if the slot is taken; see `Journal.create_entry`.
        """
        self._journal.create_entry(slot, body)

    def renew_lease(self) -> None:
        """Increment the counter in this process's lease object, to show that the leader is alive.

        Called by the leader every `RunTiming.lease_interval_s`. Blocks; raises `StoreError`.
        """
        # Never persisted: a restarted process has another agent id, and thereby another lease.
        self._lease_counter += 1
        self.store.put(keys.lease(self.agent_id), str(self._lease_counter).encode())

    def read_lease(self, leader: AgentId) -> bytes:
        """Return the counter in the lease object of the process `leader`; b"" if there is none.

        Compare it only with an earlier value: the lease holds no time, because clocks of machines
        are never compared. Blocks; raises `StoreError`.
        """
        try:
            return self.store.get(keys.lease(leader))
        except NotFoundError:
            return b""

    def publish_member(self, member: Member) -> None:
        """Write this agent's `Member`, from which clients read the nodes of a run.

        Overwrites the previous one. Blocks; raises `StoreError`.
        """
        self.store.put(keys.member(self.agent_id), encode(member))

    def list_members(self) -> Iterator[Member]:
        """Yield the `Member` of every agent that has ever joined the run, ended ones included.

        Reads one object per agent while iterating. Objects that were deleted meanwhile or cannot be
        decoded are skipped; other `StoreError`s are raised.
        """
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
