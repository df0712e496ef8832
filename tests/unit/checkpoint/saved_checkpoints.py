"""Helpers that save checkpoints of user files with the production code."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from spotfit.checkpoint.manifest import Manifest, ready_checkpoints
from spotfit.checkpoint.writer import save_directory
from spotfit.ledger import keys
from spotfit.model.leader_state import ReadyCheckpoint
from spotfit.store.api import Store


def make_manifest(
    name: str = "ck",
    *,
    round_number: int = 1,
    report: int = 0,
    rank: int = 0,
    ranks: tuple[int, ...] = (0,),
) -> Manifest:
    return Manifest(
        name=name,
        round=round_number,
        report_index=report,
        rank=rank,
        ranks=ranks,
        metrics={"loss": 0.5},
        files=(),
    )


def make_directory(where: Path, **files: str) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (where / name).write_text(text)
    return where


def save_checkpoint(store: Store, where: Path, manifest: Manifest, **files: str) -> Manifest:
    return save_directory(store, make_directory(where, **files), manifest)


def ready_in_store(store: Store, known_names: Collection[str] = ()) -> list[ReadyCheckpoint]:
    """Return the complete checkpoints in the store that are not in `known_names`."""
    listed = [info.key for info in store.list(keys.MANIFESTS.rstrip("/"))]
    return ready_checkpoints(store, listed, known_names)
