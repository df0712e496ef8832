"""A committed checkpoint, as its manifests tell it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from spotfit.checkpoint.handle import METADATA, Address, Checkpoint
from spotfit.checkpoint.manifest import (
    Manifest,
    manifests_of,
    manifests_of_all,
    newest,
    newest_complete,
)
from spotfit.core.errors import IntegrityError
from spotfit.store.abreast import abreast
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord

_MARK = re.compile(r"@(\d+)-(\d+)")


def open_committed(store: Store, name: str) -> Checkpoint:
    """That checkpoint of the run at `store`; its files are checked when they are read.

    Where a name was used in several rounds, it is what the last complete one of them wrote.
    Raises `IntegrityError` when no complete set of manifests is left.
    """
    return _opened(store, _parts(store, name))


def open_so_far(store: Store, name: str, folder: str) -> Checkpoint:
    """One that may not be committed yet: the parts in that folder that are there by now.

    Where none is left, it is whatever lies there.
    """
    parts = [part for part in newest(manifests_of(store, name)) if part.folder == folder]
    return _opened(store, parts) if parts else Checkpoint.in_store(store, folder)


def open_all(
    store: Store, names: Collection[str], *, within: Address | None = None
) -> dict[str, Checkpoint]:
    """Those checkpoints of the run, by name, from one look at its manifests.

    One whose manifests are gone is there as well; its files are taken as they are found. `within`
    is the run's place as the user gave it.
    """
    told = _told_of(store, names)
    opened = {}
    for name in names:
        parts = newest_complete(told[name])
        opened[name] = (
            _opened(store, parts, within)
            if parts
            else Checkpoint.in_store(store, name, within=within)
        )
    return opened


def check_present(store: Store, name: str) -> None:
    """Compare a listing with the manifests, without reading files.

    Raises `IntegrityError` naming the first file that is missing or has another size.
    """
    _check_listed(store, name, _parts(store, name))


def check_all_present(store: Store, names: Collection[str]) -> None:
    """The same of each of them, from one look at the run's manifests."""
    told = _told_of(store, names)
    abreast(lambda name: _check_listed(store, name, _whole(store, name, told[name])), told)


def _check_listed(store: Store, name: str, parts: Sequence[Manifest]) -> None:
    folder = parts[0].folder
    records = _merged(store, parts)
    sizes = {at: _sizes(store, at or folder) for at in {"", *(record.at for record in records)}}
    for record in records:
        found = sizes[record.at].get(record.name)
        if record.name == METADATA or found == record.size_bytes:
            continue
        how = "is missing" if found is None else "has another size"
        raise IntegrityError(
            f"The file {record.name!r} of checkpoint {name} in {store.url} {how}.",
            do="Restore it from a copy, or start a run of another name.",
            file=record.name,
        )


def _told_of(store: Store, names: Collection[str]) -> dict[str, list[Manifest]]:
    """By name, whatever any rank in any round wrote down for it."""
    told: dict[str, list[Manifest]] = {name: [] for name in names}
    for part in manifests_of_all(store, names) if names else ():
        told[part.name].append(part)
    return told


def _opened(store: Store, parts: Sequence[Manifest], within: Address | None = None) -> Checkpoint:
    folder = parts[0].folder
    return Checkpoint.in_store(store, folder, files=_merged(store, parts), within=within)


def _parts(store: Store, name: str) -> tuple[Manifest, ...]:
    return _whole(store, name, manifests_of(store, name))


def _whole(store: Store, name: str, told: Sequence[Manifest]) -> tuple[Manifest, ...]:
    parts = newest_complete(told)
    if not parts:
        raise IntegrityError(
            f"Checkpoint {name} in {store.url} is gone or in pieces: no complete manifests.",
            do="Restore the folder and its manifests from a copy, or start a run of another name.",
            checkpoint=name,
        )
    return parts


def _merged(store: Store, parts: Sequence[Manifest]) -> list[FileRecord]:
    """The files of all ranks that have put them where the first has, and what they took over and
    nobody has brought anew since.

    Of equal names in one folder the last upload stayed, and nobody knows whose.
    """
    folder, called = parts[0].folder, parts[0].called
    merged: dict[str, FileRecord] = {}
    sizes: dict[str, Mapping[str, int]] = {}
    files = [file for part in parts if part.folder == folder for file in part.files]
    for record in sorted(files, key=lambda file: _brought_in(file, called), reverse=True):
        name, at = record.name, record.at
        known = merged.setdefault(name, record)
        if known != record and known.at == at:
            sizes[at] = sizes.get(at) or _sizes(store, at or folder)
            merged[name] = FileRecord(name, sizes[at].get(name, -1), "", at)
    return list(merged.values())


def _brought_in(file: FileRecord, called: str) -> tuple[int, int, int]:
    """The later, the greater. What was taken over lies where an earlier use of the name has put it:
    its folder ends with its round and report, but for the first."""
    mark = _MARK.fullmatch(file.at.removeprefix(called))
    round_, report = map(int, mark.groups()) if mark else (-1, -1)
    return (not file.at, round_, report)


def _sizes(store: Store, folder: str) -> dict[str, int]:
    below = f"{folder}/"
    return {
        found.key.removeprefix(below): found.size_bytes
        for found in store.list(folder)
        if found.key.startswith(below)
    }
