"""Creation of obstore clients from roots: endpoints, timeouts, credentials and regions.

obstore clients, one per process and root, also in forked processes.

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
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from spotfit.core.errors import StoreError
from spotfit.host import env
from spotfit.store import url
from spotfit.store.url import RootUrl, StorageCredentials

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3CredentialProvider, S3Store

    ObstoreClient: TypeAlias = S3Store | GCSStore | AzureStore

# Calls move up to 8 MiB and are retried by `store.retry`: after 10 s another attempt is faster.
_CALL_TIMEOUT = timedelta(seconds=10)
# A part of 8 MiB or more over a slow link. Interrupting it would lose the bytes sent so far.
_TRANSFER_TIMEOUT = timedelta(minutes=5)
S3_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables with the URL of an S3 server; the first one that is set applies."""
_UNSIGNED_PAYLOAD_VARIABLE = "AWS_UNSIGNED_PAYLOAD"


def build_client(
    root: RootUrl, credentials: StorageCredentials, *, for_transfers: bool, is_retried: bool = True
) -> ObstoreClient:
    """Create an obstore client for the bucket and prefix of `root`. Called by `client_for`.

    With `for_transfers` it has a timeout of 5 minutes per request and, unless `is_retried` is
    False, retries requests itself, for multipart transfers; without, a timeout of 10 s and one
    attempt. Empty `credentials` make obstore use those of the machine.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    arguments: dict[str, Any] = {
        "prefix": root.prefix or None,
        # http is allowed because only a user's own endpoint can be http; the clouds use https.
        "client_options": {
            "allow_http": True,
            "timeout": _TRANSFER_TIMEOUT if for_transfers else _CALL_TIMEOUT,
        },
        # `store.retry` repeats whole calls; retries of both would multiply. Only parts of a
        # transfer are repeated here, because repeating the call would send all parts again.
        "retry_config": {"max_retries": 6, "retry_timeout": timedelta(minutes=2)}
        if for_transfers and is_retried
        else {"max_retries": 0},
    }
    match root.scheme:
        case "s3":
            arguments["config"] = {**_s3_config(root), **credentials}
            # A credential provider would take precedence over the credentials in the config.
            arguments["credential_provider"] = None if credentials else _aws_profile_credentials()
            return S3Store(root.bucket, **arguments)
        case "gs":
            endpoint = {"base_url": root.endpoint} if root.endpoint else {}
            arguments["config"] = {**endpoint, **credentials}
            return GCSStore(root.bucket, **arguments)
        case _:
            options = {"account_name": root.account, "endpoint": root.endpoint}
            named = {name: value for name, value in options.items() if value}
            arguments["config"] = {**named, **credentials}
            return AzureStore(root.bucket, **arguments)


def _s3_config(root: RootUrl) -> dict[str, Any]:
    # Not every S3-compatible server supports bulk deletion.
    config: dict[str, Any] = {"disable_bulk_delete": True}
    if root.endpoint:
        config["aws_endpoint_url_s3"] = root.endpoint
    if root.region:
        config["region"] = root.region
    # Hashing each body for its signature takes a third of an upload's CPU time. TLS already
    # protects the body in transit; over http the signature is its only protection (0039).
    # Without an endpoint in the root, obstore reads it from the same variables.
    addresses = (root.endpoint, *map(env.lookup, S3_ENDPOINT_VARIABLES))
    uses_tls = not next(filter(None, addresses), "").startswith("http://")
    if uses_tls and env.lookup(_UNSIGNED_PAYLOAD_VARIABLE) is None:
        config["unsigned_payload"] = True
    return config


def _aws_profile_credentials() -> S3CredentialProvider | None:
    """Return boto3's credentials from `~/.aws`, including profiles and single sign-on.

    None without that folder or boto3: obstore itself finds credentials in the environment and of
    the machine's role.
    """
    # boto3 takes a second to import, so it is only used where obstore cannot do the same.
    if not (Path.home() / ".aws").is_dir() or importlib.util.find_spec("boto3") is None:
        return None
    from boto3.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None


# --- obstore clients, one per process and root, also in forked processes --------------------------


_LIBRARY = "obstore._obstore"
_COPY_CHUNK_BYTES = 2**20

CredentialPairs = tuple[tuple[str, str], ...]
"""Explicit credentials as sorted pairs, which are hashable."""


class _ProcessState:
    """Clients of this process; a forked child starts without any."""

    def __init__(self, *, inherits_threads: bool) -> None:
        self.lock = threading.Lock()
        self.clients: dict[tuple[RootUrl, CredentialPairs, bool, bool], ObstoreClient] = {}
        self.must_reload_library = inherits_threads


_process_state = _ProcessState(inherits_threads=False)
_is_fork_hook_registered = False


def client_for(
    root: RootUrl,
    credential_pairs: CredentialPairs = (),
    *,
    for_transfers: bool = False,
    is_retried: bool = True,
) -> ObstoreClient:
    """Return the client for `root`, creating it at the first call in this process.

    Clients are cached per root, credentials and both flags; a forked child creates its own.
    Without `credential_pairs` it uses those of SPOTFIT_STORAGE_KEYS, else those that obstore finds
    on the machine. A client for transfers retries failed requests itself, unless `is_retried` is
    False; any other makes one attempt. Thread-safe. Raises `StoreError` if the child of a fork
    cannot load its own copy of obstore.
    """
    global _is_fork_hook_registered  # hooks accumulate and cannot be unregistered
    client_key = (root, credential_pairs, for_transfers, is_retried)
    # Without the lock: a dict lookup is atomic, and clients are never removed.
    known = _process_state.clients.get(client_key)
    if known is not None:
        return known
    with _process_state.lock:
        if not _is_fork_hook_registered:
            if sys.platform != "win32":  # which has no fork()
                os.register_at_fork(after_in_child=_reset_after_fork)
            _is_fork_hook_registered = True
        if _process_state.must_reload_library:
            _reload_library()
            _process_state.must_reload_library = False
        if client_key not in _process_state.clients:
            found = dict(credential_pairs) or url.credentials_from_environment(root)
            _process_state.clients[client_key] = build_client(
                root, found, for_transfers=for_transfers, is_retried=is_retried
            )
        return _process_state.clients[client_key]


def client_error_types() -> tuple[type[Exception], ...]:
    """Return the exception types that calls of a client raise, for an `except` clause.

    They belong to the copy of obstore in use, which differs in a forked child: call it in that
    clause.
    """
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
            f"The module {_LIBRARY} was not found: the package obstore is not installed "
            "completely.",
            do="Run `pip install --force-reinstall obstore`.",
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
            do="Start processes with multiprocessing.set_start_method('spawn') or 'forkserver'.",
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
