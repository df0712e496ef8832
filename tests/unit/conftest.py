"""Fixtures of several packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.host import log


@pytest.fixture(autouse=True, scope="session")
def _default_log_handler() -> None:
    """Log to standard error, as the processes of spotfit do, so that tests can read it."""
    log.use_default_handler()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A torch.distributed process group with this process as its only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
