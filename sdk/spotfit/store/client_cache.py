"""obstore clients, one per process and root, also in forked processes.

obstore's runtime has threads, and threads do not survive a fork: a child that used the library
inherited from its parent would block indefinitely. A forked child therefore loads a second copy of
the library (about 15 ms, once, and only if it accesses a bucket) and leaves the first one alone.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from spotfit.core.errors import StoreError
from spotfit.store import credentials
from spotfit.store.clients import build_client
from spotfit.store.url import RootUrl

if TYPE_CHECKING:
    from spotfit.store.clients import ObstoreClient

_LIBRARY = "obstore._obstore"
_COPY_CHUNK_BYTES = 2**20

CredentialPairs = tuple[tuple[str, str], ...]
"""Explicit credentials as sorted pairs, which are hashable."""


class _ProcessState:
    """Clients of this process; a forked child starts without any."""

    def __init__(self, *, inherits_threads: bool) -> None:
        self.lock = threading.Lock()
        self.clients: dict[tuple[RootUrl, CredentialPairs, bool], ObstoreClient] = {}
        self.must_reload_library = inherits_threads


_process_state = _ProcessState(inherits_threads=False)
_is_fork_hook_registered = False


def client_for(
    root: RootUrl, credential_pairs: CredentialPairs = (), *, for_transfers: bool = False
) -> ObstoreClient:
    """Return the client for `root`, creating it at the first call in this process.

    Without credentials it uses those of this machine's environment. A client for transfers retries
    failed parts itself; any other makes one attempt.
    """
    global _is_fork_hook_registered  # hooks accumulate and cannot be unregistered
    client_key = (root, credential_pairs, for_transfers)
    # Without the lock: a dict lookup is atomic, and clients are never removed.
    known = _process_state.clients.get(client_key)
    if known is not None:
        return known
    with _process_state.lock:
        if not _is_fork_hook_registered:
            os.register_at_fork(after_in_child=_reset_after_fork)
            _is_fork_hook_registered = True
        if _process_state.must_reload_library:
            _reload_library()
            _process_state.must_reload_library = False
        if client_key not in _process_state.clients:
            found = dict(credential_pairs) or credentials.credentials_from_environment(root)
            _process_state.clients[client_key] = build_client(
                root, found, for_transfers=for_transfers
            )
        return _process_state.clients[client_key]


def client_error_types() -> tuple[type[Exception], ...]:
    """Return the exceptions of client calls, from the copy of the library in use."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError, ValueError)


# ── after a fork ─────────────────────────────────────────────────────────────────────────────────


def _reset_after_fork() -> None:
    global _process_state
    inherited = _process_state
    _leak_reference(inherited)
    # A new state has a new lock: another thread of the parent may have held the inherited one.
    # A grandchild of a process with clients must reload as well, even if its parent used none.
    _process_state = _ProcessState(
        inherits_threads=inherited.must_reload_library or bool(inherited.clients)
    )


def _leak_reference(value: object) -> None:
    # Destroying inherited clients would shut down connections that the parent still uses, and
    # wait for threads that do not exist in this process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _reload_library() -> None:
    """Replace the modules of the library by a second copy, which has a runtime of its own."""
    inherited = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "obstore"
    }
    _leak_reference(inherited)
    # The installed file: a parent that was forked itself has loaded its copy from a memfd.
    package = importlib.util.find_spec("obstore")
    folders = package.submodule_search_locations if package else None
    found = PathFinder.find_spec(_LIBRARY, folders)
    if found is None or found.origin is None:
        raise StoreError(
            f"The module {_LIBRARY} was not found: obstore is not installed completely.",
            do="Reinstall it: pip install --force-reinstall obstore",
        )
    with _copy_to_memfd(Path(found.origin)) as copy:
        finder = _SingleFileFinder(copy)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module("obstore.store")
        finally:
            sys.meta_path.remove(finder)


@contextmanager
def _copy_to_memfd(library: Path) -> Iterator[str]:
    """Copy the library's file into memory and yield the path of the copy."""
    # dlopen() returns the loaded library for a path or inode that it has loaded before.
    if not hasattr(os, "memfd_create"):
        raise StoreError(
            "This process was forked from one that had used a bucket, which this operating system "
            "does not support (no memfd_create).",
            do="Start processes by 'spawn' or 'forkserver'.",
        )
    with os.fdopen(os.memfd_create("obstore"), "wb") as copy, library.open("rb") as original:
        shutil.copyfileobj(original, copy, _COPY_CHUNK_BYTES)
        copy.flush()
        yield f"/proc/{os.getpid()}/fd/{copy.fileno()}"


class _SingleFileFinder(MetaPathFinder):
    """Finds the library in the file at `path`, and no other module."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIBRARY:
            return None
        loader = ExtensionFileLoader(fullname, self._path)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)
