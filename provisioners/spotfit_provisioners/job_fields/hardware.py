"""CPUs, GPUs and memory of one machine, from `resources_per_worker` and workers per machine.

Workers that request only GPUs, as Ray's usual `ScalingConfig(use_gpu=True)` does, get the CPUs and
the memory that belong to their GPUs (`GpuShare`). One CPU core with its memory, the size of a CPU
worker, is less than a process with CUDA needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from spotfit.core.errors import ConfigError
from spotfit.core.units import format_count

_KNOWN_RESOURCES = ("CPU", "GPU", "memory")
_DEFAULT_CPUS_PER_WORKER = 1.0

# Host memory that a process has allocated after its first CUDA call: 1873 MiB with one convolution
# (https://github.com/pytorch/pytorch/issues/12873), 2271 MiB with NCCL, 1204 of them by the call
# (https://github.com/pytorch/pytorch/issues/106511).
_MIN_GPU_WORKER_MIB = 2304
# The agent, its fork server with torch, and the uploader.
_MIN_AGENT_MIB = 512


class GpuShare(NamedTuple):
    """The CPU cores and the memory that a machine has for each of its GPUs."""

    cpus: float
    memory_gib: float


DEFAULT_GPU_SHARE = GpuShare(cpus=4, memory_gib=14)
"""Fits the smallest machines with a GPU, 4 vCPUs and 16 GiB: g4dn.xlarge, g5.xlarge and g6.xlarge
(https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html), g2-standard-4
(https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines). An eighth of the memory
is left to the operating system."""
KUBERNETES_GPU_SHARE = GpuShare(cpus=3, memory_gib=10)
"""Fits the same machines as nodes of Kubernetes, whose daemons and system pods reserve a part: of 4
CPUs and 16 GiB about 0.1 CPUs and 2.7 GiB on GKE
(https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes)."""


def count_cpus(
    resources_per_worker: Mapping[str, float], slots: int, *, share: GpuShare = DEFAULT_GPU_SHARE
) -> int:
    """Return the number of CPU cores for `slots` workers, at least 1.

    `share` applies to workers that request GPUs and no CPUs.
    """
    if "CPU" in resources_per_worker:
        return max(1, math.ceil(resources_per_worker["CPU"] * slots))
    gpus = count_gpus(resources_per_worker, slots)
    return max(math.ceil(_DEFAULT_CPUS_PER_WORKER * slots), math.floor(share.cpus * gpus))


def count_gpus(resources_per_worker: Mapping[str, float], slots: int) -> int:
    """Return the number of GPUs for `slots` workers."""
    return math.ceil(resources_per_worker.get("GPU", 0.0) * slots)


def required_memory_mib(
    resources_per_worker: Mapping[str, float],
    slots: int,
    *,
    per_cpu_gib: float,
    share: GpuShare = DEFAULT_GPU_SHARE,
) -> int:
    """Return the memory for `slots` workers: the requested bytes, else `per_cpu_gib` per core.

    Workers with GPUs get at least the memory of `share` unless they request memory.
    """
    requested_bytes = resources_per_worker.get("memory")
    if requested_bytes is not None:
        return math.ceil(requested_bytes * slots / 2**20)
    cpus = count_cpus(resources_per_worker, slots, share=share)
    gpus = count_gpus(resources_per_worker, slots)
    return max(math.ceil(cpus * per_cpu_gib * 1024), math.floor(gpus * share.memory_gib * 1024))


def check_memory_limit(
    resources_per_worker: Mapping[str, float],
    slots: int,
    *,
    limit_mib: int,
    shared_memory_mib: int = 0,
    backend: str,
) -> None:
    """Raise `ConfigError` if the backend would kill a machine with this memory limit.

    That is certain for a limit below the memory that CUDA allocates in each worker's process.
    `shared_memory_mib` is the size of /dev/shm, whose pages count towards the limit.
    """
    needed_mib = _MIN_AGENT_MIB + slots * _MIN_GPU_WORKER_MIB
    if count_gpus(resources_per_worker, slots) and limit_mib < needed_mib:
        workers = format_count(slots, "GPU worker")
        per_worker_gib = math.ceil(needed_mib / slots / 1024)
        raise ConfigError(
            f"{backend} would kill a machine with {workers} at its memory limit of {limit_mib} "
            f"MiB: it needs at least {needed_mib} MiB, {_MIN_AGENT_MIB} for the agent and "
            f"{_MIN_GPU_WORKER_MIB} for the first CUDA call of each worker.",
            do=f'Set "memory" in resources_per_worker to at least {per_worker_gib} * 2**30 bytes '
            'plus the memory of your data, or remove "memory" to get the machine\'s share.',
        )
    if shared_memory_mib > limit_mib:
        raise ConfigError(
            f"{backend} would kill a machine that fills /dev/shm: its size of {shared_memory_mib} "
            f"MiB exceeds the memory limit of {limit_mib} MiB, to which it counts.",
            do='Reduce shared_memory_mib, or increase "memory" in resources_per_worker.',
        )


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
