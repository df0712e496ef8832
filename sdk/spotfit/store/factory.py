"""Opens stores by URL. Each driver is imported when the first store of its kind is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.store.api import Store
from spotfit.store.credentials import (
    StorageCredentials,
    credentials_from_environment,
    format_credentials,
)
from spotfit.store.retry import RetryPolicy
from spotfit.store.url import RootUrl


def open_store(
    url: str | Path | RootUrl,
    retry_policy: RetryPolicy | None = None,
    *,
    credentials: StorageCredentials | None = None,
) -> Store:
    """Return the store at that address. Reads and writes nothing.

    `retry_policy` applies to each call of a bucket; `credentials` replace those of this machine's
    environment. Raises `ConfigError` for an invalid address.
    """
    root = url if isinstance(url, RootUrl) else RootUrl.parse(url)
    match root.scheme:
        case "file":
            from spotfit.store.local import LocalStore

            return LocalStore(root)
        case "memory":
            from spotfit.store.memory import MemoryStore

            return MemoryStore(root)
        case _:
            from spotfit.store.objects import ObjectStore

            return ObjectStore(root, retry_policy, credentials=credentials)


def reopen_store(store: Store) -> Store:
    """Open the store again by its address and credentials only, as a machine of the run does."""
    return open_store(store.url, credentials=_explicit_credentials(store))


def to_arrow_filesystem(store: Store) -> Any:
    """Return pyarrow's file system for the store's path; None if pyarrow has none."""
    from spotfit.store.filesystem_bucket import open_arrow_filesystem

    try:
        root = RootUrl.parse(store.url)
    except ConfigError:  # the scheme of a user's file system, such as hdfs
        return None
    return open_arrow_filesystem(
        root, _explicit_credentials(store) or credentials_from_environment(root)
    )


def credentials_for_nodes(store: Store) -> str:
    """Return the value of `SPOTFIT_STORAGE_KEYS` that machines need; '' if they need none."""
    credentials = _explicit_credentials(store)
    return format_credentials(RootUrl.parse(store.url), credentials) if credentials else ""


def _explicit_credentials(store: Store) -> StorageCredentials:
    if "://" not in store.url:  # a local directory: spares the import of the bucket driver
        return {}
    from spotfit.store.objects import ObjectStore

    return store.credentials if isinstance(store, ObjectStore) else {}
