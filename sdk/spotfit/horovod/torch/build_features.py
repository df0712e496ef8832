"""What the build has: libraries of Horovod that torch has, too, and those that it lacks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spotfit.core.errors import ConfigError


def mpi_built() -> bool:
    """Return False: there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """Return False: there is no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI."""
    return False


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return the version of torch's NCCL as one number, such as 22105 for 2.21.5; 0 without it."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether torch is built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built with ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise `ConfigError`: there is no timeline of Horovod's operations."""
    raise ConfigError(
        f"hvd.start_timeline({file_path!r}) is not supported: the collectives are torch's.",
        do="Use torch.profiler, which records collectives, too.",
    )


def stop_timeline() -> None:
    """Do nothing: no timeline can be started."""
