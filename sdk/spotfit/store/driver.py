"""obstore, one copy and one client per process.

Its runtime has threads, and threads do not survive a fork: a child that used the copy inherited
from its parent would wait for ever. So a forked child loads the library a second time, with no
history (about 15 ms, once, and only if it touches a bucket), and leaves the first copy alone.
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
from spotfit.store.clients import build
from spotfit.store.url import RootUrl

if TYPE_CHECKING:
    from spotfit.store.clients import Client

_LIBRARY = "obstore._obstore"
_COPIED_AT_ONCE = 2**20


GivenKeys = tuple[tuple[str, str], ...]
"""Credentials somebody gave, as pairs."""


class _Process:
    """What one process has opened; a forked child begins with an empty one."""

    def __init__(self, *, inherits_threads: bool) -> None:
        self.lock = threading.Lock()
        self.clients: dict[tuple[RootUrl, GivenKeys, bool], Client] = {}
        self.must_load_anew = inherits_threads


_process = _Process(inherits_threads=False)
_watches_forks = False


def client(root: RootUrl, keys: GivenKeys = (), *, insists: bool = False) -> Client:
    """The driver's client for `root`, made once in each process.

    Without `keys` it uses what this machine's environment has. One that `insists` repeats the lost
    parts of a big transfer by itself; any other tries once.
    """
    wanted = (root, keys, insists)
    known = _process.clients.get(wanted)
    if known is not None:
        return known
    with _process.lock:
        _watch_forks()
        if _process.must_load_anew:
            _load_anew()
            _process.must_load_anew = False
        if wanted not in _process.clients:
            found = dict(keys) or credentials.of_environment(root)
            _process.clients[wanted] = build(root, found, insists=insists)
        return _process.clients[wanted]


def failures() -> tuple[type[Exception], ...]:
    """What calls of a client may raise, in the copy that this process uses."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError, ValueError)


# ── after a fork ─────────────────────────────────────────────────────────────────────────────────


def _watch_forks() -> None:
    global _watches_forks  # a hook cannot be registered twice, nor taken back
    if not _watches_forks:
        os.register_at_fork(after_in_child=_begin_afresh)
        _watches_forks = True


def _begin_afresh() -> None:
    global _process  # one process, one state
    inherited = _process
    _keep_for_ever(inherited)
    _process = _Process(inherits_threads=inherited.must_load_anew or bool(inherited.clients))


def _keep_for_ever(thing: object) -> None:
    """Never let go of `thing`: closing what was inherited would reach into the parent's sockets."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _load_anew() -> None:
    """Put a second copy of the library, with a runtime of its own, in the place of the first."""
    first = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "obstore"
    }
    _keep_for_ever(first)
    with _copy_of(_library()) as copy:
        finder = _OneFile(copy)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module("obstore.store")
        finally:
            sys.meta_path.remove(finder)


def _library() -> Path:
    """Where the library was installed: a forked parent may have loaded it from elsewhere."""
    package = importlib.util.find_spec("obstore")
    folders = package.submodule_search_locations if package else None
    found = PathFinder.find_spec(_LIBRARY, folders)
    if found is None or found.origin is None:
        raise StoreError("obstore is not installed completely.", do="Install it again.")
    return Path(found.origin)


@contextmanager
def _copy_of(library: Path) -> Iterator[str]:
    """The library's file once more, in memory only, under a path the loader has never seen."""
    if not hasattr(os, "memfd_create"):
        raise StoreError(
            "This process was forked from one that had used a bucket; on this system it cannot.",
            do="Start processes by 'spawn' or 'forkserver' instead.",
        )
    with os.fdopen(os.memfd_create("obstore"), "wb") as copy, library.open("rb") as original:
        shutil.copyfileobj(original, copy, _COPIED_AT_ONCE)
        copy.flush()
        yield f"/proc/{os.getpid()}/fd/{copy.fileno()}"


class _OneFile(MetaPathFinder):
    """Finds the library, and nothing else, in the file it was given."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIBRARY:
            return None
        loader = ExtensionFileLoader(fullname, self._path)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)
