"""The journal: numbered immutable entries, each written by one atomic `create`.

The journal is the only authority on the state of a run. `create` fails if the slot is taken, so
that among concurrent writers exactly one wins; the others read the winning entry and decide again
(docs/decisions/0002).

New readers start at a cached view instead of folding the complete journal. The leader writes one
every `VIEW_CACHE_INTERVAL` entries. A cached view contains only what the entries before its slot
define: it may be deleted, and one that cannot be decoded is ignored.

`Ledger` is the access of one process to the objects of a run, except for checkpoints and logs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import (
    AlreadyExistsError,
    JournalError,
    NotFoundError,
    StoreError,
    TransientStoreError,
)
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger import keys
from spotfit.model.events import JournalEntry, JournalEvent
from spotfit.model.topology import Member
from spotfit.model.view import JournalView, View, fold
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read

# --- Cached views ---------------------------------------------------------------------------------


# Reading 256 entries takes about 256 sequential requests, a few seconds: short compared to booting
# a machine. A smaller interval would write more objects, each as large as the complete view.
VIEW_CACHE_INTERVAL = 256


class CachedView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a cached view object: the view, and the version of this format."""

    view: View
    format_version: int = 1


_cached_view_decoder = decoder(CachedView)


def is_cache_due(view: View) -> bool:
    """Whether the leader should now write this view to the cache, with `write_cached_view`.

    True once per `VIEW_CACHE_INTERVAL` entries: ask after every folded entry.
    """
    return view.next_slot > 0 and view.next_slot % VIEW_CACHE_INTERVAL == 0


def write_cached_view(store: Store, view: View) -> None:
    """Create the cached view object of `view` below the run's root. Blocks.

    Returns without an error if the object exists or the store fails temporarily, because readers
    work without it. Raises other `StoreError`s.
    """
    try:
        store.create(keys.cached_view(view.next_slot), encode(CachedView(view=view)))
    except (AlreadyExistsError, TransientStoreError):
        return


def read_newest_view(store: Store) -> JournalView:
    """Read the newest cached view of the run that can be decoded; the empty view if there is none.

    Entries after it may exist: they start at its `next_slot`. Blocks; raises `StoreError`.
    """
    # Newest first; one that is corrupt or of another version falls back to the one before it.
    for found in sorted(store.list(keys.VIEWS.rstrip("/")), reverse=True):
        try:
            return _cached_view_decoder.decode(store.get(found.key)).view
        except (NotFoundError, *DECODE_ERRORS):
            continue
    return JournalView()


EntryListener = Callable[[int, bytes, JournalEntry], None]
"""Called for every folded entry with its slot, bytes and decoded value."""

# Limits the memory of one page, and the time until the reader of a very long journal makes
# progress.
_MAX_PAGE_ENTRIES = 1000


class JournalPage(NamedTuple):
    """Consecutive entries that were read and are not folded yet."""

    first_slot: int
    """The slot of `bodies[0]`."""
    bodies: tuple[bytes, ...]
    cached_view: JournalView | None = None
    """The cached view at `first_slot`, which replaces all earlier entries; None if none was
    used."""
    reached_end: bool = True
    """Whether the slot after the last entry is empty."""


class Journal:
    """One reader's position in a journal, with the view folded up to it.

    `read` and `create_entry` call the store and do not change this object, so any thread may call
    them. `apply_page` and `apply_entry` fold without calling the store. `catch_up` and `append` do
    both, for callers that may block.
    """

    def __init__(self, store: Store, *, ignore_view_cache: bool = False) -> None:
        self._store = store
        # Folding an entry reads the view's slot and replaces the view; two threads must not
        # interleave.
        self._lock = threading.RLock()
        self._ignore_view_cache = ignore_view_cache
        self.on_entry: EntryListener | None = None
        self.view = JournalView()

    def catch_up(self) -> JournalView:
        """Read and fold all new entries, and return the resulting view. Blocks.

        Starts from the newest cached view if nothing was read yet, unless `ignore_view_cache` is
        set. Raises `JournalError` if an entry cannot be decoded or does not fit, and `StoreError`.
        """
        with self._lock:
            while not self.apply_page(self.read(self.view.next_slot)):
                continue
            return self.view

    def append(self, entry: JournalEntry, after: JournalView) -> JournalView:
        """Create `entry` in the slot after `after`, then read; return the view with all entries.

        `after` is the view from which the entry was decided. If other entries were appended since,
        the slot is taken and the entry is dropped; the returned view shows the outcome. A create
        request that timed out may still be executed later, so the next entry offered for that slot
        must be equivalent. `control.JournalWriter` ensures that for decisions.

        Blocks. Raises `JournalError` and `StoreError`, except for a taken slot and a temporary
        failure of the write.
        """
        with contextlib.suppress(AlreadyExistsError, TransientStoreError):
            self.create_entry(after.next_slot, encode(entry))
        return self.catch_up()

    def read(self, slot: int) -> JournalPage:
        """Read entries from `slot` on, up to the end, the page limit or an error of the store.

        Does not fold them: pass the page to `apply_page`. With `slot` 0 the page starts at the
        newest cached view if there is one, unless `ignore_view_cache` is set. An entry that cannot
        be decoded is read again. Blocks; raises `StoreError` or `JournalError` only if no entry
        could be read.
        """
        cached_view = None
        if slot == 0 and not self._ignore_view_cache:
            # One get instead of a list request: most journals are shorter than one cache interval.
            with contextlib.suppress(NotFoundError):
                self._store.get(keys.entry(VIEW_CACHE_INTERVAL))
                cached_view = read_newest_view(self._store)
                slot = cached_view.next_slot
        bodies: list[bytes] = []
        while len(bodies) < _MAX_PAGE_ENTRIES:
            try:
                read_entry = partial(self._read_entry, slot + len(bodies))
                bodies.append(repeat_read(read_entry, errors=(JournalError,)))
            except NotFoundError:
                return JournalPage(slot, tuple(bodies), cached_view)
            except (StoreError, JournalError):
                # Entries that were read are folded; the next read meets the error again.
                if not bodies:
                    raise
                break
        return JournalPage(slot, tuple(bodies), cached_view, reached_end=False)

    def _read_entry(self, slot: int) -> bytes:
        body = self._store.get(keys.entry(slot))
        _decode_entry(slot, body, self._store.url)
        return body

    def create_entry(self, slot: int, body: bytes) -> None:
        """Create the object of that slot with an encoded `JournalEntry`. Does not fold it. Blocks.

        Raises `AlreadyExistsError` if the slot is taken, possibly by this entry if the answer to an
        earlier request was lost. After any other `StoreError` the outcome is unknown: read the
        slot.
        """
        self._store.create(keys.entry(slot), body)

    def apply_page(self, page: JournalPage) -> bool:
        """Fold a page returned by `read`, and return its `reached_end`: False if more must be read.

        Entries that are folded already are ignored. Does not access the store. Raises
        `JournalError` if an entry cannot be decoded or does not fit; the entries before it are
        folded.
        """
        with self._lock:
            # Entries received from other processes may have been folded while the page was read.
            if page.cached_view is not None and page.cached_view.next_slot > self.view.next_slot:
                self.view = page.cached_view
            for slot, body in enumerate(page.bodies, page.first_slot):
                self.apply_entry(slot, body)
            return page.reached_end

    def apply_entry(self, slot: int, body: bytes) -> JournalView:
        """Fold the encoded entry `body` if `slot` is the next one; ignore it otherwise.

        For copies that the leader sends to agents. Calls `on_entry` after folding; returns the
        resulting view. Raises `JournalError` if the entry cannot be decoded, belongs to another run
        or refers to an unknown group of machines.
        """
        with self._lock:
            if slot != self.view.next_slot:
                return self.view
            entry = _decode_entry(slot, body, self._store.url)
            if self.view.run_id not in (None, entry.run_id):
                raise JournalError(
                    f"Journal entry {slot} in {self._store.url} belongs to run {entry.run_id}, not "
                    f"to {self.view.run_id}: two runs were written to one folder.",
                    do="Start again with another RunConfig(name=...) or storage_path. Checkpoints "
                    "in the folder remain: open them with Checkpoint(path).",
                )
            try:
                self.view = fold(self.view, entry)
            except KeyError as unknown:
                raise JournalError(
                    f"Journal entry {slot} in {self._store.url} references unknown {unknown}; an "
                    "earlier entry is missing.",
                    do=_REMEDY,
                ) from unknown
            # Within the lock: listeners receive the entries in the order of their slots, and read
            # the view directly after each.
            if self.on_entry is not None:
                self.on_entry(slot, body, entry)
            return self.view


_entry_decoder = decoder(JournalEntry)
_REMEDY = (
    "Restore the journal from a backup, or start a new run with another RunConfig(name=...); the "
    "checkpoints in the folder are not changed."
)


def check_no_gaps(store: Store) -> None:
    """Check that no journal entry between the first and the last is missing.

    Raises `JournalError` for the first gap. A reader takes a gap for the end of the journal, and a
    writer would fill it. Called by `fit()` and by clients that open a run, whose folder may have
    been copied or cleaned up by other tools. Lists the journal without reading the entries.
    """
    for slot, found in enumerate(store.list(keys.JOURNAL.rstrip("/"))):
        if found.key != keys.entry(slot):
            raise JournalError(
                f"Journal entry {slot} in {store.url} is missing, but later entries exist.",
                do=_REMEDY,
            )


def _decode_entry(slot: int, body: bytes, url: str) -> JournalEntry:
    try:
        return _entry_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise JournalError(
            f"Journal entry {slot} in {url} cannot be decoded by the installed version of spotfit: "
            f"{error}.",
            do=f"If another version of spotfit wrote the run, install it. {_REMEDY}",
        ) from error


# --- Ledger ---------------------------------------------------------------------------------------


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

    def wall_ms(self) -> int:
        """Return this process's wall clock in milliseconds since 1970, for display only."""
        return self._wall_ms()

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
