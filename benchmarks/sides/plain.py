"""`report`, `get_checkpoint` and `get_context` for torchrun, which leaves all three to its user."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

STORAGE = "BENCH_STORAGE"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path

    @classmethod
    def from_directory(cls, path: str) -> "Checkpoint":
        return cls(Path(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield str(self.path)


class Context:
    def get_world_rank(self) -> int:
        return int(os.environ["RANK"])

    def get_world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def get_node_rank(self) -> int:
        return int(os.environ["GROUP_RANK"])


def get_context() -> Context:
    return Context()


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Keep the checkpoint under the name of its step, whole or not at all; wait for every rank."""
    if checkpoint is not None:
        kept = Path(os.environ[STORAGE])
        half = kept / "half"
        shutil.copytree(checkpoint.path, half)
        half.rename(kept / f"step-{metrics['step']:08d}")
    dist.barrier()


def get_checkpoint() -> Checkpoint | None:
    """The latest that was kept."""
    kept = sorted(Path(os.environ[STORAGE]).glob("step-*"))
    return Checkpoint(kept[-1]) if kept else None
