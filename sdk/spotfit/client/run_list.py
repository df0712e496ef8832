"""List the runs below a storage path (`spotfit ls`), from their journals.

The objects of a run are not listed: per run, a few requests read its journal, or the newest cached
view and what follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from spotfit.client.keyring import RunKeyring
from spotfit.client.metrics_history import ProgressReader
from spotfit.client.run_handle import state_of
from spotfit.core.errors import ConfigError, SpotfitError, StoreError
from spotfit.host import system
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Journal, read_run_id
from spotfit.model.bill import Bill
from spotfit.model.usage import bill_of
from spotfit.model.view import View
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.transfer import concurrent_map

# Runs of one batch are read at the same time; a long list is shown batch by batch.
_BATCH_RUNS = 16
# The character after '/': no key of a folder is greater, so that a listing continues behind it.
_AFTER_SLASH = "0"


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run below a storage path."""

    name: str
    """The name of its folder."""
    url: str
    state: str
    """As in `RunStatus.state`, or 'unreadable'."""
    reason: str = ""
    """Why the run ended, or why it cannot be read."""
    started_at_ms: int = 0
    """When its last `fit()` started, in ms since 1970 by the clock of the caller; 0: unknown."""
    ended_at_ms: int = 0
    """When it ended, by the clock of a machine; 0 if it has not."""
    step: int | None = None
    """The last step that was reported or saved; None if unknown."""
    checkpoint: str | None = None
    """The latest checkpoint; None if there is none."""
    is_verified: bool = False
    """Whether the journal was verified with the run's key."""
    run_id: str = ""
    """Its unique id, which is in the tags of its machines; '' if it cannot be read."""
    provisioner: str = ""
    """The backend of its last `fit()`; '' if it cannot be read."""
    cost: Bill = field(default_factory=Bill)
    """What its machines have cost in all its fits so far; without machines if it cannot be read."""

    @property
    def is_active(self) -> bool:
        """Whether the run has not ended, so that its machines may cost more."""
        return self.state in ("waiting", "running", "validating")


def list_runs(root: str | Path) -> Iterator[ListedRun]:
    """Yield the runs in the folders of `root`, a storage path, by name; `root` itself if it is one.

    Reads at most 16 runs at once. A run whose journal cannot be read is yielded in the state
    'unreadable'. Raises `ConfigError` for an invalid address, and `StoreError` if it cannot be
    listed.
    """
    store = open_store(root, setting="The storage path")
    if read_run_id(store) is not None:
        run = _read_run(store, store.url.rstrip("/").rpartition("/")[2])
        if run is not None:
            yield run
        return
    folders = _folders(store)
    while names := list(islice(folders, _BATCH_RUNS)):
        found = concurrent_map(partial(_read_folder, store), names)
        yield from (run for run in found if run is not None)


def _folders(store: Store) -> Iterator[str]:
    """Yield the names of the folders directly below the root of the store, sorted by key."""
    if "://" not in store.url:  # a listing of a directory includes all files of all checkpoints
        yield from _subdirectories(Path(store.url))
        return
    # One listing request per folder: the first page after all keys of the folder before.
    after = ""
    while (info := next(store.list(after=after), None)) is not None:
        name, slash, _ = info.key.partition("/")
        after = f"{name}{_AFTER_SLASH}" if slash else info.key
        if slash:
            yield name


def _subdirectories(root: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(
            f"The storage path {root} cannot be listed: {error.strerror}.",
            do="Pass a directory that you may read, or a URL such as s3://bucket/runs.",
        ) from error


def _read_folder(root: Store, name: str) -> ListedRun | None:
    try:
        store = root.subtree(name)
    except ConfigError:  # a folder whose name no run can have
        return None
    return _read_run(store, name)


def _read_run(store: Store, name: str) -> ListedRun | None:
    try:
        run_id = read_run_id(store)
        if run_id is None:
            return None
        key = RunKeyring().find(run_id)
        store = store if key is None else AuthenticatedStore(store, key)
        view = Journal(store).catch_up()
        if not isinstance(view, View):
            return None
        return ListedRun(
            name=name,
            url=store.url,
            state=state_of(view),
            reason=view.fit_end.reason if view.fit_end else "",
            started_at_ms=view.fit_started_at_ms,
            ended_at_ms=view.fit_ended_at_ms,
            step=_last_step(store, view),
            checkpoint=view.latest_checkpoint.name if view.latest_checkpoint else None,
            is_verified=key is not None,
            run_id=run_id,
            provisioner=view.spec.provisioner,
            cost=bill_of(view, system.wall_ms()),
        )
    except SpotfitError as error:  # the other runs can be read
        return ListedRun(name=name, url=store.url, state="unreadable", reason=error.message)


def _last_step(store: Store, view: View) -> int | None:
    # The end of the run has its last metrics; only those of an active run need a request.
    if view.fit_end is None:
        return ProgressReader(store).read(view).step
    reported = (view.fit_end.metrics or {}).get("step")
    saved = [one.step for one in view.checkpoints if one.step is not None]
    return reported if isinstance(reported, int) else next(reversed(saved), None)
