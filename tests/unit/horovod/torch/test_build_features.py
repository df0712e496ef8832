"""What the build has."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError


def test_the_build_has_what_torch_has() -> None:
    assert hvd.gloo_built() == hvd.gloo_enabled() == dist.is_gloo_available()
    assert bool(hvd.nccl_built()) == dist.is_nccl_available()
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
    assert not hvd.mpi_threads_supported()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()


def test_a_timeline_is_rejected_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match=r"torch.profiler"):
        hvd.start_timeline("timeline.json")
    hvd.stop_timeline()
