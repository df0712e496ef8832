"""Three ranks for all tests of this package: their processes import torch once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.horovod.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Ranks 0 and 1 on one node, rank 2 on another."""
    processes = RankProcesses(tmp_path_factory.mktemp("ranks") / "store", local_ranks=(0, 1, 0))
    yield processes
    processes.stop()


@pytest.fixture
def alone() -> Iterator[None]:
    """This process has called `hvd.init()` without others."""
    import spotfit.horovod.torch as hvd

    hvd.init()
    yield
    hvd.shutdown()
