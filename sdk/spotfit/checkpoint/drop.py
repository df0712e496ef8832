"""Delete what a checkpoint left in the bucket, but nothing that another one still needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spotfit.checkpoint.manifest import Manifest, all_manifests
from spotfit.ledger import keys
from spotfit.store.api import Store


def drop(store: Store, name: str) -> None:
    """Delete the files of that checkpoint, then its manifests.

    Only for a name the journal has dropped. May be called again, by a successor too, and for one
    already gone.
    """
    parts = all_manifests(store)
    folders = {name} | {part.folder for part in parts if part.name == name}
    delete_all(store, name, parts, folders)


def delete_all(
    store: Store, name: str, manifests: Iterable[Manifest], folders: Collection[str]
) -> None:
    """Delete these folders, what the checkpoint shared with others, and what tells of it.

    `manifests` are those of the whole run. What one of another name lists stays where it is: with
    the last that lists it, it goes, too.
    """
    manifests = list(manifests)
    needed = {key for part in manifests if part.name != name for key in _listed_by(part)}
    for folder in sorted(folders):
        delete_below(store, folder, needed)
    shared = {key for part in manifests if part.name == name for key in _shared_by(part)}
    for key in sorted(shared - needed):
        store.delete(key)
    # Last, because they tell where the files are.
    delete_below(store, f"{keys.MANIFESTS}{name}")


def delete_below(store: Store, folder: str, needed: Collection[str] = ()) -> None:
    """Every object in that folder but those `needed`."""
    for found in list(store.list(folder)):
        if found.key.startswith(f"{folder}/") and found.key not in needed:
            store.delete(found.key)


def _listed_by(part: Manifest) -> Iterable[str]:
    return (f"{file.at or part.folder}/{file.name}" for file in part.files)


def _shared_by(part: Manifest) -> Iterable[str]:
    return (f"{file.at}/{file.name}" for file in part.files if file.at)
