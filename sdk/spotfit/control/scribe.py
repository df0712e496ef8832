"""The journal for a step machine that must never stand still.

Calls to the bucket go as errands, and what they bring is folded when the machine asks next. However
long the bucket hangs, the caller goes on hearing and greeting; it only decides nothing meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spotfit.control.errands import Done, Errands, pause_s
from spotfit.core.errors import AlreadyExistsError, StoreError
from spotfit.ledger.journal import Pages
from spotfit.ledger.run import Ledger
from spotfit.model.events import Event
from spotfit.model.view import View

_NEVER = float("inf")


@dataclass(slots=True)
class _Offer:
    """An entry on its way into the journal."""

    slot: int
    draft: bytes
    under_way: bool = False
    taken: bool = False
    """Whether the store says that the slot is taken: by whom, only reading tells."""


class Scribe:
    """Reads and writes the journal of one run for one reader.

    An entry that was offered is offered again, the very same, until it is known who has its slot.
    So what was lost on the way may arrive late and mean no harm, and nobody decides from a view
    that his own last decision may already have changed.
    """

    def __init__(self, ledger: Ledger, errands: Errands) -> None:
        self.ledger = ledger
        self._errands = errands
        self._offer: _Offer | None = None
        self._begun = False
        """Whether the journal was ever read to its end."""
        self._asked = True
        self._reading = False
        self._told_of = -1
        """The last slot that somebody said is taken."""
        self._failures = 0
        self._again_at = -_NEVER
        self._trouble: StoreError | None = None
        self.read_at = -_NEVER
        """When the journal was last read to its end."""

    @property
    def view(self) -> View:
        """The run as far as it was read."""
        return self.ledger.view

    @property
    def settled(self) -> bool:
        """Whether a decision may be made from `view`: nothing that was offered is still on its way,
        and nothing is known to stand after it."""
        return self._begun and self._offer is None and self._told_of < self.view.next_slot

    @property
    def wake_at(self) -> float:
        """When `go_on` should be called again, if nothing wakes the caller before."""
        offers = self._offer is not None and not (self._offer.under_way or self._offer.taken)
        reads = self._must_read and not self._reading
        return self._again_at if offers or reads else _NEVER

    # --- what the caller wants ---------------------------------------------------------------

    def ask(self) -> None:
        """Have the journal read, by a reading that begins after this moment."""
        self._asked = True

    def told(self, slot: int, body: bytes) -> None:
        """Take a copy of an entry that somebody passed on. Raises `JournalError`."""
        self._told_of = max(self._told_of, slot)
        self.ledger.told(slot, body)

    def write(self, event: Event, now: float) -> None:
        """Offer what was decided from `view`. What became of it is known once `settled` again.

        Only while `settled`. Never raises what the store says; `go_on` does.
        """
        assert self.settled, "what was offered before is not known yet"
        self._offer = _Offer(self.view.next_slot, self.ledger.draft(event))
        self._step(now)

    def go_on(self, now: float) -> None:
        """Take in what has come, and send for what is due.

        Raises the `StoreError` of a call that failed, once; it is made again after a pause. Raises
        `JournalError` for what is no entry of ours.
        """
        self._step(now)
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    # --- errands -----------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        if self._offer is not None:
            self._insist(self._offer, now)
        while self._reading or (self._must_read and now >= self._again_at):
            if not self._read(now):
                return

    def _insist(self, offer: _Offer, now: float) -> None:
        """Offer it until the store says whose the slot is, unless somebody else says so before."""
        if offer.slot < self.view.next_slot:
            self._offer = None
        elif offer.under_way or not (offer.taken or now < self._again_at):
            enter = partial(self.ledger.enter, offer.slot, offer.draft)
            done = self._errands.run(f"append {offer.slot}", enter)
            offer.under_way = done is None
            if done is not None:
                self._answered(offer, done, now)

    def _answered(self, offer: _Offer, done: Done, now: float) -> None:
        match done.error:
            case None:
                self._failures = 0
                self.ledger.told(offer.slot, offer.draft)
                self._offer = None
            case AlreadyExistsError():
                self._failures = 0
                self._again_at = now
                offer.taken = True
            case error:
                self._fail(error, now)

    def _read(self, now: float) -> bool:
        """Start a reading, or take what one has brought; whether to look at once for more."""
        if not self._reading:
            self._reading, self._asked = True, False
        read = partial(self.ledger.read, self.view.next_slot)
        done = self._errands.run("read", read)
        if done is None:
            return False
        self._reading = False
        if done.error is not None:
            self._asked = True
            self._fail(done.error, now)
            return False
        self._take(done.value, now)
        return True

    def _take(self, pages: Pages, now: float) -> None:
        if not self.ledger.take(pages):
            self._asked = True
            return
        self._begun, self.read_at, self._failures = True, now, 0
        if self._offer is not None and self._offer.slot < self.view.next_slot:
            self._offer = None
        if self._must_read and not self._asked:
            self._pause(now)  # the store does not show yet what it said is there

    def _fail(self, error: Exception, now: float) -> None:
        if not isinstance(error, StoreError):
            raise error
        self._trouble = error
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._again_at = now + pause_s(self._failures)
        self._failures += 1

    @property
    def _must_read(self) -> bool:
        missing = self._told_of >= self.view.next_slot
        return self._asked or missing or (self._offer is not None and self._offer.taken)
