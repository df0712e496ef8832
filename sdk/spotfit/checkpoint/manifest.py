"""Manifests: what each rank brought to a checkpoint, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from spotfit.checkpoint.snapshot import index_file
from spotfit.core.codec import decoder
from spotfit.core.errors import NotFoundError
from spotfit.ledger import keys
from spotfit.model.events import ValidationAsked
from spotfit.model.watch import Ready
from spotfit.store.abreast import abreast
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord

_FOLDER = keys.MANIFESTS.rstrip("/")


class Manifest(msgspec.Struct, frozen=True):
    """One rank's part of a checkpoint. It is written after the files it lists."""

    name: str
    round: int
    report: int
    """Which report of the round (from 0) it came with."""
    rank: int
    ranks: tuple[int, ...]
    """All ranks that bring files."""
    metrics: dict[str, Any]
    """Rank 0's, whoever has files."""
    files: tuple[FileRecord, ...]
    at: str = ""
    """The folder below the run's root where the files lie, if it is not `name`."""
    validation: ValidationAsked | None = None
    """Whether this rank wants it validated. What the first of `ranks` wants is done."""
    step: int | None = None
    """Of a snapshot: how many steps were done."""
    why: str = ""
    """Why a Checkpointer saved it just then; all ranks say the same."""

    @property
    def folder(self) -> str:
        """Where this part's files lie, below the run's root."""
        return self.at or self.name

    @property
    def called(self) -> str:
        """The name its user chose: where that was used before, a mark was put behind it."""
        return self.name.removesuffix(f"@{self.round}-{self.report}")

    @property
    def key(self) -> str:
        """Where this part is written down."""
        return keys.manifest(self.name, self.round, self.rank)

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a rank's part of what a Checkpointer saved."""
        return any(file.name == index_file(self.rank) for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


_manifests = decoder(Manifest)


def complete(manifests: Sequence[Manifest]) -> bool:
    """Whether these are the parts of one report, and all of them: of a snapshot of one step."""
    if not manifests:
        return False
    first = manifests[0]
    same = all(
        (part.name, part.round, part.report, part.ranks, part.step)
        == (first.name, first.round, first.report, first.ranks, first.step)
        for part in manifests
    )
    return same and {part.rank for part in manifests} == set(first.ranks)


def ready_in(store: Store, known: Collection[str]) -> list[Ready]:
    """Complete checkpoints in the bucket whose names are not `known`, oldest report first.

    For a successor whose predecessor died before it committed them. Whoever adopts one has to see
    that it is no older than the latest committed. Objects that are no manifests are passed over.
    """
    return ready_among(store, _keys_in(store, _FOLDER), known)


def ready_among(store: Store, listed: Sequence[str], known: Collection[str]) -> list[Ready]:
    """The same, where it is known already what lies among the manifests."""
    unknown = _read(store, listed, lambda name: name not in known)
    parts = sorted(unknown, key=lambda part: (part.name, _age(part)))
    groups = (tuple(group) for _, group in groupby(parts, lambda part: (part.name, _age(part))))
    ready = [_ready(group) for group in groups if complete(group)]
    return sorted(ready, key=lambda one: (one.round, one.report))


def manifests_of(store: Store, name: str) -> list[Manifest]:
    """Everything any rank in any round wrote down for that name."""
    return _manifests_in(store, f"{_FOLDER}/{name}")


def manifests_of_all(store: Store, names: Collection[str]) -> list[Manifest]:
    """Everything any rank wrote down for these, from one listing."""
    return _manifests_in(store, _FOLDER, lambda name: name in names)


def manifest_of(store: Store, name: str, rank: int) -> Manifest | None:
    """The last that this rank wrote down for that name; those of other ranks are not read."""
    found = (one.key for one in store.list(f"{_FOLDER}/{name}"))
    parts = [read_manifest(store, key) for key in found if key.endswith(f"-{rank}.json")]
    return max(filter(None, parts), key=_age, default=None)


def newest_complete(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """The parts of the last report that is complete, by rank; empty when none is."""
    for age in sorted({_age(part) for part in manifests}, reverse=True):
        parts = tuple(part for part in manifests if _age(part) == age)
        if complete(parts):
            return tuple(sorted(parts, key=lambda part: part.rank))
    return ()


def newest(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """The parts of the last report that are there by now, by rank."""
    age = max(map(_age, manifests), default=None)
    return tuple(sorted((p for p in manifests if _age(p) == age), key=lambda part: part.rank))


def _age(part: Manifest) -> tuple[int, int]:
    return (part.round, part.report)


def _ready(parts: Sequence[Manifest]) -> Ready:
    first = min(parts, key=lambda part: part.rank)
    size_bytes = sum(part.size_bytes for part in parts)
    return Ready(
        first.name,
        first.round,
        first.report,
        first.metrics,
        first.ranks,
        size_bytes,
        first.validation,
        any(part.is_snapshot for part in parts),
        first.step,
        first.why,
        first.at,
    )


def _manifests_in(
    store: Store, folder: str, wants: Callable[[str], bool] = lambda _: True
) -> list[Manifest]:
    """Those below that folder, of the names it `wants`: no others are read."""
    return _read(store, _keys_in(store, folder), wants)


def _keys_in(store: Store, folder: str) -> list[str]:
    return [one.key for one in store.list(folder)]


def _read(store: Store, listed: Sequence[str], wants: Callable[[str], bool]) -> list[Manifest]:
    wanted = [key for key in listed if _is_manifest(key) and wants(_name_in(key))]
    parts = abreast(partial(read_manifest, store), wanted)
    return [part for part in parts if part is not None]


def _is_manifest(key: str) -> bool:
    return bool(_name_in(key)) and key.endswith(".json")


def _name_in(key: str) -> str:
    """The name of the checkpoint that this key tells of."""
    return key.removeprefix(keys.MANIFESTS).rpartition("/")[0]


def read_manifest(store: Store, key: str) -> Manifest | None:
    """The manifest under that key; None for an object that is none, or one of another key."""
    try:
        part = _manifests.decode(store.get(key))
    except (NotFoundError, msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return part if key == part.key else None
