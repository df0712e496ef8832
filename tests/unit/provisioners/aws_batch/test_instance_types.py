"""Shares of EC2 instances per GPU."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.aws_batch.instance_types import GPU_INSTANCES, gpu_share
from spotfit_provisioners.job_fields.hardware import DEFAULT_GPU_SHARE, GpuShare


def test_share_fits_the_smallest_of_the_instance_types() -> None:
    share = gpu_share(("g5.12xlarge", "g5.xlarge", "p4d.24xlarge"), 1)
    assert share == GpuShare(4, 14)
    # A machine with 4 GPUs does not run on a g5.xlarge.
    assert gpu_share(("g5.12xlarge", "g5.xlarge", "p4d.24xlarge"), 4) == GpuShare(12, 42)


def test_unknown_instance_types_get_the_default_share() -> None:
    assert gpu_share((), 8) == DEFAULT_GPU_SHARE
    assert gpu_share(("g99.xlarge",), 8) == DEFAULT_GPU_SHARE
    # The unknown type may have enough GPUs.
    assert gpu_share(("g99.xlarge", "g5.xlarge"), 8) == DEFAULT_GPU_SHARE


def test_instance_types_with_too_few_gpus_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"need 2 GPUs, .* \(g5.xlarge\) have at most 1"):
        gpu_share(("g5.xlarge",), 2)


@pytest.mark.parametrize("name", GPU_INSTANCES)
def test_default_share_fits_every_instance_type(name: str) -> None:
    """A job without `instance_types` must not wait for an instance that does not exist."""
    share = gpu_share((name,), 1)
    assert share.cpus >= DEFAULT_GPU_SHARE.cpus
    assert share.memory_gib >= DEFAULT_GPU_SHARE.memory_gib


@pytest.mark.parametrize("name", GPU_INSTANCES)
def test_vcpus_follow_from_the_size_in_the_name(name: str) -> None:
    size = name.partition(".")[2]
    if size not in ("xlarge", "metal"):
        assert GPU_INSTANCES[name].vcpus == 4 * int(size.removesuffix("xlarge"))
