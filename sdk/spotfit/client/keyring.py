"""Secret keys of this user's runs, stored as files on this machine.

A key authenticates drivers and agents of a run and decrypts its payloads.
"""

from __future__ import annotations

from pathlib import Path

from spotfit.core.ids import RunId, parse_name
from spotfit.host import env, log, system
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import read_run_id
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store


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

    def create(self, run_id: RunId) -> RunKey:
        """Return a new random key for the run, after writing it to its file.

        An existing file is overwritten, so call `find` first. The key is stored before use: a run
        whose key is lost can neither be supervised nor read. Raises OSError if it cannot be
        written.
        """
        key = RunKey(system.new_secret_bytes(), run_id)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # no access for others
        file = self._key_file(run_id)
        file.touch(mode=0o600)  # before the key is written: write_text() would create it readable
        file.write_text(key.to_text(), encoding="ascii")
        return key

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
