"""Deletion of checkpoints that were dropped, and of those that were never committed.

Checkpoints share files: a snapshot references chunks of earlier ones, and a reused name lists
files of its earlier uses. A file may therefore be deleted only if no other manifest lists it. To
find those manifests without reading all of the run's, a writer leaves a *reference* object
`refs/<folder>/<name>/...` before it writes a manifest that lists files in another folder.

The leader writes a *name marker* beside the manifests when the round coordinator assigns a
checkpoint name. Without it, an upload of a worker that died could not be distinguished from the
user's own files in the run's folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple

from spotfit.checkpoint.manifest import Manifest, manifests_of, read_manifest
from spotfit.core.errors import IntegrityError, NotFoundError
from spotfit.ledger import keys
from spotfit.store.api import Store
from spotfit.store.transfer import concurrent_map

ManifestReader = Callable[[str], Manifest | None]
ObjectDeleter = Callable[[str], None]
"""Deletes the object at a key. The leader passes one that first checks that it still leads."""

# Partial files may be all that is left of a step, and a user can find them by a name that they
# chose. Generated names are unknown to the user, so their files are deleted at once.
ABANDONED_GRACE_ROUNDS = 3
"""Rounds for which uncommitted files under a name that the user chose are kept."""


# --- dropped checkpoints -------------------------------------------------------------------------


def delete_checkpoint(store: Store, name: str, *, delete: ObjectDeleter | None = None) -> None:
    """Delete the files of that checkpoint, then its manifests.

    Called by the leader, on a background thread, and by `spotfit checkpoints rm`, only for a name
    that the journal has dropped. `store` is rooted at the run. Files that other checkpoints list
    stay. `delete` deletes one key; by default `store.delete`. Blocks for many requests. Idempotent,
    also for a new leader: a deletion that was interrupted is repeated whole.
    """
    parts = manifests_of(store, name)
    # Its own folder also without manifests: a rank that died may have left files in it.
    folders = {name} | {part.folder for part in parts}
    _delete_folders(store, name, manifests=parts, folders=folders, delete=delete or store.delete)


def _delete_folders(
    store: Store,
    name: str,
    *,
    manifests: Collection[Manifest],
    folders: Collection[str],
    delete: ObjectDeleter,
) -> None:
    """Delete these folders, files that only this checkpoint references, and its manifests.

    Files that other checkpoints list stay. A folder that holds another checkpoint's own files, as
    users may write several to one folder, stays whole. Only manifests that reference these folders
    are read, however many the run has.
    """
    for folder in sorted(folders):
        find_keys = _referencing_keys if folder == name else _manifests_referencing
        read = partial(read_manifest, store)
        others = [*filter(None, concurrent_map(read, find_keys(store, folder, exclude_name=name)))]
        # Files of a user's folder cannot be attributed to one of the checkpoints in it.
        if any(part.folder == folder for part in others):
            continue
        needed = {key for part in others for key in _keys_listed_in(part, folder)}
        _delete_objects_below(store, folder, delete, needed=needed)
        # References are kept with the files: later deletions find the manifests through them.
        if not needed:
            _delete_objects_below(store, f"{keys.REFS}{folder}", delete)
    shared = {file.source_prefix for part in manifests for file in part.files} - {"", *folders}
    delete_references = partial(
        _delete_references,
        store,
        name=name,
        manifests=manifests,
        read=cache(partial(read_manifest, store)),  # one manifest references many folders
        delete=delete,
    )
    concurrent_map(delete_references, sorted(shared))
    for folder in sorted({part.custom_folder for part in manifests} - {""}):
        _delete_objects_below(store, f"{keys.REFS}{folder}/{name}", delete)
    # Manifests last: after a crash they are needed to find the files that are left.
    _delete_objects_below(store, f"{keys.MANIFESTS}{name}", delete)


def _delete_objects_below(
    store: Store, folder: str, delete: ObjectDeleter, *, needed: Collection[str] = ()
) -> None:
    found = [info.key for info in store.list(folder) if info.key.startswith(f"{folder}/")]
    concurrent_map(delete, [key for key in found if key not in needed])


def write_references(store: Store, manifest: Manifest, folders: Iterable[str]) -> None:
    """Record that the manifest lists files in these folders. Call it before writing the manifest.

    The references protect the files when the checkpoints of these folders are deleted. `folders`
    are keys below the run's root, such as "checkpoint_000002"; the checkpoint's own folder and ''
    are skipped. `store` is rooted at the run. Idempotent.
    """

    # The body is empty: a listing of the keys finds the manifests, and no object has to be read.
    def write_reference(folder: str) -> None:
        store.put(keys.checkpoint_ref(folder, manifest.name, manifest.round, manifest.rank), b"")

    concurrent_map(write_reference, sorted({*folders} - {"", manifest.name}))


def _delete_references(
    store: Store,
    folder: str,
    *,
    name: str,
    manifests: Iterable[Manifest],
    read: ManifestReader,
    delete: ObjectDeleter,
) -> None:
    """Delete files in another checkpoint's folder that only this checkpoint lists, and its refs."""
    exclusive = {key for part in manifests for key in _keys_listed_in(part, folder)}
    is_needed = False
    for part in filter(None, map(read, _manifests_referencing(store, folder, exclude_name=name))):
        listed = _keys_listed_in(part, folder)
        exclusive -= listed
        is_needed |= bool(listed)
        # Usually the next checkpoint lists the same files, so that one manifest answers it.
        if is_needed and not exclusive:
            break
    for key in sorted(exclusive):
        delete(key)
    prefix = f"{keys.REFS}{folder}/{name}" if is_needed else f"{keys.REFS}{folder}"
    # A list first: the store may page through the objects that are being deleted.
    for info in list(store.list(prefix)):
        delete(info.key)


def _manifests_referencing(store: Store, folder: str, *, exclude_name: str) -> Iterator[str]:
    """Yield the keys of manifests that may list files in that folder: its own, then others'."""
    for info in store.list(f"{keys.MANIFESTS}{folder}"):
        parsed = keys.parse_manifest_key(info.key)
        if parsed is not None and parsed.kind == "json":
            yield info.key
    yield from _referencing_keys(store, folder, exclude_name=exclude_name)


def _referencing_keys(store: Store, folder: str, *, exclude_name: str) -> list[str]:
    """Return the keys of manifests with references to that folder, the latest name first."""
    parsed = (
        keys.parse_checkpoint_ref(info.key, folder) for info in store.list(f"{keys.REFS}{folder}")
    )
    # Names usually grow with time, and the next checkpoint is the one that shares most.
    others = [ref for ref in parsed if ref is not None and ref.name != exclude_name]
    return [keys.manifest(*ref) for ref in sorted(others, reverse=True)]


def _keys_listed_in(manifest: Manifest, folder: str) -> set[str]:
    return {
        f"{folder}/{file.name}"
        for file in manifest.files
        if (file.source_prefix or manifest.folder) == folder
    }


# --- checkpoints that were never committed -------------------------------------------------------


class _NameUsage(NamedTuple):
    """Objects in the manifest folder under one checkpoint name."""

    last_round: int = 0
    """The latest round in which the name was assigned or a manifest was written."""
    marker_kinds: frozenset[str] = frozenset()
    """Kinds of these objects: "json" for manifests, "made" and "chosen" for name markers."""

    @property
    def is_generated(self) -> bool:
        """Whether only spotfit ever assigned the name, which then is never used again.

        False for a name that user code has chosen, and for one without a name marker.
        """
        return "made" in self.marker_kinds and "chosen" not in self.marker_kinds


def write_name_marker(store: Store, name: str, round_number: int, *, generated: bool) -> None:
    """Record that the name was assigned in that round to files that spotfit uploads.

    Called by the leader for every assigned name, so that a later leader finds files without a
    manifest. `generated`: spotfit has generated the name, such as "checkpoint_000003"; otherwise
    user code chose it. `store` is rooted at the run. Idempotent.
    """
    store.put(keys.name_marker(name, round_number, generated=generated), b"")


def checkpoint_names_in(listed_keys: Iterable[str]) -> frozenset[str]:
    """Return all checkpoint names in a listing of the manifest folder, `.spotfit/manifests`.

    They are the names of manifests and of name markers, committed or not, and include checkpoints
    whose deletion has not finished. Keys of other objects are ignored.
    """
    parsed = map(keys.parse_manifest_key, listed_keys)
    return frozenset(key.name for key in parsed if key is not None)


def partially_deleted(store: Store, dropped: Collection[str]) -> tuple[str, ...]:
    """Return the names in `dropped` whose deletion has not finished, sorted.

    `dropped` are the checkpoints that the journal has dropped. Lists the manifest folder of the run
    at `store`. The leader deletes the returned ones again.
    """
    listed = (info.key for info in store.list(keys.MANIFESTS.rstrip("/")))
    return tuple(sorted(checkpoint_names_in(listed).intersection(dropped)))


def find_abandoned(
    store: Store, *, retained: Collection[str], before_round: int, dropped: Collection[str] = ()
) -> tuple[str, ...]:
    """Return names outside `retained` that were last used before round `before_round`.

    The leader passes the result to `delete_uncommitted`, or to `delete_checkpoint` for `dropped`
    names. `retained` are the committed checkpoints, `dropped` those that the journal has dropped. A
    name that the user chose is returned `ABANDONED_GRACE_ROUNDS` later, unless it was dropped.
    Lists the manifest folder of the run at `store`.
    """

    def grace_rounds(name: str, usage: _NameUsage) -> int:
        return 0 if usage.is_generated or name in dropped else ABANDONED_GRACE_ROUNDS

    return tuple(
        name
        for name, usage in _name_usage(store).items()
        if name not in retained and usage.last_round < before_round - grace_rounds(name, usage)
    )


def delete_uncommitted(store: Store, name: str, *, delete: ObjectDeleter | None = None) -> None:
    """Delete uploads under a name that was never committed, as `delete_checkpoint` does.

    Called by the leader, on a background thread, for names from `find_abandoned`. Files that users
    wrote to a folder themselves stay. `delete` deletes one key; by default `store.delete`. Blocks
    for many requests. Idempotent, also for a new leader.
    """
    parts = manifests_of(store, name)
    has_uploads = _has_name_marker(store, name) or any(not part.custom_folder for part in parts)
    # The folder with the checkpoint's name may be one that a user has written to directly.
    is_user_folder = any(part.custom_folder == name for part in parts)
    folders: Collection[str] = {name} if has_uploads and not is_user_folder else ()
    _delete_folders(store, name, manifests=parts, folders=folders, delete=delete or store.delete)


def _has_name_marker(store: Store, name: str) -> bool:
    """Whether spotfit uploaded, or was about to upload, files to the folder of that name."""
    for info in store.list(f"{keys.MANIFESTS}{name}"):
        parsed = keys.parse_manifest_key(info.key)
        if parsed is None or parsed.name != name or parsed.kind == "json":
            continue
        # Read, although it is empty: the store verifies that a leader has written it. The name of
        # a forged one may be any folder below the run's root, and files in it are deleted.
        with contextlib.suppress(NotFoundError, IntegrityError):
            store.get(info.key)
            return True
    return False


def _name_usage(store: Store) -> dict[str, _NameUsage]:
    usages: dict[str, _NameUsage] = {}
    for info in store.list(keys.MANIFESTS.rstrip("/")):
        parsed = keys.parse_manifest_key(info.key)
        if parsed is not None:
            known = usages.get(parsed.name, _NameUsage())
            last_round = max(known.last_round, parsed.round)
            usages[parsed.name] = _NameUsage(last_round, known.marker_kinds | {parsed.kind})
    return usages
