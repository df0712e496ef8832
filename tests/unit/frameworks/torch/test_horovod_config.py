"""HorovodConfig: the options of the process group, and fields without effect."""

from __future__ import annotations

import pytest

import spotfit
from spotfit.frameworks.torch.horovod_config import HorovodConfig


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [
        (spotfit.ScalingConfig(num_workers=2), "gloo"),
        (spotfit.ScalingConfig(num_workers=2, use_gpu=True), "cpu:gloo,cuda:nccl"),
        (
            spotfit.ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5}),
            "gloo",
        ),
    ],
)
def test_tensors_of_cpus_and_gpus_can_be_reduced(
    scaling: spotfit.ScalingConfig, backend: str
) -> None:
    name, options = HorovodConfig().framework_options(scaling)
    assert name == "torch"
    assert options["backend"] == backend
    assert options["form_group"]


def test_fields_about_ssh_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = HorovodConfig(nics={"eth0"}, ssh_port=22, timeout_s=30)
    config.framework_options(spotfit.ScalingConfig(num_workers=2))
    [record] = caplog.records
    assert record.getMessage() == "horovod.unused_options"
    assert "HorovodConfig(nics, ssh_port, timeout_s) has no effect" in record.__dict__["text"]


def test_defaults_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    HorovodConfig().framework_options(spotfit.ScalingConfig(num_workers=2))
    assert not caplog.records


def test_a_misspelled_field_is_rejected() -> None:
    with pytest.raises(TypeError, match="ssh_port"):
        HorovodConfig(ssh_prt=22)  # type: ignore[call-arg]  # the mistake
