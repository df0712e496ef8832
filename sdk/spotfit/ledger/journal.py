"""The journal: numbered, immutable entries, one atomic `create` each. What it says is so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from spotfit.core.codec import UNREADABLE, decoder, encode
from spotfit.core.errors import (
    AlreadyExistsError,
    JournalError,
    NotFoundError,
    StoreError,
    TransientStoreError,
)
from spotfit.ledger import keys, snapshot
from spotfit.model.events import Entry
from spotfit.model.fold import fold
from spotfit.model.view import View
from spotfit.store.api import Store

Heard = Callable[[int, bytes, Entry], None]
"""Told of every entry as it is folded: its slot, its bytes, itself."""

_AT_ONCE = 1000
"""Entries read before they are folded."""


class Pages(NamedTuple):
    """A stretch of the journal as it lies in the bucket, not folded yet."""

    first: int
    """The slot of the first of `bodies`."""
    bodies: tuple[bytes, ...]
    start: View | None = None
    """The snapshot it goes on from, where one spared the reading of all before `first`."""
    to_the_end: bool = True
    """Whether the entry after the last was looked for, and is not there."""


class Journal:
    """One reader's place in the journal of a run, and the only way to write to it.

    `read` and `enter` call the store and change nothing here, so any thread may call them; `take`
    and `told` fold, and call nothing. `catch_up` and `append` do both, for those who may wait.
    """

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        self._store = store
        self._lock = threading.RLock()
        """A view and its slot belong together: one reader at a time."""
        self._whole = whole
        """Read every entry, also where a snapshot would spare it."""
        self.heard: Heard | None = None
        self.view = View()

    def catch_up(self) -> View:
        """Read every entry that is there. Raises `JournalError` for one that is no entry of ours.

        Who has read nothing yet begins at the newest snapshot, if the run is long enough for one.
        """
        with self._lock:
            while not self.take(self.read(self.view.next_slot)):
                continue
            return self.view

    def append(self, entry: Entry, after: View) -> View:
        """Offer `entry` for the slot right after `after`, then read what is really there.

        `after` is the view the entry was decided from. If the run has moved on, the slot is taken
        and the decision is void. Whether the offer was accepted, refused or lost, the journal is
        the only answer. One that was lost on the way may still arrive: what is offered next for
        that slot must mean the same, or be decided by a `Scribe`, who sees to that.
        """
        with contextlib.suppress(AlreadyExistsError, TransientStoreError):
            self.enter(after.next_slot, encode(entry))
        return self.catch_up()

    # --- calls to the store --------------------------------------------------------------------

    def read(self, slot: int) -> Pages:
        """What lies there from that slot on, as far as the store tells before it fails."""
        start = None
        if slot == 0 and not self._whole and self._is_long():
            start = snapshot.newest(self._store)
            slot = start.next_slot
        bodies: list[bytes] = []
        while len(bodies) < _AT_ONCE:
            try:
                bodies.append(self._store.get(keys.entry(slot + len(bodies))))
            except NotFoundError:
                return Pages(slot, tuple(bodies), start)
            except StoreError:
                if not bodies:
                    raise
                break
        return Pages(slot, tuple(bodies), start, to_the_end=False)

    def enter(self, slot: int, body: bytes) -> None:
        """Offer an entry for that slot. Raises `AlreadyExistsError` where another has it, or this
        one since an answer was lost; after any other error of the store nobody knows."""
        self._store.create(keys.entry(slot), body)

    # --- folding -------------------------------------------------------------------------------

    def take(self, pages: Pages) -> bool:
        """Fold what is new in them; whether they led to the end. Raises `JournalError`."""
        with self._lock:
            if pages.start is not None and pages.start.next_slot > self.view.next_slot:
                self.view = pages.start
            for slot, body in enumerate(pages.bodies, pages.first):
                self.told(slot, body)
            return pages.to_the_end

    def told(self, slot: int, body: bytes) -> View:
        """Fold a copy of an entry if it is the next one; others are old news, or too early."""
        with self._lock:
            if slot == self.view.next_slot:
                self._take(body)
            return self.view

    def _is_long(self) -> bool:
        try:
            return bool(self._store.get(keys.entry(snapshot.EVERY)))
        except NotFoundError:
            return False

    def _take(self, body: bytes) -> None:
        slot = self.view.next_slot
        entry = _read(slot, body)
        if self.view.run_id not in (None, entry.run_id):
            raise JournalError(
                f"Entry {slot} of the journal is of run {entry.run_id}, not {self.view.run_id}.",
                do="Two runs were mixed in one folder; give this one a name or folder of its own.",
            )
        try:
            self.view = fold(self.view, entry)
        except KeyError as stranger:
            raise JournalError(
                f"Entry {slot} of the journal speaks of {stranger}, which none before it knows.",
                do=_REMEDY,
            ) from stranger
        if self.heard is not None:
            self.heard(slot, body, entry)


_entries = decoder(Entry)
_REMEDY = (
    "Restore the journal from a copy, or choose another RunConfig(name=...) for a new run; the "
    "checkpoints in the folder are not touched."
)


def check_whole(store: Store) -> None:
    """See that no entry is missing between the first and the last. Raises `JournalError`.

    A reader stops at a hole and takes it for the end; a writer would fill it. So look before you
    trust a journal that others may have copied or tidied.
    """
    for slot, found in enumerate(store.list(keys.JOURNAL.rstrip("/"))):
        if found.key != keys.entry(slot):
            raise JournalError(
                f"Entry {slot} of the journal in {store.url} is missing, but later ones are there.",
                do=_REMEDY,
            )


def _read(slot: int, body: bytes) -> Entry:
    try:
        return _entries.decode(body)
    except UNREADABLE as error:
        raise JournalError(
            f"Entry {slot} of the journal cannot be read: {error}.",
            do=f"It was cut, written by something else, or by a newer spotfit. {_REMEDY}",
        ) from error
