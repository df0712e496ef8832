"""From an address to a store. A driver is imported when the first root of its kind is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.store.api import Store
from spotfit.store.budget import Budget
from spotfit.store.credentials import Keys, as_text, of_environment
from spotfit.store.url import RootUrl


def open_store(
    url: str | Path | RootUrl, budget: Budget | None = None, *, keys: Keys | None = None
) -> Store:
    """The store at that address; nothing is read or written yet.

    `budget` says how long a call of a bucket may insist, `keys` are credentials for one that come
    from elsewhere than this machine's environment. Raises `ConfigError` for an address that
    cannot be meant.
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

            return ObjectStore(root, budget, keys=keys)


def reopened(store: Store) -> Store:
    """The same once more, by its address alone: as machines do."""
    return open_store(store.url, keys=_keys_of(store))


def in_arrow(store: Store) -> Any:
    """pyarrow's file system in which the store's path means the same; None where there is none."""
    from spotfit.store.native import arrow_for

    try:
        root = RootUrl.parse(store.url)
    except ConfigError:  # a file system the user brought has addresses of its own
        return None
    return arrow_for(root, _keys_of(store) or of_environment(root))


def keys_for_machines(store: Store) -> str:
    """What machines need in their environment to reach it by its address; often nothing."""
    keys = _keys_of(store)
    return as_text(RootUrl.parse(store.url), keys) if keys else ""


def _keys_of(store: Store) -> Keys:
    if "://" not in store.url:
        return {}
    from spotfit.store.objects import ObjectStore

    return store.keys if isinstance(store, ObjectStore) else {}
