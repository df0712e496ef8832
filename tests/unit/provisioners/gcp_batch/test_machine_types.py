"""Resources of Google Cloud machine types."""

from __future__ import annotations

import pytest

from spotfit_provisioners.gcp_batch.machine_types import find_shape


@pytest.mark.parametrize(
    ("machine_type", "cores", "memory_gib", "gpus", "ssd_gib"),
    [
        ("n1-standard-1", 1, 3.75, 0, 0),
        ("n1-highmem-96", 96, 624, 0, 0),
        ("n2-highmem-128", 128, 864, 0, 0),
        ("e2-highcpu-8", 8, 8, 0, 0),
        ("c3-highcpu-22", 22, 44, 0, 0),
        ("g2-standard-48", 48, 192, 4, 0),
        ("a2-highgpu-8g", 96, 680, 8, 0),
        ("a2-ultragpu-1g", 12, 170, 1, 375),
        ("a3-highgpu-1g", 26, 234, 1, 750),
        ("a3-megagpu-8g", 208, 1872, 8, 6000),
        ("a4-highgpu-8g", 224, 3968, 8, 0),
    ],
)
def test_resources_of_a_known_type(
    machine_type: str, cores: int, memory_gib: float, gpus: int, ssd_gib: int
) -> None:
    shape = find_shape(machine_type, "", 0)
    assert shape is not None
    assert (shape.cores, shape.memory_gib) == (cores, memory_gib)
    assert (shape.gpus, shape.local_ssd_gib) == (gpus, ssd_gib)


@pytest.mark.parametrize(
    ("machine_type", "accelerator", "gpus"),
    [
        ("", "", 0),
        ("e2-medium", "", 0),
        ("a3-ultragpu-8g", "", 0),
        ("c3-standard-4-lssd", "", 0),
        ("custom-8-16384", "", 0),
        ("n1-ultramem-8", "", 0),
        ("n2-standard-8", "nvidia-tesla-t4", 1),
        ("g2-standard-8", "nvidia-tesla-t4", 1),
    ],
)
def test_other_types_are_unknown(machine_type: str, accelerator: str, gpus: int) -> None:
    assert find_shape(machine_type, accelerator, gpus) is None


def test_accelerators_are_attached_to_n1_and_not_added_to_built_in_ones() -> None:
    attached = find_shape("n1-standard-8", "nvidia-tesla-v100", 2)
    assert attached is not None
    assert (attached.gpus, attached.gpu_type) == (2, "nvidia-tesla-v100")
    assert find_shape("g2-standard-8", "nvidia-l4", 1) == find_shape("g2-standard-8", "", 0)
    # Workers without GPUs get none.
    assert find_shape("n1-standard-8", "nvidia-tesla-v100", 0) == find_shape("n1-standard-8", "", 0)
