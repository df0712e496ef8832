"""Opening committed checkpoints from their manifests, and checking that their files exist.

Checkpoints as a training function reports them, and as the run returns them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spotfit.checkpoint.checkpoint_dir import METADATA_FILE, Checkpoint, StorageLocation
from spotfit.checkpoint.manifest import (
    Manifest,
    describe_missing_manifests,
    manifests_of,
    manifests_of_all,
    newest_complete_manifests,
    newest_manifests,
)
from spotfit.core.errors import IntegrityError
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.events import ValidationRequest
from spotfit.model.reporting import CheckpointUploadMode, ReportedCheckpointStatus
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord, concurrent_map, list_files

# No file has this size, so that reading a checkpoint with it raises.
_MISSING_MANIFEST = FileRecord("authentic manifest", -1, "")
_REUSE_SUFFIX = re.compile(r"@(\d+)-(\d+)")


def open_committed(store: Store, name: str, *, digest: str = "") -> Checkpoint:
    """Open that checkpoint of the run at `store`; its files are verified when they are read.

    `name` is from the journal, such as "checkpoint_000003", and `digest` the `manifests_digest` of
    the same entry; '' accepts the latest complete report of the name. Reads its manifests. Raises
    `IntegrityError` if they are incomplete or not those of the entry.
    """
    return _to_checkpoint(store, _complete_manifests(store, name, digest))


def read_data_positions(
    store: Store, name: str, rank: int, *, digest: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the positions in the trainer's datasets with which that checkpoint was saved.

    Those that `rank` has saved; if it has saved no files, those of the first rank that has. {} for
    a checkpoint without datasets. Arguments and errors are those of `open_committed`.
    """
    parts = {part.rank: part for part in _complete_manifests(store, name, digest)}
    return parts.get(rank, parts[min(parts)]).data_positions


def open_uncommitted(store: Store, name: str, folder: str) -> Checkpoint:
    """Open a checkpoint that may not be committed yet, with the files uploaded to `folder` so far.

    For `get_checkpoint()` after this worker's upload. `folder` is a key below the run's root,
    mostly equal to `name`. Reads the manifests at the time of the call. Without any the checkpoint
    consists of all files in the folder, unverified; with the run key, reading it then raises
    `IntegrityError`.
    """
    parts = [part for part in newest_manifests(manifests_of(store, name)) if part.folder == folder]
    if parts:
        return _to_checkpoint(store, parts)
    return Checkpoint.from_store(store, folder, files=_files_without_manifest(store))


def _files_without_manifest(store: Store) -> tuple[FileRecord, ...] | None:
    return (_MISSING_MANIFEST,) if isinstance(store, AuthenticatedStore) else None


def open_all(
    store: Store, digests: Mapping[str, str], *, location: StorageLocation | None = None
) -> dict[str, Checkpoint]:
    """Open these checkpoints of the run from one listing; returns them by name.

    `digests` has the `manifests_digest` of each checkpoint, '' if it is unknown. For the run's
    `Result` and the reported checkpoints. A checkpoint without complete manifests is included:
    without the run key its files are not verified, with the key reading them raises
    `IntegrityError`, because another writer may have replaced them. `location` is the run's storage
    as the user passed it; None if the user passed a URL.
    """
    manifests = _manifests_by_name(store, digests)
    unlisted = _files_without_manifest(store)
    opened = {}
    for name, digest in digests.items():
        parts = newest_complete_manifests(manifests[name], digest)
        opened[name] = (
            _to_checkpoint(store, parts, location)
            if parts
            else Checkpoint.from_store(store, name, files=unlisted, location=location)
        )
    return opened


def check_present(store: Store, name: str, *, digest: str = "") -> None:
    """Compare a listing with the manifests of that checkpoint, without reading its files.

    Called before `fit()` continues a run from it, and before the leader commits one that it found
    in the bucket. `store` is rooted at the run, `digest` is as in `open_committed`. Raises
    `IntegrityError` if no report of the name is complete or has this digest, and for the first file
    that is missing or has another size.
    """
    _check_listed(store, name, _complete_manifests(store, name, digest))


def check_all_present(store: Store, digests: Mapping[str, str]) -> None:
    """Call `check_present` for these checkpoints, with one listing of the manifests.

    `digests` is as in `open_all`. Called when a `Result` is read from its storage. Raises
    `IntegrityError` for one checkpoint that is incomplete, or of which a file is missing or has
    another size.
    """
    manifests = _manifests_by_name(store, digests)
    # Each check lists one or more folders of its own.
    concurrent_map(
        lambda name: _check_listed(
            store, name, _require_complete(store, name, manifests[name], digests[name])
        ),
        manifests,
    )


def _check_listed(store: Store, name: str, parts: Sequence[Manifest]) -> None:
    folder = parts[0].folder
    records = _merge_file_records(store, parts)
    # One listing per folder: a snapshot has thousands of chunks, too many for one request each.
    sizes = {
        prefix: list_files(store, prefix or folder)
        for prefix in {"", *(record.source_prefix for record in records)}
    }
    for record in records:
        found = sizes[record.source_prefix].get(record.name)
        # set_metadata() may rewrite the metadata file at any time.
        if record.name == METADATA_FILE or found == record.size_bytes:
            continue
        problem = "is missing" if found is None else f"has {found} bytes, not {record.size_bytes}"
        raise IntegrityError(
            f"The file {record.name!r} of checkpoint {name} in {store.url} {problem}.",
            do="Restore the file from a backup, or start a run with another RunConfig(name=...).",
            file=record.name,
        )


def _manifests_by_name(store: Store, names: Collection[str]) -> dict[str, list[Manifest]]:
    # A name without manifests must be in the result: callers report it or open its folder.
    found: dict[str, list[Manifest]] = {name: [] for name in names}
    for part in manifests_of_all(store, names) if names else ():
        found[part.name].append(part)
    return found


def _to_checkpoint(
    store: Store, manifests: Sequence[Manifest], location: StorageLocation | None = None
) -> Checkpoint:
    folder = manifests[0].folder
    return Checkpoint.from_store(
        store, folder, files=_merge_file_records(store, manifests), location=location
    )


def _complete_manifests(store: Store, name: str, digest: str) -> tuple[Manifest, ...]:
    return _require_complete(store, name, manifests_of(store, name), digest)


def _require_complete(
    store: Store, name: str, manifests: Sequence[Manifest], digest: str
) -> tuple[Manifest, ...]:
    parts = newest_complete_manifests(manifests, digest)
    if not parts:
        raise IntegrityError(
            f"Checkpoint {name} in {store.url} {describe_missing_manifests(manifests, digest)}",
            do="Restore the folder and its manifests from a backup, or start a run with another "
            "RunConfig(name=...).",
            checkpoint=name,
        )
    return parts


def _merge_file_records(store: Store, manifests: Sequence[Manifest]) -> list[FileRecord]:
    """Merge the files of all ranks; the latest upload of each name wins.

    Ranks that saved to another folder than the first rank are left out.
    """
    # The first rank decides, as it does about the metrics and validation of the checkpoint.
    folder, requested_name = manifests[0].folder, manifests[0].requested_name
    merged: dict[str, FileRecord] = {}
    sizes: dict[str, Mapping[str, int]] = {}
    files = [file for part in manifests if part.folder == folder for file in part.files]
    for record in sorted(files, key=lambda file: _upload_order(file, requested_name), reverse=True):
        name, prefix = record.name, record.source_prefix
        known = merged.setdefault(name, record)
        # Several ranks uploaded different files of one name to one folder. It is unknown which
        # upload came last, so only the size that is listed now can be verified.
        if known != record and known.source_prefix == prefix:
            sizes[prefix] = sizes.get(prefix) or list_files(store, prefix or folder)
            # -1 matches no file: one that is not listed fails the verification as missing.
            merged[name] = FileRecord(name, sizes[prefix].get(name, -1), "", prefix)
    return list(merged.values())


def _upload_order(file: FileRecord, requested_name: str) -> tuple[int, int, int]:
    """Sort key: greater for later uploads.

    An inherited file is stored in the folder of an earlier use of the name, which ends with round
    and report index; the folder of the first use has no suffix.
    """
    suffix = _REUSE_SUFFIX.fullmatch(file.source_prefix.removeprefix(requested_name))
    round_number, report_index = map(int, suffix.groups()) if suffix else (-1, -1)
    return (not file.source_prefix, round_number, report_index)


# --- Checkpoints as a training function reports them ----------------------------------------------


UploadFn = Callable[[Checkpoint, str], Checkpoint]
"""User-defined upload: takes the checkpoint and its directory name, returns the uploaded one."""


class CheckpointReport(NamedTuple):
    """The checkpoint of one `report()` call, and how to upload it."""

    checkpoint: Checkpoint
    upload_mode: CheckpointUploadMode
    delete_after_upload: bool
    """Whether to delete the local copy after the upload."""
    dir_name: str | None = None
    upload_fn: UploadFn | None = None
    validation: ValidationRequest | None = None


@dataclass
class ReportedCheckpoint:
    """A checkpoint of the run, with the metrics it was reported with."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus
