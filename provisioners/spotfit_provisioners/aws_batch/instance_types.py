"""Sizes of EC2 instance types with NVIDIA GPUs.

A plan must not depend on an answer of EC2 (decision 0050), hence a table. Types that are missing
here get the default share of `job_fields.hardware`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from spotfit.core.errors import ConfigError
from spotfit_provisioners.job_fields.hardware import DEFAULT_GPU_SHARE, GpuShare

# ECS registers less memory than an instance has: 7985 of the 8192 MiB of an m4.large, less what
# ECS_RESERVED_MEMORY keeps for the host, 5 % by AWS's recommendation. A job that requests more is
# never started: https://docs.aws.amazon.com/batch/latest/userguide/memory-management.html
_REGISTERED_SHARE = 7 / 8


class GpuInstance(NamedTuple):
    """The size of an instance type."""

    gpus: int
    vcpus: int
    memory_gib: float


# https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html
GPU_INSTANCES: Mapping[str, GpuInstance] = {
    "g4dn.xlarge": GpuInstance(1, 4, 16),
    "g4dn.2xlarge": GpuInstance(1, 8, 32),
    "g4dn.4xlarge": GpuInstance(1, 16, 64),
    "g4dn.8xlarge": GpuInstance(1, 32, 128),
    "g4dn.16xlarge": GpuInstance(1, 64, 256),
    "g4dn.12xlarge": GpuInstance(4, 48, 192),
    "g4dn.metal": GpuInstance(8, 96, 384),
    "g5.xlarge": GpuInstance(1, 4, 16),
    "g5.2xlarge": GpuInstance(1, 8, 32),
    "g5.4xlarge": GpuInstance(1, 16, 64),
    "g5.8xlarge": GpuInstance(1, 32, 128),
    "g5.16xlarge": GpuInstance(1, 64, 256),
    "g5.12xlarge": GpuInstance(4, 48, 192),
    "g5.24xlarge": GpuInstance(4, 96, 384),
    "g5.48xlarge": GpuInstance(8, 192, 768),
    "g6.xlarge": GpuInstance(1, 4, 16),
    "g6.2xlarge": GpuInstance(1, 8, 32),
    "g6.4xlarge": GpuInstance(1, 16, 64),
    "g6.8xlarge": GpuInstance(1, 32, 128),
    "g6.16xlarge": GpuInstance(1, 64, 256),
    "g6.12xlarge": GpuInstance(4, 48, 192),
    "g6.24xlarge": GpuInstance(4, 96, 384),
    "g6.48xlarge": GpuInstance(8, 192, 768),
    "gr6.4xlarge": GpuInstance(1, 16, 128),
    "gr6.8xlarge": GpuInstance(1, 32, 256),
    "g6e.xlarge": GpuInstance(1, 4, 32),
    "g6e.2xlarge": GpuInstance(1, 8, 64),
    "g6e.4xlarge": GpuInstance(1, 16, 128),
    "g6e.8xlarge": GpuInstance(1, 32, 256),
    "g6e.16xlarge": GpuInstance(1, 64, 512),
    "g6e.12xlarge": GpuInstance(4, 48, 384),
    "g6e.24xlarge": GpuInstance(4, 96, 768),
    "g6e.48xlarge": GpuInstance(8, 192, 1536),
    "g7e.2xlarge": GpuInstance(1, 8, 64),
    "g7e.4xlarge": GpuInstance(1, 16, 128),
    "g7e.8xlarge": GpuInstance(1, 32, 256),
    "g7e.12xlarge": GpuInstance(2, 48, 512),
    "g7e.24xlarge": GpuInstance(4, 96, 1024),
    "g7e.48xlarge": GpuInstance(8, 192, 2048),
    "p3.2xlarge": GpuInstance(1, 8, 61),
    "p3.8xlarge": GpuInstance(4, 32, 244),
    "p3.16xlarge": GpuInstance(8, 64, 488),
    "p3dn.24xlarge": GpuInstance(8, 96, 768),
    "p4d.24xlarge": GpuInstance(8, 96, 1152),
    "p4de.24xlarge": GpuInstance(8, 96, 1152),
    "p5.4xlarge": GpuInstance(1, 16, 256),
    "p5.48xlarge": GpuInstance(8, 192, 2048),
    "p5e.48xlarge": GpuInstance(8, 192, 2048),
    "p5en.48xlarge": GpuInstance(8, 192, 2048),
    "p6-b200.48xlarge": GpuInstance(8, 192, 2048),
    "p6-b300.48xlarge": GpuInstance(8, 192, 4096),
}


def gpu_share(instance_types: Collection[str], gpus: int) -> GpuShare:
    """Return the vCPUs and the memory per GPU that a job with `gpus` GPUs may request.

    It is the smallest share of the known instance types, so that a job fits all of them; the
    default share if none is known. Raises `ConfigError` if all types are known and none of them has
    `gpus` GPUs: the job would never be started.
    """
    known = [GPU_INSTANCES[name] for name in instance_types if name in GPU_INSTANCES]
    fitting = [instance for instance in known if instance.gpus >= gpus]
    if known and not fitting and len(known) == len(instance_types):
        most = max(instance.gpus for instance in known)
        raise ConfigError(
            f"The workers of a machine need {gpus} GPUs, but the instance types of AwsBatchOptions "
            f"({', '.join(instance_types)}) have at most {most}.",
            do=f"Reduce workers_per_node to at most {most} GPUs per machine, or set instance_types "
            "to larger ones of the compute environments.",
        )
    if not fitting:
        return DEFAULT_GPU_SHARE
    return GpuShare(
        cpus=min(instance.vcpus / instance.gpus for instance in fitting),
        memory_gib=min(
            _REGISTERED_SHARE * instance.memory_gib / instance.gpus for instance in fitting
        ),
    )
