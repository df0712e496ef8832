"""From an address to a store. A driver is imported when the first root of its kind is opened."""

from __future__ import annotations

from pathlib import Path

from spotfit.store.api import Store
from spotfit.store.budget import Budget
from spotfit.store.url import RootUrl


def open_store(url: str | Path | RootUrl, budget: Budget | None = None) -> Store:
    """The store at that address; nothing is read or written yet.

    `budget` says how long a call of a bucket may insist. Raises `ConfigError` for an address that
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

            return ObjectStore(root, budget)
