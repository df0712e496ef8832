"""Sizes of Google Cloud machine types, for their prices.

Prices are the sum over resources, so that the number of cores and the memory must be those of the
type. A type that is missing here has an unknown price. Sources:
https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines,
…/general-purpose-machines and …/compute-optimized-machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_TYPE = re.compile(r"([a-z0-9]+)-(standard|highmem|highcpu)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpMachineShape:
    """The resources of a machine."""

    series: str
    """How descriptions of cores and memory begin, such as 'A3 Instance'."""
    cores: int
    memory_gib: float
    gpus: int = 0
    gpu_type: str = ""
    local_ssd_gib: int = 0
    """Local SSDs that are part of the machine type."""
    is_priced_by_gpu: bool = False
    """The price of a GPU includes cores and memory."""


def _a2(name: str, gpus: int, cores: int, memory_gib: int) -> GcpMachineShape:
    is_ultra = name == "ultragpu"
    return GcpMachineShape(
        series="A2 Instance",
        cores=cores,
        memory_gib=memory_gib,
        gpus=gpus,
        gpu_type="nvidia-a100-80gb" if is_ultra else "nvidia-tesla-a100",
        local_ssd_gib=375 * gpus if is_ultra else 0,
    )


def _a3(gpus: int) -> GcpMachineShape:
    return GcpMachineShape(
        series="A3 Instance",
        cores=26 * gpus,
        memory_gib=234 * gpus,
        gpus=gpus,
        gpu_type="nvidia-h100-80gb",
        local_ssd_gib=750 * gpus,
    )


def _g2(cores: int, gpus: int) -> GcpMachineShape:
    return GcpMachineShape(
        series="G2 Instance", cores=cores, memory_gib=4 * cores, gpus=gpus, gpu_type="nvidia-l4"
    )


_GPU_TYPES: Mapping[str, GcpMachineShape] = {
    **{f"a2-highgpu-{n}g": _a2("highgpu", n, 12 * n, 85 * n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": _a2("megagpu", 16, 96, 1360),
    **{f"a2-ultragpu-{n}g": _a2("ultragpu", n, 12 * n, 170 * n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": _a3(n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": replace(_a3(8), series="A3Plus Instance", gpu_type="nvidia-h100-mega-80gb"),
    "a4-highgpu-8g": GcpMachineShape(
        series="A4 Instance",
        cores=224,
        memory_gib=3968,
        gpus=8,
        gpu_type="nvidia-b200",
        is_priced_by_gpu=True,
    ),
    **{
        f"g2-standard-{cores}": _g2(cores, gpus)
        for cores, gpus in {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}.items()
    },
}

_SERIES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "n1": ("N1 Predefined Instance", {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}),
    "n2": ("N2 Instance", {"standard": 4, "highmem": 8, "highcpu": 1}),
    "n2d": ("N2D AMD Instance", {"standard": 4, "highmem": 8, "highcpu": 1}),
    "e2": ("E2 Instance", {"standard": 4, "highmem": 8, "highcpu": 1}),
    "t2d": ("T2D AMD Instance", {"standard": 4}),
    "c2": ("Compute optimized( Instance)?", {"standard": 4}),
    "c2d": ("C2D AMD Instance", {"standard": 4, "highmem": 8, "highcpu": 2}),
    "c3": ("C3 Instance", {"standard": 4, "highmem": 8, "highcpu": 2}),
}
"""Beginning of descriptions, and GiB per core by kind."""

# n2-highmem-128 has 864 GiB: https://docs.cloud.google.com/compute/docs/general-purpose-machines
_EXCEPTIONS: Mapping[str, float] = {"n2-highmem-128": 864}


def find_shape(machine_type: str, accelerator: str, gpus: int) -> GcpMachineShape | None:
    """Return the resources of the type with `gpus` attached accelerators; None if not known.

    Only N1 machines have attached accelerators. Types with built-in ones keep theirs.
    """
    built_in = _GPU_TYPES.get(machine_type)
    if built_in is not None:
        # Batch would refuse the job, or add what is not known here.
        return built_in if not accelerator or accelerator == built_in.gpu_type else None
    match = _TYPE.fullmatch(machine_type)
    series, per_core = _SERIES.get(match[1], ("", {})) if match else ("", {})
    if match is None or match[2] not in per_core:
        return None
    cores = int(match[3])
    memory_gib = _EXCEPTIONS.get(machine_type, per_core[match[2]] * cores)
    if not accelerator or not gpus:
        return GcpMachineShape(series=series, cores=cores, memory_gib=memory_gib)
    if match[1] != "n1":
        return None
    return GcpMachineShape(
        series=series, cores=cores, memory_gib=memory_gib, gpus=gpus, gpu_type=accelerator
    )
