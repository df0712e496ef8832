"""Checkpoints to test with: saved by the code that saves real ones."""

from __future__ import annotations

from pathlib import Path

from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.save import save
from spotfit.store.api import Store


def part(
    name: str = "ck",
    *,
    round_number: int = 1,
    report: int = 0,
    rank: int = 0,
    ranks: tuple[int, ...] = (0,),
) -> Manifest:
    return Manifest(name, round_number, report, rank, ranks, {"loss": 0.5}, ())


def directory(where: Path, **files: str) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (where / name).write_text(text)
    return where


def saved(store: Store, where: Path, manifest: Manifest, **files: str) -> Manifest:
    return save(store, directory(where, **files), manifest)
