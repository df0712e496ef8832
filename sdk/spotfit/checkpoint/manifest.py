"""Manifests: the files that each rank has uploaded to a checkpoint, and completeness checks.

A checkpoint is *complete* if the manifests of all ranks that save files are in the bucket, and
*committed* once the journal has an entry for it. A rank writes its manifest after its files, so a
manifest proves that the files are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from spotfit.checkpoint.format import index_filename
from spotfit.core.codec import decoder
from spotfit.core.errors import NotFoundError
from spotfit.ledger import keys
from spotfit.model.events import ValidationRequest
from spotfit.model.leader_state import ReadyCheckpoint
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord, concurrent_map

_MANIFEST_FOLDER = keys.MANIFESTS.rstrip("/")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a checkpoint."""

    name: str
    round: int
    report_index: int
    """Index of the report in its round, from 0."""
    rank: int
    ranks: tuple[int, ...]
    """All ranks that save files to this checkpoint."""
    metrics: dict[str, Any]
    """Metrics of rank 0, also if rank 0 saves no files."""
    files: tuple[FileRecord, ...]
    custom_folder: str = ""
    """Folder below the run's root that stores the files, if it is not `name`."""
    validation: ValidationRequest | None = None
    """Validation that this rank requested; the request of the first of `ranks` counts."""
    step: int | None = None
    """Step of a snapshot; None for user-defined files."""
    reason: str = ""
    """Why the Checkpointer saved at this step; equal on all ranks."""

    @property
    def folder(self) -> str:
        """Folder of this rank's files below the run's root."""
        return self.custom_folder or self.name

    @property
    def requested_name(self) -> str:
        """Name as the user chose it, without the suffix of a reused name."""
        return self.name.removesuffix(f"@{self.round}-{self.report_index}")

    @property
    def key(self) -> str:
        """Key of this manifest in the run's store."""
        return keys.manifest(self.name, self.round, self.rank)

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a rank's shard of a Checkpointer's snapshot."""
        return any(file.name == index_filename(self.rank) for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


_manifest_decoder = decoder(Manifest)


def is_complete(manifests: Sequence[Manifest]) -> bool:
    """Whether these are all manifests of one report, and of one step if it is a snapshot."""
    if not manifests:
        return False
    first = manifests[0]
    same = all(
        (part.name, part.round, part.report_index, part.ranks, part.step)
        == (first.name, first.round, first.report_index, first.ranks, first.step)
        for part in manifests
    )
    return same and {part.rank for part in manifests} == set(first.ranks)


def ready_checkpoints(
    store: Store, listed_keys: Sequence[str], known_names: Collection[str]
) -> list[ReadyCheckpoint]:
    """Return complete checkpoints that are not in `known_names`, oldest report first.

    A new leader calls it to commit what the previous leader did not. The caller must reject
    checkpoints that are older than the latest committed one. `listed_keys` is a listing of the
    manifest folder; other objects in it are ignored.
    """
    unknown = _read_manifests(store, listed_keys, lambda name: name not in known_names)
    parts = sorted(unknown, key=lambda part: (part.name, _report_order(part)))
    groups = (
        tuple(group) for _, group in groupby(parts, lambda part: (part.name, _report_order(part)))
    )
    ready = [_ready_checkpoint(group) for group in groups if is_complete(group)]
    # The oldest first: a commit excludes the reports before it.
    return sorted(ready, key=lambda checkpoint: (checkpoint.round, checkpoint.report_index))


def manifests_of(store: Store, name: str) -> list[Manifest]:
    """Return all manifests of that checkpoint name, of any rank and round."""
    return _read_manifests(store, _list_keys(store, f"{_MANIFEST_FOLDER}/{name}"))


def manifests_of_all(store: Store, names: Collection[str]) -> list[Manifest]:
    """Return all manifests of these checkpoint names, from one listing."""
    return _read_manifests(store, _list_keys(store, _MANIFEST_FOLDER), lambda name: name in names)


def latest_manifest_of(store: Store, name: str, rank: int) -> Manifest | None:
    """Return the latest manifest of that rank, None if there is none.

    Manifests of other ranks are not read.
    """
    found = _list_keys(store, f"{_MANIFEST_FOLDER}/{name}")
    # A key ends with round and rank: other ranks are excluded without reading their manifests.
    parts = [read_manifest(store, key) for key in found if key.endswith(f"-{rank}.json")]
    return max(filter(None, parts), key=_report_order, default=None)


def newest_complete_manifests(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Return the manifests of the latest complete report, by rank; empty if none is complete."""
    # A later report that was interrupted has manifests as well, but not all of them.
    for order in sorted({_report_order(part) for part in manifests}, reverse=True):
        parts = tuple(part for part in manifests if _report_order(part) == order)
        if is_complete(parts):
            return tuple(sorted(parts, key=lambda part: part.rank))
    return ()


def describe_missing_manifests(manifests: Sequence[Manifest]) -> str:
    """Return why the checkpoint of these manifests cannot be used, for error messages."""
    if not manifests:
        return "is missing: the storage has no manifest of it."
    return "is incomplete: the storage has manifests of some ranks only."


def newest_manifests(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Return the manifests of the latest report, complete or not, by rank."""
    newest = max(map(_report_order, manifests), default=None)
    parts = (part for part in manifests if _report_order(part) == newest)
    return tuple(sorted(parts, key=lambda part: part.rank))


def read_manifest(store: Store, key: str) -> Manifest | None:
    """Return the manifest at that key; None if it is missing, corrupt or belongs to another key."""
    # Users may write files of their own below the run, and a leader may delete a checkpoint
    # between listing and reading: neither may fail the caller.
    try:
        part = _manifest_decoder.decode(store.get(key))
    except (NotFoundError, msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    # A copy under another key, such as a backup that a user made, is no manifest.
    return part if key == part.key else None


def _report_order(part: Manifest) -> tuple[int, int]:
    return (part.round, part.report_index)


def _ready_checkpoint(parts: Sequence[Manifest]) -> ReadyCheckpoint:
    # The first of the ranks decides about everything that only one of them can.
    first = min(parts, key=lambda part: part.rank)
    return ReadyCheckpoint(
        name=first.name,
        round=first.round,
        report_index=first.report_index,
        metrics=first.metrics,
        ranks=first.ranks,
        size_bytes=sum(part.size_bytes for part in parts),
        validation=first.validation,
        is_snapshot=any(part.is_snapshot for part in parts),
        step=first.step,
        reason=first.reason,
        custom_folder=first.custom_folder,
    )


def _list_keys(store: Store, folder: str) -> list[str]:
    return [info.key for info in store.list(folder)]


def _read_manifests(
    store: Store,
    listed_keys: Sequence[str],
    name_filter: Callable[[str], bool] = lambda _: True,
) -> list[Manifest]:
    # Filtering by name before reading keeps the number of requests independent of the number of
    # checkpoints in the run.
    selected = [
        key
        for key in listed_keys
        if key.endswith(".json")
        and (name := key.removeprefix(keys.MANIFESTS).rpartition("/")[0])
        and name_filter(name)
    ]
    parts = concurrent_map(partial(read_manifest, store), selected)
    return [part for part in parts if part is not None]
