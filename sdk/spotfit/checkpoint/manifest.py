"""Manifests: the files that each rank has uploaded to a checkpoint, and completeness checks.

A checkpoint is *complete* if the manifests of all ranks that save files are in the bucket, and
*committed* once the journal has an entry for it. A rank writes its manifest after its files, so a
manifest proves that the files are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from spotfit.checkpoint.format import index_filename
from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.ledger import keys
from spotfit.model.events import ValidationRequest
from spotfit.model.leader_state import ReadyCheckpoint
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read
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
    data_positions: dict[str, dict[str, Any]] = {}
    """Position in each of the trainer's datasets, as `data.shard.ShardPosition.state` returns it;
    {} for a snapshot, whose index has them."""
    default_metadata: str = ""
    """`RunSpec.default_metadata`, which the first of `ranks` copies into the checkpoint."""

    @property
    def folder(self) -> str:
        """Folder of this rank's files, a key below the run's root such as "checkpoint_000003".

        It is the checkpoint's name, unless the user has written the files to another folder.
        """
        return self.custom_folder or self.name

    @property
    def requested_name(self) -> str:
        """Checkpoint name as the user chose it: "best" for the reused name "best@2-5".

        spotfit appends the round and report index if a user's name was used before.
        """
        return self.name.removesuffix(f"@{self.round}-{self.report_index}")

    @property
    def key(self) -> str:
        """Key of this manifest below the run's root.

        For example ".spotfit/manifests/checkpoint_000003/2-0.json", for round 2 and rank 0.
        """
        return keys.manifest(self.name, self.round, self.rank)

    @property
    def is_snapshot(self) -> bool:
        """Whether it describes a shard of a Checkpointer's snapshot, not user-defined files."""
        return any(file.name == index_filename(self.rank) for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Total size in bytes of the files listed, with those that earlier checkpoints store."""
        return sum(file.size_bytes for file in self.files)


_manifest_decoder = decoder(Manifest)


def manifest_digest(part: Manifest) -> str:
    """Return the SHA-256, as hex digits, of what a manifest says about its report and its files.

    Fields that are added later do not change it.
    """
    position = (part.name, part.round, part.report_index, part.rank, part.ranks, part.step)
    return hashlib.sha256(encode((*position, part.custom_folder, part.files))).hexdigest()


def combine_digests(digest_by_rank: Mapping[int, str]) -> str:
    """Return one digest for the manifests of all ranks; '' if that of a rank is unknown, thus ''.

    `digest_by_rank` are values of `manifest_digest`. The journal entry of the commit contains the
    result.
    """
    if not digest_by_rank or "" in digest_by_rank.values():
        return ""
    lines = (f"{rank} {digest}\n" for rank, digest in sorted(digest_by_rank.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest_of_all(parts: Iterable[Manifest]) -> str:
    return combine_digests({part.rank: manifest_digest(part) for part in parts})


def is_complete(manifests: Sequence[Manifest]) -> bool:
    """Whether these are all manifests of one report, and of one step if it is a snapshot.

    False for an empty sequence, if a rank's manifest is missing, or if they are of several reports.
    """
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

    The leader calls it when no round is open, to commit checkpoints whose upload ended after the
    round, or under an earlier leader. `listed_keys` are the keys in a listing of the manifest
    folder, `.spotfit/manifests`; other objects are ignored. Reads the manifests of unknown names
    from `store`, which is rooted at the run. The caller must reject checkpoints that are older than
    the latest committed one.
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
    """Return all manifests of that checkpoint name, of any rank and round, in any order.

    Lists and reads the storage; `store` is rooted at the run. Empty if there are none; unreadable
    manifests are left out.
    """
    return _read_manifests(store, _list_keys(store, f"{_MANIFEST_FOLDER}/{name}"))


def manifests_of_all(store: Store, names: Collection[str]) -> list[Manifest]:
    """Return all manifests of these checkpoint names, of any rank and round, from one listing.

    Lists and reads the storage; `store` is rooted at the run. Names without manifests contribute
    nothing; unreadable manifests are left out.
    """
    return _read_manifests(store, _list_keys(store, _MANIFEST_FOLDER), lambda name: name in names)


def latest_manifest_of(store: Store, name: str, rank: int) -> Manifest | None:
    """Return the manifest of that rank's latest report under this name; None if there is none.

    Lists and reads the storage; `store` is rooted at the run. The report may be incomplete or
    uncommitted, because manifests of other ranks are not read.
    """
    found = _list_keys(store, f"{_MANIFEST_FOLDER}/{name}")
    # A key ends with round and rank: other ranks are excluded without reading their manifests.
    parts = [read_manifest(store, key) for key in found if key.endswith(f"-{rank}.json")]
    return max(filter(None, parts), key=_report_order, default=None)


def newest_complete_manifests(
    manifests: Sequence[Manifest], digest: str = ""
) -> tuple[Manifest, ...]:
    """Return the manifests of the latest complete report, by rank; empty if none is complete.

    `manifests` are all of one checkpoint name, from `manifests_of`. A name can have several
    reports, from several rounds. With a `digest`, `CheckpointCommitted.manifests_digest`, only the
    report that was committed counts: earlier manifests of the run are authentic, too.
    """
    # A later report that was interrupted has manifests as well, but not all of them.
    for order in sorted({_report_order(part) for part in manifests}, reverse=True):
        parts = tuple(part for part in manifests if _report_order(part) == order)
        if is_complete(parts) and digest in ("", _digest_of_all(parts)):
            return tuple(sorted(parts, key=lambda part: part.rank))
    return ()


def describe_missing_manifests(manifests: Sequence[Manifest], digest: str = "") -> str:
    """Return why a checkpoint without a complete report cannot be used, for error messages.

    `manifests` are all of its name, `digest` is as in `newest_complete_manifests`. The result ends
    a sentence: "is missing: …".
    """
    if not manifests:
        return "is missing: the storage has no manifest of it."
    if digest and newest_complete_manifests(manifests):
        return "was replaced: its manifests are not those that the run has committed."
    return "is incomplete: the storage has manifests of some ranks only."


def newest_manifests(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Return the manifests of the latest report, complete or not, in the order of the ranks.

    `manifests` are all of one checkpoint name, from `manifests_of`; empty for none.
    """
    newest = max(map(_report_order, manifests), default=None)
    parts = (part for part in manifests if _report_order(part) == newest)
    return tuple(sorted(parts, key=lambda part: part.rank))


def read_manifest(store: Store, key: str) -> Manifest | None:
    """Return the manifest at that key of the run's store; None if it is missing or invalid.

    A manifest that is stored under another key than its own, such as a copy, is invalid, and with
    an `AuthenticatedStore` also one without a valid MAC. Raises no exception for missing or corrupt
    objects, because users and other leaders may delete or write objects meanwhile.
    """
    # Users may write files of their own below the run, and a leader may delete a checkpoint
    # between listing and reading: neither may fail the caller.
    try:
        return repeat_read(partial(_decode_manifest, store, key))
    # ConfigError: anyone may write an object whose key spotfit would not.
    except (NotFoundError, IntegrityError, ConfigError, *DECODE_ERRORS):
        return None


def _decode_manifest(store: Store, key: str) -> Manifest:
    part = _manifest_decoder.decode(strip_mac(store.get(key)))
    # A copy under another key, such as a backup that a user made, is no manifest.
    if key != part.key:
        raise msgspec.ValidationError(f"the manifest belongs to {part.key}")
    return part


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
        manifests_digest=_digest_of_all(parts),
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
