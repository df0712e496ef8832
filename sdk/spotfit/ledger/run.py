"""Ledger: one run as objects in the bucket; everything but checkpoints goes through here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spotfit.core.codec import UNREADABLE, decoder, encode
from spotfit.core.errors import NotFoundError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger import keys
from spotfit.ledger.journal import Heard, Journal, Pages
from spotfit.model.events import Entry, Event
from spotfit.model.view import View
from spotfit.model.world import Member
from spotfit.store.api import Store

_members = decoder(Member)


class Ledger:
    """The run below `store`'s root, as `me` reads and writes it."""

    def __init__(
        self,
        store: Store,
        run_id: RunId,
        me: AgentId,
        *,
        wall_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.me = me
        self._wall_ms = wall_ms
        self._journal = Journal(store)
        self._beats = 0

    def another(self) -> Ledger:
        """The same run, to be read and written apart from this one: by another thread."""
        return Ledger(self.store, self.run_id, self.me, wall_ms=self._wall_ms)

    def listen(self, heard: Heard) -> None:
        """From now on tell `heard` of every entry that is folded."""
        self._journal.heard = heard

    @property
    def view(self) -> View:
        """The run as far as it was read."""
        return self._journal.view

    def catch_up(self) -> View:
        """Read on."""
        return self._journal.catch_up()

    def read(self, slot: int) -> Pages:
        """The journal from that slot on, to be folded by `take`; see `Journal.read`."""
        return self._journal.read(slot)

    def take(self, pages: Pages) -> bool:
        """Fold what was read; whether it led to the end."""
        return self._journal.take(pages)

    def told(self, slot: int, body: bytes) -> View:
        """Take a copy of an entry that somebody passed on, if it is the next."""
        return self._journal.told(slot, body)

    def append(self, event: Event, after: View) -> View:
        """Offer what was decided from `after`, and read; see `Journal.append`."""
        return self._journal.append(self._signed(event), after)

    def draft(self, event: Event) -> bytes:
        """The entry as it would stand in the journal."""
        return encode(self._signed(event))

    def enter(self, slot: int, draft: bytes) -> None:
        """Offer a draft for that slot; see `Journal.enter`."""
        self._journal.enter(slot, draft)

    def renew_lease(self) -> None:
        """Let the counter of this leader grow."""
        self._beats += 1
        self.store.put(keys.beat(self.me), str(self._beats).encode())

    def lease_of(self, leader: AgentId) -> bytes:
        """The leader's counter; only its changes mean anything. Empty while there is none."""
        try:
            return self.store.get(keys.beat(leader))
        except NotFoundError:
            return b""

    def offer(self, member: Member) -> None:
        """Write down who this agent is, for people and for leaders that cannot be reached."""
        self.store.put(keys.offer(self.me), encode(member))

    def offers(self) -> Iterator[Member]:
        """Every agent that ever offered itself to this run."""
        for found in self.store.list(keys.OFFERS.rstrip("/")):
            try:
                yield _members.decode(self.store.get(found.key))
            except (NotFoundError, *UNREADABLE):
                continue

    def _signed(self, event: Event) -> Entry:
        return Entry(self.run_id, self.me, event, self._wall_ms())
