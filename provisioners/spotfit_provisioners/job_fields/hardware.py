"""CPUs, GPUs and memory of one machine, from `resources_per_worker` and workers per machine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spotfit.core.errors import ConfigError

_KNOWN_RESOURCES = ("CPU", "GPU", "memory")
_DEFAULT_CPUS_PER_WORKER = 1.0


def count_cpus(resources_per_worker: Mapping[str, float], slots: int) -> int:
    """Return the number of CPU cores for `slots` workers, at least 1."""
    return max(1, math.ceil(resources_per_worker.get("CPU", _DEFAULT_CPUS_PER_WORKER) * slots))


def count_gpus(resources_per_worker: Mapping[str, float], slots: int) -> int:
    """Return the number of GPUs for `slots` workers."""
    return math.ceil(resources_per_worker.get("GPU", 0.0) * slots)


def required_memory_mib(
    resources_per_worker: Mapping[str, float], slots: int, *, per_cpu_gib: float
) -> int:
    """Return the memory for `slots` workers: the requested bytes, else `per_cpu_gib` per core."""
    requested_bytes = resources_per_worker.get("memory")
    if requested_bytes is None:
        return math.ceil(count_cpus(resources_per_worker, slots) * per_cpu_gib * 1024)
    return math.ceil(requested_bytes * slots / 2**20)


def check_resources(resources_per_worker: Mapping[str, float], *, backend: str) -> None:
    """Raise `ConfigError` for resources other than CPU, GPU and memory."""
    unknown = sorted(set(resources_per_worker) - set(_KNOWN_RESOURCES))
    if unknown:
        raise ConfigError(
            f"{backend} does not support the resource {', '.join(unknown)} of "
            "resources_per_worker.",
            do=f"Use only {', '.join(_KNOWN_RESOURCES)}; choose other properties of machines with "
            "the options of the backend.",
        )
