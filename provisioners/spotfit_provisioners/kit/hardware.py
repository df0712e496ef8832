"""What a machine must have so that its workers have what they asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spotfit.core.errors import ConfigError

_KNOWN = ("CPU", "GPU", "memory")
_CPU_IF_NOBODY_SAYS = 1.0
_GIB = 2**30


def cpus(resources_per_worker: Mapping[str, float], slots: int) -> int:
    """Whole cores for that many workers."""
    return max(1, math.ceil(resources_per_worker.get("CPU", _CPU_IF_NOBODY_SAYS) * slots))


def gpus(resources_per_worker: Mapping[str, float], slots: int) -> int:
    """Whole accelerators for that many workers."""
    return math.ceil(resources_per_worker.get("GPU", 0.0) * slots)


def memory_mib(resources_per_worker: Mapping[str, float], slots: int, *, per_cpu_gib: float) -> int:
    """Main memory: what was asked for in bytes, else so much for each core."""
    asked = resources_per_worker.get("memory")
    if asked is None:
        return math.ceil(cpus(resources_per_worker, slots) * per_cpu_gib * 1024)
    return math.ceil(asked * slots / 2**20)


def check(resources_per_worker: Mapping[str, float], *, backend: str) -> None:
    """Raises `ConfigError` for a resource that the backend cannot give."""
    strange = sorted(set(resources_per_worker) - set(_KNOWN))
    if strange:
        raise ConfigError(
            f"{backend} knows nothing of the resource {', '.join(strange)}.",
            do=f"resources_per_worker may name {', '.join(_KNOWN)}; what else a machine has is "
            "chosen by the backend's own options.",
        )
