"""`report`, `get_checkpoint` and `get_context` for torchrun, which has none of them."""

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
    """As that of spotfit and Ray Train: the workload uses all three by this name."""

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
    """Store the checkpoint under its step by an atomic rename, then wait for all ranks."""
    if checkpoint is not None:
        saved = Path(os.environ[STORAGE])
        partial = saved / "partial"
        shutil.copytree(checkpoint.path, partial)
        partial.rename(saved / f"step-{metrics['step']:08d}")
    dist.barrier()


def get_checkpoint() -> Checkpoint | None:
    """Return the latest checkpoint."""
    saved = sorted(Path(os.environ[STORAGE]).glob("step-*"))
    return Checkpoint(saved[-1]) if saved else None
