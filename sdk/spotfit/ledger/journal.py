"""The journal: numbered immutable entries, each written by one atomic `create`.

The journal is the only authority on the state of a run. `create` fails if the slot is taken, so
that among concurrent writers exactly one wins; the others read the winning entry and decide again
(docs/decisions/0002).

New readers start at a cached view instead of folding the complete journal. The leader writes one
every `VIEW_CACHE_INTERVAL` entries. A cached view contains only what the entries before its slot
define: it may be deleted, and one that cannot be decoded is ignored.

With the run key (an `AuthenticatedStore`) every entry is authenticated. The stored body of an entry
is its JSON, a line with the hash of all bodies before it, and a line with the MAC of its slot and
both lines:

    {"author": ..., "event": ..., "run_id": ...}
    previous <64 hex digits>
    hmac-sha256 <64 hex digits>

An entry without a valid MAC does not change the state of the run, except for a `CancelRequested`.
Authentic entries state what precedes them, so that a changed or removed entry is detected at the
next authentic one (docs/decisions/0046). Without the key, entries are decoded and not verified.

`Ledger` is the access of one process to the objects of a run, except for checkpoints and logs.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    IntegrityError,
    JournalError,
    NotFoundError,
    StoreError,
    TransientStoreError,
)
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import MAX_READS, AuthenticatedStore
from spotfit.model.events import AgentCrash, CancelRequested, JournalEntry, JournalEvent
from spotfit.model.topology import Member, StandbyReport
from spotfit.model.view import JournalView, View, fold
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read
from spotfit.store.storage_time import measure_offset_ms

# --- Cached views ---------------------------------------------------------------------------------


# Reading 256 entries takes about 256 sequential requests, a few seconds: short compared to booting
# a machine. A smaller interval would write more objects, each as large as the complete view.
VIEW_CACHE_INTERVAL = 256


class CachedView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a cached view object: the state after the entries before its slot."""

    view: View
    previous: str
    """Hash of the bodies of these entries."""
    format_version: int = 1


_cached_view_decoder = decoder(CachedView)


def is_cache_due(view: View) -> bool:
    """Whether the leader should now write this view to the cache, with `write_cached_view`.

    True once per `VIEW_CACHE_INTERVAL` entries: ask after every folded entry.
    """
    return view.next_slot > 0 and view.next_slot % VIEW_CACHE_INTERVAL == 0


def write_cached_view(store: Store, cached: CachedView) -> None:
    """Create the cached view object below the run's root. Blocks.

    Returns without an error if the object exists or the store fails temporarily, because readers
    work without it. Raises other `StoreError`s.
    """
    try:
        store.create(keys.cached_view(cached.view.next_slot), encode(cached))
    except (AlreadyExistsError, TransientStoreError):
        return


def read_newest_view(store: Store) -> CachedView | None:
    """Read the newest valid cached view of the run; None if there is none.

    With an `AuthenticatedStore`, only authentic ones are valid. Entries after it may exist: they
    start at its `next_slot`. Blocks; raises `StoreError`.
    """
    # Newest first; one that is corrupt or of another version falls back to the one before it.
    for found in sorted(store.list(keys.VIEWS.rstrip("/")), reverse=True):
        try:
            cached = _cached_view_decoder.decode(strip_mac(store.get(found.key)))
        except (NotFoundError, IntegrityError, *DECODE_ERRORS):
            continue
        if found.key == keys.cached_view(cached.view.next_slot):
            return cached
    return None


def _read_starting_view(store: Store) -> CachedView | None:
    """Return the cached view at which a new reader starts; None if it starts at the first entry."""
    # One get instead of a list request: most journals are shorter than one cache interval.
    with contextlib.suppress(NotFoundError):
        store.get(keys.entry(VIEW_CACHE_INTERVAL))
        return read_newest_view(store)
    return None


EntryListener = Callable[[int, bytes, JournalEntry], None]
"""Called for every folded entry with its slot, bytes and decoded value."""

# Limits the memory of one page, and the time until the reader of a very long journal makes
# progress.
_MAX_PAGE_ENTRIES = 1000
# A bucket that damages every tenth answer damages 20 in a row once in 10**20 entries.
_MAX_DAMAGED_READS = 20


class JournalPage(NamedTuple):
    """Consecutive entries that were read and are not folded yet."""

    first_slot: int
    """The slot of `bodies[0]`."""
    bodies: tuple[bytes, ...]
    cached_view: CachedView | None = None
    """The cached view at `first_slot`, which replaces all earlier entries; None if none was
    used."""
    reached_end: bool = True
    """Whether the slot after the last entry is empty."""
    authentic_slots: AbstractSet[int] = frozenset()
    """The slots whose bodies have a valid MAC, which `read` has verified."""


class Journal:
    """One reader's position in a journal, with the view folded up to it.

    `read` and `create_entry` call the store and do not change this object, so any thread may call
    them. `apply_page` and `apply_entry` fold without calling the store. `catch_up` and `append` do
    both, for callers that may block.
    """

    def __init__(self, store: Store, *, ignore_view_cache: bool = False) -> None:
        self._store = store
        self._mac = store.mac if isinstance(store, AuthenticatedStore) else None
        # Folding an entry reads the view's slot and replaces the view; two threads must not
        # interleave.
        self._lock = threading.RLock()
        self._ignore_view_cache = ignore_view_cache
        self.on_entry: EntryListener | None = None
        self.view = JournalView()
        self._previous = _EMPTY_JOURNAL_HASH
        self.ignored_slots: tuple[int, ...] = ()
        """The slots after the last authentic entry whose bodies were ignored, because they have no
        valid MAC; empty without the run key."""
        self._first_unauthenticated: int | None = None
        """The first slot after the last authentic entry whose body has no valid MAC."""

    def clone(self) -> Journal:
        """Return a journal at the same position, without a listener."""
        clone = Journal(self._store, ignore_view_cache=self._ignore_view_cache)
        with self._lock:
            clone.view, clone._previous = self.view, self._previous
            clone.ignored_slots = self.ignored_slots
            clone._first_unauthenticated = self._first_unauthenticated
        return clone

    def check_is_authentic(self) -> None:
        """Check that the last entry that was read is authentic, for readers of an ended run.

        A running run ignores entries without a valid MAC, but the last one may have been changed.
        Raises `JournalError`; does nothing without the run key.
        """
        if self.ignored_slots:
            slot = self.ignored_slots[0]
            raise JournalError(
                f"Journal entry {slot} in {self._store.url} is not authentic: it was changed, or "
                "written without the key of this run.",
                do=f"If the run had ended before it was written, delete {keys.entry(slot)} and the "
                "entries after it. Otherwise restore them from a backup.",
            )

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
        if self.view.next_slot < after.next_slot:  # `after` was read by another object
            self.catch_up()
        with self._lock:
            is_free = self.view.next_slot == after.next_slot
            body = self.encode_entry(entry)
        if is_free:
            with contextlib.suppress(AlreadyExistsError, TransientStoreError):
                self.create_entry(after.next_slot, body)
        return self.catch_up()

    def encode_entry(self, entry: JournalEntry) -> bytes:
        """Return the body of `entry` for the slot after the present view, for `create_entry`.

        With the run key it is authenticated, and thus valid in that slot only.
        """
        with self._lock:
            content = encode(entry)
            if self._mac is None:
                return content
            content += f"\nprevious {self._previous}".encode()
            return self._mac.add(keys.entry(self.view.next_slot), content)

    def cached_view(self) -> CachedView:
        """Return the present state for `write_cached_view`; the run must have been started."""
        with self._lock:
            assert isinstance(self.view, View), "the journal has no FitStarted entry"
            return CachedView(view=self.view, previous=self._previous)

    def read(self, slot: int) -> JournalPage:
        """Read entries from `slot` on, up to the end, the page limit or an error of the store.

        Does not fold them: pass the page to `apply_page`. With `slot` 0 the page starts at the
        newest cached view if there is one, unless `ignore_view_cache` is set. An entry that cannot
        be decoded is read again. Blocks; raises `StoreError` or `JournalError` only if no entry
        could be read.
        """
        cached_view = None
        if slot == 0 and not self._ignore_view_cache:
            cached_view = _read_starting_view(self._store)
            slot = cached_view.view.next_slot if cached_view is not None else 0
        bodies: list[bytes] = []
        authentic_slots: set[int] = set()
        reached_end = False
        while len(bodies) < _MAX_PAGE_ENTRIES:
            try:
                body, is_authentic = self._read_body(slot + len(bodies))
            except NotFoundError:
                reached_end = True
                break
            except (StoreError, JournalError):
                # Entries that were read are folded; the next read meets the error again.
                if not bodies:
                    raise
                break
            if is_authentic:
                authentic_slots.add(slot + len(bodies))
            bodies.append(body)
        return JournalPage(slot, tuple(bodies), cached_view, reached_end, authentic_slots)

    def _read_body(self, slot: int) -> tuple[bytes, bool]:
        """Return the body of a slot, and whether it has a valid MAC."""
        # A damaged answer must not be taken for a forged entry: entries that were appended to the
        # wrong bytes would break the chain of hashes for all readers.
        if self._mac is None:
            read = partial(self._read_decodable_body, slot)
            return repeat_read(read, errors=(JournalError,)), False
        key = keys.entry(slot)
        bodies: Counter[bytes] = Counter()
        # An entry without a MAC, such as a cancellation request, counts once the same bytes were
        # read `MAX_READS` times: damaged answers differ from each other.
        while max(bodies.values(), default=0) < MAX_READS and bodies.total() < _MAX_DAMAGED_READS:
            body = self._store.get(key)
            if self._mac.is_valid(key, body):
                return body, True
            bodies[body] += 1
        return bodies.most_common(1)[0][0], False

    def _read_decodable_body(self, slot: int) -> bytes:
        body = self._store.get(keys.entry(slot))
        _decode_entry(slot, _entry_json(body), self._store)
        return body

    def create_entry(self, slot: int, body: bytes) -> None:
        """Create the object of that slot with the body of an entry. Does not fold it. Blocks.

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
            cached = page.cached_view
            if cached is not None and cached.view.next_slot > self.view.next_slot:
                self.view, self._previous = cached.view, cached.previous
                self.ignored_slots, self._first_unauthenticated = (), None
            for slot, body in enumerate(page.bodies, page.first_slot):
                self._apply_entry(slot, body, is_authentic=slot in page.authentic_slots)
            return page.reached_end

    def apply_entry(self, slot: int, body: bytes) -> JournalView:
        """Fold the encoded entry `body` if `slot` is the next one; ignore it otherwise.

        For copies that the leader sends to agents. Calls `on_entry` after folding; returns the
        resulting view. With the run key, an entry without a valid MAC only advances the view's
        slot, with a warning, unless it is a cancellation request.

        Raises `JournalError` if the entry cannot be decoded, belongs to another run or refers to an
        unknown group of machines, and with the run key if it is the first one and not authentic, or
        if an entry before it was changed or removed.
        """
        return self._apply_entry(slot, body, is_authentic=False)

    def _apply_entry(self, slot: int, body: bytes, *, is_authentic: bool) -> JournalView:
        """`is_authentic`: the MAC of the body was verified; otherwise it is verified here."""
        with self._lock:
            if slot != self.view.next_slot:
                return self.view
            entry = self._decode(slot, body, is_authentic=is_authentic)
            if entry is None:
                self.view = replace(self.view, next_slot=slot + 1)
            else:
                self.view = self._fold(slot, entry)
            self._previous = _extend_hash(self._previous, body)
            # Within the lock: listeners receive the entries in the order of their slots, and read
            # the view directly after each.
            if entry is not None and self.on_entry is not None:
                self.on_entry(slot, body, entry)
            return self.view

    def is_authentic(self, slot: int, body: bytes) -> bool:
        """Whether the entry `body` has a valid MAC for `slot`; True without the run key."""
        return self._mac is None or self._mac.is_valid(keys.entry(slot), body)

    def _decode(self, slot: int, body: bytes, *, is_authentic: bool) -> JournalEntry | None:
        """Return the entry in `body`; None if it is not authentic and must be ignored."""
        if self._mac is None:
            return _decode_entry(slot, _entry_json(body), self._store)
        if is_authentic or self._mac.is_valid(keys.entry(slot), body):
            content, stated_previous = _split_body(body)
            if stated_previous != self._previous.encode():
                raise self._changed_entry_error(slot)
            self.ignored_slots, self._first_unauthenticated = (), None
            return _decode_entry(slot, content, self._store)
        # `fit()` writes the first entry into an empty folder, so another writer is an error.
        if slot == 0:
            raise JournalError(
                f"Journal entry 0 in {self._store.url} is not authentic: it was not written with "
                "the key of this run, or it was changed.",
                do=_REMEDY,
            )
        if self._first_unauthenticated is None:
            self._first_unauthenticated = slot
        entry = self._decode_cancel_request(body)
        if entry is None:
            self.ignored_slots += (slot,)
        log.warning(
            "journal.entry_not_authentic",
            slot=slot,
            url=self._store.url,
            effect="ignored" if entry is None else "cancellation requested",
        )
        return entry

    def _decode_cancel_request(self, body: bytes) -> JournalEntry | None:
        """Return the cancellation request in a body without a valid MAC; None for anything else."""
        try:
            entry = _entry_decoder.decode(_entry_json(body))
        except DECODE_ERRORS:
            return None
        is_of_this_run = entry.run_id == self.view.run_id
        return entry if is_of_this_run and isinstance(entry.event, CancelRequested) else None

    def _changed_entry_error(self, slot: int) -> JournalError:
        changed = self._first_unauthenticated
        if changed is not None:
            problem = f"was changed after entry {slot} had been written"
        else:
            changed = slot
            problem = "does not follow the entries before it: one of them was replaced"
        return JournalError(
            f"Journal entry {changed} in {self._store.url} {problem}.",
            do=f"Check who else can write to the storage of the run. {_REMEDY}",
        )

    def _fold(self, slot: int, entry: JournalEntry) -> JournalView:
        if self.view.run_id not in (None, entry.run_id):
            raise JournalError(
                f"Journal entry {slot} in {self._store.url} belongs to run {entry.run_id}, not "
                f"to {self.view.run_id}: two runs were written to one folder.",
                do="Start again with another RunConfig(name=...) or storage_path. Checkpoints "
                "in the folder remain: open them with Checkpoint(path).",
            )
        try:
            return fold(self.view, entry)
        except KeyError as unknown:
            raise JournalError(
                f"Journal entry {slot} in {self._store.url} references unknown {unknown}; an "
                "earlier entry is missing.",
                do=_REMEDY,
            ) from unknown


_entry_decoder = decoder(JournalEntry)
_EMPTY_JOURNAL_HASH = "0" * 64
_PREVIOUS_LINE_START = b"\nprevious "
_HASH_BYTES = 64  # hexadecimal digits
_PREVIOUS_LINE_BYTES = len(_PREVIOUS_LINE_START) + _HASH_BYTES
_REMEDY = (
    "Restore the journal from a backup, or start a new run with another RunConfig(name=...); the "
    "checkpoints in the folder are not changed."
)


def check_no_gaps(store: Store) -> None:
    """Check that no journal entry that a new reader needs is missing.

    These are the first one and those after the newest cached view, so that the number of requests
    does not grow with the run. Raises `JournalError` for the first gap. A reader takes a gap for
    the end of the journal, and a writer would fill it. Called by `fit()` and by clients that open
    a run, whose folder may have been copied or cleaned up by other tools. Lists entries without
    reading them.
    """
    cached = _read_starting_view(store)
    slot = cached.view.next_slot if cached is not None else 0
    if slot:
        _check_exists(store, 0)  # it has the id of the run
    after = keys.entry(slot - 1) if slot else ""
    for found in store.list(keys.JOURNAL.rstrip("/"), after=after):
        if not keys.is_entry(found.key):
            continue
        # A directory is not listed atomically: entries of this moment may be left out.
        while found.key > keys.entry(slot):
            _check_exists(store, slot)
            slot += 1
        slot += 1


def _check_exists(store: Store, slot: int) -> None:
    try:
        store.get(keys.entry(slot))
    except NotFoundError as missing:
        raise JournalError(
            f"Journal entry {slot} in {store.url} is missing, but later entries exist.",
            do=_REMEDY,
        ) from missing


def decode_entry(body: bytes) -> JournalEntry:
    """Decode the stored body of an entry without verifying it. Raises one of `DECODE_ERRORS`."""
    return _entry_decoder.decode(_entry_json(body))


def read_run_id(store: Store) -> RunId | None:
    """Return the run that the first journal entry names, not verified; None without a journal.

    By it a process finds the run key, with which it then verifies the journal. Blocks. Raises
    `JournalError` if the entry cannot be decoded, and `StoreError`.
    """
    try:
        return _decode_entry(0, _entry_json(store.get(keys.entry(0))), store).run_id
    except NotFoundError:
        return None


def _entry_json(body: bytes) -> bytes:
    return _split_body(body)[0]


def _split_body(body: bytes) -> tuple[bytes, bytes]:
    """Return the JSON of an entry, and the hash of the earlier entries that it states, or b""."""
    content = strip_mac(body)
    # At its only possible place, as the MAC.
    if content[-_PREVIOUS_LINE_BYTES:-_HASH_BYTES] != _PREVIOUS_LINE_START:
        return content, b""
    return content[:-_PREVIOUS_LINE_BYTES], content[-_HASH_BYTES:]


def _extend_hash(previous: str, body: bytes) -> str:
    # Of the complete body, so that entries without a MAC are covered by the next one with a MAC.
    return hashlib.sha256(previous.encode() + body).hexdigest()


def _decode_entry(slot: int, content: bytes, store: Store) -> JournalEntry:
    try:
        return _entry_decoder.decode(content)
    except DECODE_ERRORS as error:
        raise JournalError(
            f"Journal entry {slot} in {store.url} cannot be decoded by the installed version "
            f"of spotfit: {error}.",
            do=f"If another version of spotfit wrote the run, install it. {_REMEDY}",
        ) from error


# --- Ledger ---------------------------------------------------------------------------------------


_member_decoder = decoder(Member)
_standby_decoder = decoder(StandbyReport)
_crash_decoder = decoder(AgentCrash)
# Limited in length: int() of a very long number is slow and raises.
# Clocks of machines drift by seconds a day; a check takes one request.
_CLOCK_CHECK_RENEWALS = 100
_LEASE = re.compile(rb"[0-9]{1,18}")


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
        self._clock_offset_ms: int | None = None
        """How far the storage's clock is ahead of this machine's; None before it was measured."""

    def clone(self) -> Ledger:
        """Return a ledger of the same run at the same position, for use by another thread.

        It shares the store, and has no entry listener.
        """
        clone = Ledger(self.store, self.run_id, self.agent_id, wall_ms=self._wall_ms)
        clone._journal = self._journal.clone()
        clone._clock_offset_ms = self._clock_offset_ms
        return clone

    def wall_ms(self) -> int:
        """Return the time in milliseconds since 1970, by the storage's clock once it was measured.

        Before the first renewal of a lease, it is the time of this machine.
        """
        return self._wall_ms() + (self._clock_offset_ms or 0)

    def storage_ms(self) -> int | None:
        """Return the time by the storage's clock in ms since 1970; None before it was measured.

        It is measured when a lease is renewed. That of this machine if the storage has no clock.
        """
        return None if self._clock_offset_ms is None else self.wall_ms()

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

    def is_authentic(self, slot: int, body: bytes) -> bool:
        """Whether the entry `body` has a valid MAC for `slot`; True without the run key."""
        return self._journal.is_authentic(slot, body)

    def append(self, event: JournalEvent, after: JournalView) -> JournalView:
        """Offer an event for the slot after the view `after`, then read; return the resulting view.

        If another process has taken the slot, or the write failed temporarily, the event is not in
        that view: check the view, decide again. Blocks. Raises `StoreError` and `JournalError`; see
        `Journal.append`.
        """
        return self._journal.append(self._make_entry(event), after)

    def encode_entry(self, event: JournalEvent, elapsed_s: float = 0.0) -> bytes:
        """Encode an event by this agent as the body for the slot after the present view.

        For `create_entry`; contains the present wall time and, with the run key, a MAC. Two calls
        may give different bytes: to repeat an offer, reuse the first result.
        """
        return self._journal.encode_entry(self._make_entry(event, elapsed_s))

    def cached_view(self) -> CachedView:
        """Return the state after the entries folded so far, for `write_cached_view`.

        Only for callers that know that the run was started: raises `AssertionError` otherwise.
        """
        return self._journal.cached_view()

    def create_entry(self, slot: int, body: bytes) -> None:
        """Create the entry of a slot from its body, without folding it. Any thread may call it.

        Blocks. Raises `AlreadyExistsError` if the slot is taken; see `Journal.create_entry`.
        """
        self._journal.create_entry(slot, body)

    def has_journal(self, slot: int) -> bool:
        """Whether the store has the journal of this run: its first entry, or that of `slot`.

        False also if the first entry is of another run. `slot` is that of a recent entry: rules of
        a bucket may have deleted the first one because of its age. Blocks; raises `StoreError`.
        """
        try:
            run_id = read_run_id(self.store)
        except JournalError:  # it exists, and its readers report why it cannot be decoded
            return True
        if run_id is not None:
            return run_id == self.run_id
        try:
            self.store.get(keys.entry(slot))
        except NotFoundError:
            return False
        return True

    def renew_lease(self) -> None:
        """Increment the counter in this process's lease object, to show that the leader is alive.

        Called by the leader every `RunTiming.lease_interval_s`. Blocks; raises `StoreError`.
        """
        # Never persisted: a restarted process has another agent id, and thereby another lease.
        self._lease_counter += 1
        key, body = keys.lease(self.agent_id), str(self._lease_counter).encode()
        write = partial(self.store.put, key, body)
        if self._clock_offset_ms is None or self._lease_counter % _CLOCK_CHECK_RENEWALS == 0:
            self._clock_offset_ms = measure_offset_ms(self.store, key, write, self._wall_ms)
        else:
            write()

    def read_lease(self, leader: AgentId) -> int:
        """Return the counter in the lease object of the process `leader`; 0 without a valid one.

        The leader is alive if the counter is higher than any that was read before: a lower one is
        an older object that was written again. The lease holds no time, because clocks of machines
        are never compared. Blocks; raises `StoreError`.
        """
        try:
            content = strip_mac(self.store.get(keys.lease(leader)))
        except (NotFoundError, IntegrityError):
            return 0
        return int(content) if _LEASE.fullmatch(content) else 0

    def publish_member(self, member: Member) -> None:
        """Write this agent's `Member`, from which clients read the nodes of a run.

        Overwrites the previous one. Blocks; raises `StoreError`.
        """
        self.store.put(keys.member(self.agent_id), encode(member))

    def list_members(self) -> Iterator[Member]:
        """Yield the `Member` of every agent that has ever joined the run, ended ones included.

        Reads one object per agent while iterating. Objects that were deleted meanwhile or cannot be
        decoded or are not authentic are skipped; other `StoreError`s are raised.
        """
        for found in self.store.list(keys.MEMBERS.rstrip("/")):
            try:
                member = _member_decoder.decode(strip_mac(self.store.get(found.key)))
            # Deleted since the listing, not authentic, written by another version of spotfit, or
            # with a key that spotfit does not write.
            except (NotFoundError, IntegrityError, ConfigError, *DECODE_ERRORS):
                continue
            yield member

    def publish_standby(self, report: StandbyReport) -> None:
        """Write this agent's `StandbyReport`, from which the leader learns that it is ready.

        Overwrites the previous one. Blocks; raises `StoreError`.
        """
        self.store.put(keys.standby(report.member.token, self.agent_id), encode(report))

    def withdraw_standby(self, token: Token) -> None:
        """Delete this agent's `StandbyReport`, once it has joined the run.

        `token` is that of the group of its machine. Idempotent. Blocks; raises `StoreError`.
        """
        self.store.delete(keys.standby(token, self.agent_id))

    def read_standby(self, tokens: Iterable[Token]) -> list[StandbyReport]:
        """Return the reports of all agents that stand by, or have, on machines of these groups.

        Objects that cannot be decoded or are not authentic are skipped. Blocks, with a request per
        group and agent; raises other `StoreError`s.
        """
        reports = []
        for token in tokens:
            for found in self.store.list(f"{keys.STANDBY}{token}"):
                try:
                    body = strip_mac(self.store.get(found.key))
                    reports.append(_standby_decoder.decode(body))
                except (NotFoundError, IntegrityError, ConfigError, *DECODE_ERRORS):
                    continue
        return reports

    def publish_crash(self, crash: AgentCrash) -> None:
        """Store the error with which this agent ends, for the leader that records its loss.

        Overwrites the previous one of the machine. Blocks; raises `StoreError`.
        """
        self.store.put(keys.crash(crash.token, crash.node), encode(crash))

    def read_crash(self, token: Token, node: int) -> AgentCrash | None:
        """Return the error that the last agent of a machine has stored; None if there is none.

        `node` is the index of the machine in the group `token`. An object that is not authentic or
        cannot be decoded counts as none. Blocks; raises other `StoreError`s.
        """
        try:
            return _crash_decoder.decode(strip_mac(self.store.get(keys.crash(token, node))))
        except (NotFoundError, IntegrityError, *DECODE_ERRORS):
            return None

    def _make_entry(self, event: JournalEvent, elapsed_s: float = 0.0) -> JournalEntry:
        return JournalEntry(
            run_id=self.run_id,
            author=self.agent_id,
            event=event,
            written_at_ms=self.wall_ms(),
            elapsed_s=elapsed_s,
        )
