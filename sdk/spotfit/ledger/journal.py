"""The journal: numbered, immutable entries, one atomic `create` each. What it says is so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spotfit.core.codec import UNREADABLE, decoder, encode
from spotfit.core.errors import (
    AlreadyExistsError,
    JournalError,
    NotFoundError,
    TransientStoreError,
)
from spotfit.ledger import keys, snapshot
from spotfit.model.events import Entry
from spotfit.model.fold import fold
from spotfit.model.view import View
from spotfit.store.api import Store

Heard = Callable[[int, bytes, Entry], None]
"""Told of every entry as it is folded: its slot, its bytes, itself."""


class Journal:
    """One reader's place in the journal of a run, and the only way to write to it."""

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        self._store = store
        self._lock = threading.RLock()
        """A view and its slot belong together: one reader at a time."""
        self._whole = whole
        """Read every entry, also where a snapshot would spare it."""
        self.heard: Heard | None = None
        self.view = View()
        self.unsure = True
        """Whether reading or writing stopped half-way: `view` may be older than what we did."""

    def catch_up(self) -> View:
        """Read every entry that is there. Raises `JournalError` for one that is no entry of ours.

        Who has read nothing yet begins at the newest snapshot, if the run is long enough for one.
        """
        with self._lock:
            self.unsure = True
            if self.view.next_slot == 0 and not self._whole and self._is_long():
                self.view = snapshot.newest(self._store)
            while True:
                try:
                    body = self._store.get(keys.entry(self.view.next_slot))
                except NotFoundError:
                    self.unsure = False
                    return self.view
                self._take(body)

    def told(self, slot: int, body: bytes) -> View:
        """Somebody passed on a copy: fold it if it is the next entry, else read the bucket."""
        with self._lock:
            if slot == self.view.next_slot:
                self._take(body)
            elif slot > self.view.next_slot:
                self.catch_up()
            return self.view

    def append(self, entry: Entry, after: View) -> View:
        """Offer `entry` for the slot right after `after`, then read what is really there.

        `after` is the view the entry was decided from. If the run has moved on, the slot is taken
        and the decision is void. Whether the offer was accepted, refused or lost, the journal is
        the only answer; where reading fails, too, `unsure` stays set until somebody can.
        """
        self.unsure = True
        try:
            self._store.create(keys.entry(after.next_slot), encode(entry))
        except (AlreadyExistsError, TransientStoreError):
            return self.catch_up()
        return self.catch_up()

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
