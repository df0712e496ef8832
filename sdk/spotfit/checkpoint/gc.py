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

from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest, manifests_of, read_manifest
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.ledger import keys
from spotfit.store.api import Store
from spotfit.store.transfer import concurrent_map
from spotfit.store.url import validate_key

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
    that the journal has dropped. `store` is rooted at the run. Deletes the files that its manifests
    list and, in a folder to which spotfit has uploaded them, those of ranks that died. Files that
    other checkpoints list stay. `delete` deletes one key; by default `store.delete`. Blocks for
    many requests. Idempotent, also for a new leader: an interrupted deletion is repeated whole.
    """
    deletion = _Deletion(store, name, _deletable_parts(store, name), delete or store.delete)
    deletion.delete_uploads()
    deletion.delete_user_files()
    deletion.delete_records()


def _deletable_parts(store: Store, name: str) -> list[Manifest]:
    """Return the manifests of that name, without files that are no files of checkpoints."""
    return [
        replace(
            part,
            files=tuple(
                file
                for file in part.files
                if _may_be_listed(f"{file.source_prefix or part.folder}/{file.name}")
            ),
        )
        for part in manifests_of(store, name)
        if _may_be_listed(part.folder)
    ]


def _may_be_listed(key: str) -> bool:
    """Whether it is a valid key or folder outside of the run's internal objects."""
    try:
        return not f"{validate_key(key)}/".startswith(keys.RESERVED_PREFIX)
    except ConfigError:
        return False


class _Deletion(NamedTuple):
    """Deletion of one checkpoint's objects."""

    store: Store
    name: str
    manifests: Collection[Manifest]
    delete: ObjectDeleter

    def delete_uploads(self) -> None:
        """Delete all files in the folder of the checkpoint's name if spotfit has uploaded them.

        Folders of the user below it stay.
        """
        has_uploads = any(not part.custom_folder for part in self.manifests) or _has_name_marker(
            self.store, self.name
        )
        # The folder with the checkpoint's name may be one that a user has written to directly.
        is_user_folder = any(part.custom_folder == self.name for part in self.manifests)
        if has_uploads and not is_user_folder and _may_be_listed(self.name):
            found = [info.key for info in self.store.list(self.name)]
            self._delete_in_folder(self.name, found)

    def delete_user_files(self) -> None:
        """Delete the files that the manifests list in folders that the user has written to."""
        for folder in sorted({part.custom_folder for part in self.manifests} - {""}):
            listed = {key for part in self.manifests for key in _keys_listed_in(part, folder)}
            self._delete_in_folder(folder, listed)

    def _delete_in_folder(self, folder: str, found: Iterable[str]) -> None:
        # Only manifests that may list files there are read, however many the run has.
        read = partial(read_manifest, self.store)
        others = concurrent_map(
            read, _manifests_overlapping(self.store, folder, exclude_name=self.name)
        )
        parts = [part for part in others if part is not None]
        # Files of a user's folder cannot be attributed to one of the checkpoints in it.
        if any(part.folder == folder for part in parts):
            return
        needed = {key for part in parts for key in _listed_keys(part)}
        inner = tuple(f"{part.folder}/" for part in parts if part.folder.startswith(f"{folder}/"))
        unneeded = [key for key in found if key not in needed and not key.startswith(inner)]
        concurrent_map(self.delete, sorted(unneeded))
        # References are kept with the files: later deletions find the manifests through them.
        if not any(key.startswith(f"{folder}/") for key in needed):
            self._delete_references(folder)

    def delete_records(self) -> None:
        """Delete files that only this checkpoint lists elsewhere, its references and manifests."""
        own = {self.name} | {part.folder for part in self.manifests}
        shared = {file.source_prefix for part in self.manifests for file in part.files} - {"", *own}
        read = cache(partial(read_manifest, self.store))  # one manifest references many folders
        concurrent_map(partial(self._delete_shared_files, read), sorted(shared))
        for folder in sorted({part.custom_folder for part in self.manifests} - {""}):
            self._delete_references(folder, self.name)
        # Manifests last: after a crash they are needed to find the files that are left.
        folder = f"{keys.MANIFESTS}{self.name}"
        found = [info.key for info in self.store.list(folder) if info.key.startswith(f"{folder}/")]
        concurrent_map(self.delete, found)

    def _delete_shared_files(self, read: ManifestReader, folder: str) -> None:
        """Delete files in another checkpoint's folder that no other checkpoint lists."""
        exclusive = {key for part in self.manifests for key in _keys_listed_in(part, folder)}
        is_needed = False
        others = _manifests_overlapping(self.store, folder, exclude_name=self.name)
        for part in filter(None, map(read, others)):
            listed = _listed_keys(part)
            exclusive -= listed
            is_needed |= any(key.startswith(f"{folder}/") for key in listed)
            # Usually the next checkpoint lists the same files, so that one manifest answers it.
            if is_needed and not exclusive:
                break
        for key in sorted(exclusive):
            self.delete(key)
        self._delete_references(folder, self.name if is_needed else None)

    def _delete_references(self, folder: str, name: str | None = None) -> None:
        """Delete the references to that folder by one checkpoint; None: by all."""
        # A list first: the store may page through the objects that are being deleted.
        for info in list(self.store.list(f"{keys.REFS}{folder}")):
            ref = keys.parse_checkpoint_ref(info.key)
            if ref is not None and ref.folder == folder and name in (None, ref.name):
                self.delete(info.key)


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


def _manifests_overlapping(store: Store, folder: str, *, exclude_name: str) -> Iterator[str]:
    """Yield the keys of other checkpoints' manifests that may list files below that folder.

    They have files in it, in a folder below it or in one that contains it.
    """
    # A checkpoint's name is a single folder at the top of the run.
    top, *_ = folder.split("/")
    for info in store.list(f"{keys.MANIFESTS}{top}") if top != exclude_name else ():
        parsed = keys.parse_manifest_key(info.key)
        if parsed is not None and parsed.kind == "json":
            yield info.key
    refs = (keys.parse_checkpoint_ref(info.key) for info in store.list(f"{keys.REFS}{top}"))
    overlapping = {
        ref[:3]
        for ref in refs
        if ref is not None
        and ref.name != exclude_name
        and (f"{ref.folder}/".startswith(f"{folder}/") or folder.startswith(f"{ref.folder}/"))
    }
    # Names usually grow with time, and the next checkpoint is the one that shares most.
    yield from (keys.manifest(*ref) for ref in sorted(overlapping, reverse=True))


def _listed_keys(manifest: Manifest) -> set[str]:
    return {f"{file.source_prefix or manifest.folder}/{file.name}" for file in manifest.files}


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

    Called by the leader for every assigned name, so that `find_abandoned` finds files without a
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
    """Return checkpoint names outside `retained` that were last used before round `before_round`.

    The leader passes the result to `delete_uncommitted`, or to `delete_checkpoint` for `dropped`
    names. `retained` are the committed checkpoints, `dropped` those that the journal has dropped. A
    name that spotfit did not generate is returned `ABANDONED_GRACE_ROUNDS` rounds later, unless it
    was dropped. Lists the manifest folder of the run at `store`.
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
    deletion = _Deletion(store, name, _deletable_parts(store, name), delete or store.delete)
    deletion.delete_uploads()
    deletion.delete_records()


def _has_name_marker(store: Store, name: str) -> bool:
    """Whether spotfit uploaded, or was about to upload, files to the folder of that name."""
    for info in store.list(f"{keys.MANIFESTS}{name}"):
        parsed = keys.parse_manifest_key(info.key)
        if parsed is None or parsed.name != name or parsed.kind == "json":
            continue
        # Read, although it is empty: the store verifies that a leader has written it. The name of
        # a forged one may be any folder below the run's root, and files in it are deleted.
        with contextlib.suppress(NotFoundError, IntegrityError, ConfigError):
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
