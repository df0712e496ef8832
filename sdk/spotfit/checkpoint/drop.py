"""Delete what a checkpoint left in the bucket, but nothing that another one still needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial

from spotfit.checkpoint.manifest import Manifest, manifests_of, read_manifest
from spotfit.ledger import keys
from spotfit.store.abreast import abreast
from spotfit.store.api import Store

Read = Callable[[str], Manifest | None]
Delete = Callable[[str], None]


def drop(store: Store, name: str, *, delete: Delete | None = None) -> None:
    """Delete the files of that checkpoint, then its manifests; `delete` is how, if not at once.

    Only for a name the journal has dropped. May be called again, by a successor too, and for one
    already gone.
    """
    parts = manifests_of(store, name)
    folders = {name} | {part.folder for part in parts}
    delete_all(store, name, parts, folders, delete or store.delete)


def delete_all(
    store: Store,
    name: str,
    parts: Collection[Manifest],
    folders: Collection[str],
    delete: Delete,
) -> None:
    """Delete these folders, what the checkpoint shared with others, and what tells of it.

    `parts` are its manifests. What one of another name lists stays where it is: with the last that
    lists it, it goes, too. So does all of a folder that a user has put several into. Nothing is
    read but what tells of these checkpoints, however many the run has.
    """
    for folder in sorted(folders):
        tellers = _sharers if folder == name else _tellers
        read = partial(read_manifest, store)
        others = [*filter(None, abreast(read, tellers(store, folder, but=name)))]
        if any(part.folder == folder for part in others):
            continue
        needed = {key for part in others for key in _listed_in(part, folder)}
        _delete_below(store, folder, delete, needed)
        if not needed:
            _delete_below(store, f"{keys.SHARES}{folder}", delete)
    shared = {file.at for part in parts for file in part.files} - {"", *folders}
    once = cache(partial(read_manifest, store))  # the same ones share in many folders
    abreast(partial(_stop_sharing, store, once, delete, name, parts), sorted(shared))
    for folder in sorted({part.at for part in parts} - {""}):
        _delete_below(store, f"{keys.SHARES}{folder}/{name}", delete)
    # Last, because they tell where the files are.
    _delete_below(store, f"{keys.MANIFESTS}{name}", delete)


def _delete_below(store: Store, folder: str, delete: Delete, needed: Collection[str] = ()) -> None:
    """Every object in that folder but those `needed`."""
    found = [one.key for one in store.list(folder) if one.key.startswith(f"{folder}/")]
    abreast(delete, [key for key in found if key not in needed])


def note_sharing(store: Store, part: Manifest, folders: Iterable[str]) -> None:
    """Leave word that this part will list files in these folders, before it does: those of others,
    and where a user has put it."""

    def note(folder: str) -> None:
        store.put(keys.sharer(folder, part.name, part.round, part.rank), b"")

    abreast(note, sorted({*folders} - {"", part.name}))


def _stop_sharing(
    store: Store, read: Read, delete: Delete, name: str, parts: Iterable[Manifest], folder: str
) -> None:
    """Delete what it alone still lists in that folder of another one, and the word that it does.

    As a rule the next one lists the same: then the manifests of all others need not be read.
    """
    alone = {key for part in parts for key in _listed_in(part, folder)}
    is_needed = False
    for part in filter(None, map(read, _tellers(store, folder, but=name))):
        listed = _listed_in(part, folder)
        alone -= listed
        is_needed |= bool(listed)
        if is_needed and not alone:
            break
    for key in sorted(alone):
        delete(key)
    told = f"{keys.SHARES}{folder}/{name}" if is_needed else f"{keys.SHARES}{folder}"
    for found in list(store.list(told)):
        delete(found.key)


def _tellers(store: Store, folder: str, *, but: str) -> Iterator[str]:
    """Where the manifests are that tell who needs what in that folder: its own, then others'."""
    traces = (
        (one.key, keys.read_trace(one.key)) for one in store.list(f"{keys.MANIFESTS}{folder}")
    )
    yield from (key for key, trace in traces if trace is not None and trace.kind == "json")
    yield from _sharers(store, folder, but=but)


def _sharers(store: Store, folder: str, *, but: str) -> list[str]:
    """Where checkpoints of other names tell what they list there, the latest name first."""
    told = (keys.read_sharer(info.key, folder) for info in store.list(f"{keys.SHARES}{folder}"))
    others = [one for one in told if one is not None and one.name != but]
    return [keys.manifest(*one) for one in sorted(others, reverse=True)]


def _listed_in(part: Manifest, folder: str) -> set[str]:
    return {f"{folder}/{file.name}" for file in part.files if (file.at or part.folder) == folder}
