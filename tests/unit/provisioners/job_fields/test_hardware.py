"""Resources of a machine for the requests of its workers."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.job_fields import hardware


def test_machine_resources_cover_all_workers() -> None:
    requests = {"CPU": 1.5, "GPU": 0.5, "memory": 3 * 2**30}
    assert hardware.count_cpus(requests, 4) == 6
    assert hardware.count_gpus(requests, 4) == 2
    assert hardware.required_memory_mib(requests, 2, per_cpu_gib=1.0) == 6 * 1024


def test_default_request_is_one_core_with_its_memory() -> None:
    assert (hardware.count_cpus({}, 4), hardware.count_gpus({}, 4)) == (4, 0)
    assert hardware.required_memory_mib({}, 4, per_cpu_gib=2.0) == 8 * 1024


def test_unknown_resource_is_rejected_with_the_known_ones() -> None:
    hardware.check_resources({"CPU": 1.0}, backend="x")
    with pytest.raises(ConfigError, match="does not support the resource TPU") as error_info:
        hardware.check_resources({"TPU": 1.0}, backend="x")
    assert "CPU, GPU, memory" in error_info.value.do


def test_gpu_workers_without_cpus_and_memory_get_the_share_of_their_gpus() -> None:
    assert hardware.count_cpus({"GPU": 1.0}, 2) == 8
    assert hardware.required_memory_mib({"GPU": 1.0}, 2, per_cpu_gib=1.75) == 2 * 14 * 1024
    share = hardware.GpuShare(cpus=12, memory_gib=126)
    assert hardware.count_cpus({"GPU": 1.0}, 8, share=share) == 96
    assert hardware.required_memory_mib({"GPU": 1.0}, 8, per_cpu_gib=1.75, share=share) == 1008 * (
        1024
    )


def test_each_worker_on_a_shared_gpu_has_a_cpu() -> None:
    assert hardware.count_cpus({"GPU": 0.1}, 8) == 8
    assert hardware.count_cpus({"GPU": 0.5}, 4) == 8


def test_requested_cpus_and_memory_replace_the_share() -> None:
    assert hardware.count_cpus({"GPU": 1.0, "CPU": 2.0}, 2) == 4
    # CPUs alone do not reduce the memory.
    assert hardware.required_memory_mib({"GPU": 1.0, "CPU": 2.0}, 1, per_cpu_gib=1.75) == 14 * 1024
    assert hardware.required_memory_mib({"GPU": 1.0, "CPU": 16.0}, 1, per_cpu_gib=1.75) == 28 * 1024
    requested = {"GPU": 1.0, "memory": 6 * 2**30}
    assert hardware.required_memory_mib(requested, 2, per_cpu_gib=1.75) == 12 * 1024


def test_limit_below_the_memory_of_cuda_is_rejected_with_the_numbers() -> None:
    def check(limit_mib: int, slots: int = 1, shared_memory_mib: int = 0) -> None:
        hardware.check_memory_limit(
            {"GPU": 1.0},
            slots,
            limit_mib=limit_mib,
            shared_memory_mib=shared_memory_mib,
            backend="x",
        )

    check(2816)
    with pytest.raises(ConfigError, match="limit of 2815 MiB: it needs at least 2816 MiB"):
        check(2815)
    with pytest.raises(ConfigError, match="8 GPU workers at its memory limit of 14336 MiB") as info:
        check(14 * 1024, slots=8)
    assert "at least 3 * 2**30 bytes" in info.value.do
    with pytest.raises(ConfigError, match="size of 8192 MiB exceeds the memory limit of 4096 MiB"):
        check(4096, shared_memory_mib=8192)


def test_small_limit_of_cpu_workers_is_accepted() -> None:
    hardware.check_memory_limit({"CPU": 1.0}, 1, limit_mib=1792, backend="x")
