"""Delete what a dropped checkpoint left in the bucket."""

from __future__ import annotations

from spotfit.checkpoint.manifest import manifests_of
from spotfit.ledger import keys
from spotfit.store.api import Store


def drop(store: Store, name: str) -> None:
    """Delete the files of that checkpoint, then its manifests.

    Only for a name the journal has dropped. May be called again, by a successor too, and for one
    already gone.
    """
    folders = {name} | {part.folder for part in manifests_of(store, name)}
    for folder in sorted(folders):
        delete_below(store, folder)
    # Last, because they tell where the files are.
    delete_below(store, f"{keys.MANIFESTS}{name}")


def delete_below(store: Store, folder: str) -> None:
    """Every object in that folder."""
    for found in list(store.list(folder)):
        if found.key.startswith(f"{folder}/"):
            store.delete(found.key)
