"""Cached views, so that new readers need not fold the complete journal.

The leader writes one every `VIEW_CACHE_INTERVAL` entries. A cached view contains only what the
entries before its slot define: it may be deleted, and one that cannot be decoded is ignored.
"""

from __future__ import annotations

import msgspec

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import AlreadyExistsError, NotFoundError, TransientStoreError
from spotfit.ledger import keys
from spotfit.model.view import JournalView, View
from spotfit.store.api import Store

# Reading 256 entries takes about 256 sequential requests, a few seconds: short compared to booting
# a machine. A smaller interval would write more objects, each as large as the complete view.
VIEW_CACHE_INTERVAL = 256


class CachedView(msgspec.Struct, frozen=True, kw_only=True):
    """A view and the version of its format."""

    view: View
    format_version: int = 1


_cached_view_decoder = decoder(CachedView)


def is_cache_due(view: View) -> bool:
    """Whether the leader should write this view to the cache."""
    return view.next_slot > 0 and view.next_slot % VIEW_CACHE_INTERVAL == 0


def write_cached_view(store: Store, view: View) -> None:
    """Write a cached view. A transient error or an existing object is ignored: it is a cache."""
    try:
        store.create(keys.cached_view(view.next_slot), encode(CachedView(view=view)))
    except (AlreadyExistsError, TransientStoreError):
        return


def read_newest_view(store: Store) -> JournalView:
    """The newest cached view that can be decoded; the empty view if there is none."""
    # Newest first; one that is corrupt or of another version falls back to the one before it.
    for found in sorted(store.list(keys.VIEWS.rstrip("/")), reverse=True):
        try:
            return _cached_view_decoder.decode(store.get(found.key)).view
        except (NotFoundError, *DECODE_ERRORS):
            continue
    return JournalView()
