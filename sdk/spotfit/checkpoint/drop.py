"""Delete what a checkpoint left in the bucket, but nothing that another one still needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from spotfit.checkpoint.manifest import Manifest, manifests_of, read_manifest
from spotfit.ledger import keys
from spotfit.store.api import Store


def drop(store: Store, name: str) -> None:
    """Delete the files of that checkpoint, then its manifests.

    Only for a name the journal has dropped. May be called again, by a successor too, and for one
    already gone.
    """
    parts = manifests_of(store, name)
    delete_all(store, name, parts, {name} | {part.folder for part in parts})


def delete_all(
    store: Store, name: str, parts: Collection[Manifest], folders: Collection[str]
) -> None:
    """Delete these folders, what the checkpoint shared with others, and what tells of it.

    `parts` are its manifests. What one of another name lists stays where it is: with the last that
    lists it, it goes, too. Nothing is read but what tells of these checkpoints, however many the
    run has.
    """
    for folder in sorted(folders):
        needed = {key for listed in _listed_by_sharers(store, folder, but=name) for key in listed}
        delete_below(store, folder, needed)
        if not needed:
            delete_below(store, f"{keys.SHARES}{folder}")
    for folder in sorted({file.at for part in parts for file in part.files} - {"", *folders}):
        _stop_sharing(store, name, parts, folder)
    # Last, because they tell where the files are.
    delete_below(store, f"{keys.MANIFESTS}{name}")


def delete_below(store: Store, folder: str, needed: Collection[str] = ()) -> None:
    """Every object in that folder but those `needed`."""
    for found in list(store.list(folder)):
        if found.key.startswith(f"{folder}/") and found.key not in needed:
            store.delete(found.key)


def note_sharing(store: Store, part: Manifest, folders: Iterable[str]) -> None:
    """Leave word that this part will list files in these folders of others: before it does."""
    for folder in sorted({*folders} - {"", part.folder}):
        store.put(keys.sharer(folder, part.name, part.round, part.rank), b"")


def _stop_sharing(store: Store, name: str, parts: Iterable[Manifest], folder: str) -> None:
    """Delete what it alone still lists in that folder of another one, and the word that it does.

    As a rule the next one lists the same: then the manifests of all others need not be read.
    """
    alone = {key for part in parts for key in _listed_in(part, folder)}
    is_needed = False
    owners = (_listed_in(part, folder) for part in manifests_of(store, folder))
    for listed in chain(owners, _listed_by_sharers(store, folder, but=name)):
        alone -= listed
        is_needed |= bool(listed)
        if is_needed and not alone:
            break
    for key in sorted(alone):
        store.delete(key)
    delete_below(store, f"{keys.SHARES}{folder}/{name}" if is_needed else f"{keys.SHARES}{folder}")


def _listed_by_sharers(store: Store, folder: str, *, but: str) -> Iterator[set[str]]:
    """What parts of checkpoints of other names list in that folder, the latest name first."""
    told = (keys.read_sharer(info.key, folder) for info in store.list(f"{keys.SHARES}{folder}"))
    for one in sorted(filter(None, told), reverse=True):
        part = read_manifest(store, keys.manifest(*one)) if one.name != but else None
        if part is not None:
            yield _listed_in(part, folder)


def _listed_in(part: Manifest, folder: str) -> set[str]:
    return {f"{folder}/{file.name}" for file in part.files if (file.at or part.folder) == folder}
