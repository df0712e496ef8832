"""A view written down now and then, so that late readers need not replay the whole journal.

A snapshot is a cache: it holds nothing the entries before its slot do not say. The leader writes
one for every so many entries; a reader takes the newest it can read, and none if there is none.
"""

from __future__ import annotations

import msgspec

from spotfit.core.codec import UNREADABLE, decoder, encode
from spotfit.core.errors import AlreadyExistsError, NotFoundError, TransientStoreError
from spotfit.ledger import keys
from spotfit.model.view import View
from spotfit.store.api import Store

EVERY = 256
"""Entries from one snapshot to the next."""


class Snapshot(msgspec.Struct, frozen=True):
    """A view, and the format of the facts in it."""

    view: View
    format: int = 1


_snapshots = decoder(Snapshot)


def due(view: View) -> bool:
    """Whether the leader should write this view down."""
    return view.next_slot > 0 and view.next_slot % EVERY == 0


def write(store: Store, view: View) -> None:
    """Leave a snapshot; if somebody else did, or the store fails, nothing is lost."""
    try:
        store.create(keys.snapshot(view.next_slot), encode(Snapshot(view)))
    except (AlreadyExistsError, TransientStoreError):
        return


def newest(store: Store) -> View:
    """The view of the newest snapshot that can be read; the empty view if there is none."""
    for found in sorted(store.list(keys.SNAPSHOTS.rstrip("/")), reverse=True):
        try:
            return _snapshots.decode(store.get(found.key)).view
        except (NotFoundError, *UNREADABLE):
            continue
    return View()
