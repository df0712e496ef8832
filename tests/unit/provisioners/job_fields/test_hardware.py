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
