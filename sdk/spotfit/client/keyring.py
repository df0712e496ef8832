"""Secret keys of this user's runs, stored as files on this machine.

A key authenticates drivers and agents of a run and decrypts its payloads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from spotfit.core.codec import DECODE_ERRORS, encode
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import RunId, parse_name
from spotfit.host import env, log, machine, system
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import read_run_id
from spotfit.security.object_mac import ObjectMac
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.url import RootUrl, is_local_path

# A fit stores its key before the first object of the run: packing and uploading code takes minutes.
_MIN_UNUSED_S = 3600.0

_RUN_ID = re.compile("[0-9a-f]{32}")  # as `system.new_run_id` returns it

KeyState = Literal["used", "unused", "unknown"]


class StoredKey(NamedTuple):
    """A key in the keyring. It is "unused" only if its run certainly does not exist any more."""

    run_id: RunId
    url: str
    """Where the run is, or was started or continued last; '' if unknown."""
    state: KeyState
    detail: str
    """The reason of the state."""


class _Address(msgspec.Struct, frozen=True):
    """Where a run was started or continued."""

    url: str
    host: str = ""
    """The computer whose directory `url` is; '' for a bucket, which is the same everywhere."""


_addresses_decoder = msgspec.json.Decoder(tuple[_Address, ...])


class RunKeyring:
    """The run keys of this user: one file per run in `directory`, readable by its owner only.

    Windows ignores the mode of the file; there the profile of the user is private.
    `directory` is by default `keys` in SPOTFIT_HOME (`~/.spotfit`).
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(env.read(env.HOME_DIR)).expanduser() / "keys"

    def find(self, run_id: RunId) -> RunKey | None:
        """Return the run's key from SPOTFIT_RUN_SECRET, else from its file; None without both.

        The variable is used only for the run in SPOTFIT_RUN_ID. Raises `ConfigError` if the text is
        not a key, or the id is not a plain name.
        """
        # For machines without the file, such as those of cron jobs and CI. `run_id` was read from
        # a bucket, which must not decide which run the key is used for.
        if (text := env.read(env.RUN_SECRET)) and env.read(env.RUN_ID) == run_id:
            return RunKey.from_text(text, run_id)
        file = self._key_file(run_id)
        if not file.is_file():
            return None
        return RunKey.from_text(file.read_text(encoding="utf-8").strip(), run_id)

    def create(self, run_id: RunId, *, url: str) -> RunKey:
        """Return a new random key for the run at `url`, after writing it to its file.

        An existing file is overwritten, so call `find` first. The key is stored before use: a run
        whose key is lost can neither be supervised nor read. Raises OSError if it cannot be
        written.
        """
        key = RunKey(system.new_secret_bytes(), run_id)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # no access for others
        file = self._key_file(run_id)
        file.touch(mode=0o600)  # before the key is written: write_text() would create it readable
        file.write_text(key.to_text(), encoding="ascii")
        self.record_url(run_id, url)
        return key

    def record_url(self, run_id: RunId, url: str) -> None:
        """Add to the addresses beside the key where its run is, for `list_keys`. Idempotent.

        No effect without a file of the key, as with SPOTFIT_RUN_SECRET. `run_id` may be of a copy
        of the run, or forged: earlier addresses are kept.
        """
        if not self._key_file(run_id).is_file():
            return
        address = _Address(url, machine.hostname() if is_local_path(url) else "")
        others = [one for one in self._read_addresses(run_id) if one != address]
        self._url_file(run_id).write_bytes(encode([*others, address]))

    def list_keys(self, *, now: float) -> Iterator[StoredKey]:
        """Yield each stored key with the state of its run, which is read from the storage.

        `now` is in seconds since 1970 by the clock of this machine. No key is "unused" within an
        hour after `create` or `record_url`: the run may be starting.
        """
        files = sorted(self._directory.iterdir()) if self._directory.is_dir() else []
        for file in files:
            # Not the addresses, and nothing that a file manager or an editor has left.
            if _RUN_ID.fullmatch(file.name) and file.is_file():
                yield self._describe(RunId(file.name), now)

    def remove(self, run_id: RunId) -> None:
        """Delete the key of a run. Nothing can decrypt the run's payloads afterwards."""
        self._key_file(run_id).unlink(missing_ok=True)
        self._url_file(run_id).unlink(missing_ok=True)

    def _describe(self, run_id: RunId, now: float) -> StoredKey:
        """Return the key with the state at the address that prevents its deletion, if any does."""
        addresses = reversed(self._read_addresses(run_id))
        found = [self._describe_at(run_id, one, now) for one in addresses]
        if not found:
            return StoredKey(run_id, "", "unknown", "it was stored by an earlier version")
        return min(found, key=lambda key: ("used", "unknown", "unused").index(key.state))

    def _read_addresses(self, run_id: RunId) -> tuple[_Address, ...]:
        """The addresses of a run, the last one at the end; empty if they are unknown."""
        try:
            return _addresses_decoder.decode(self._url_file(run_id).read_bytes())
        except (FileNotFoundError, *DECODE_ERRORS):
            return ()

    def _describe_at(self, run_id: RunId, address: _Address, now: float) -> StoredKey:
        url = address.url
        # A home directory may be shared by computers whose other directories are their own.
        if address.host and address.host != machine.hostname():
            return StoredKey(run_id, url, "unknown", f"it is a directory of {address.host}")
        try:
            state, detail = self._find_run(run_id, url)
        except (SpotfitError, OSError) as error:
            state, detail = "unknown", f"{url} cannot be read: {error}".splitlines()[0]
        if state == "unused" and now - self._url_file(run_id).stat().st_mtime < _MIN_UNUSED_S:
            state, detail = "unknown", "fit() was called less than an hour ago"
        return StoredKey(run_id, url, state, detail)

    def _find_run(self, run_id: RunId, url: str) -> tuple[KeyState, str]:
        """Return whether the run is still at `url`. Raises `SpotfitError` or `OSError`."""
        store = open_store(url)
        found = read_run_id(store)
        if found == run_id:
            return "used", "the run exists"
        if found is not None:
            if self._is_own_run(store, found):
                return "unused", "another run was started in its folder"
            return "unknown", "its folder has a run that this user did not start"
        if next(store.list(), None) is not None:
            return "used", "its folder has files, but no journal"
        # A bucket of another account, or a directory that is not mounted, has no runs at all.
        root = RootUrl.parse(url)
        parent = str(replace(root, prefix=root.prefix.rpartition("/")[0]))
        if next(open_store(parent).list(), None) is None:
            return "unknown", f"{parent} is empty or cannot be reached"
        return "unused", "its folder was deleted"

    def _is_own_run(self, store: Store, run_id: RunId) -> bool:
        """Whether the journal is of a run of this user: anyone could have written its id."""
        key = self.find(run_id)
        if key is None:
            return False
        return ObjectMac(key).is_valid(keys.entry(0), store.get(keys.entry(0)))

    def _url_file(self, run_id: RunId) -> Path:
        return self._key_file(run_id).with_suffix(".url")

    def _key_file(self, run_id: RunId) -> Path:
        # The id was read from the bucket, where a path such as '../x' could have been written.
        return self._directory / parse_name(run_id, what="The run's id")


def open_authenticated(store: Store) -> Store:
    """Return the store of a run with this user's key of it, so that what is read is verified.

    Without the key, returns `store` and logs that nothing is verified; also if it has no journal.
    Reads the first journal entry. Raises `StoreError`, and `JournalError` if it cannot be decoded.
    """
    run_id = read_run_id(store)
    if run_id is None:
        return store
    key = RunKeyring().find(run_id)
    if key is not None:
        return AuthenticatedStore(store, key)
    log.warning(
        "run.not_verified",
        url=store.url,
        text="this machine does not have the run's key: what it shows may have been forged by "
        "anyone who can write to the storage",
    )
    return store


def key_of(store: Store) -> RunKey | None:
    """Return the run key with which `store` verifies objects; None if it does not."""
    return store.key if isinstance(store, AuthenticatedStore) else None
