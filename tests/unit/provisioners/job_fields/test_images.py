"""Image names with versions."""

from importlib import metadata

import pytest

from spotfit.code.version_check import predict_mismatches
from spotfit.core.errors import ConfigError
from spotfit.host.machine import python_version
from spotfit.model.group import UNKNOWN_SOFTWARE, Software
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.aws_batch.provisioner import AwsBatchProvisioner
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.kubernetes.provisioner import KubernetesProvisioner

MINOR = python_version().rpartition(".")[0]


def test_placeholders_are_replaced_by_the_callers_versions() -> None:
    torch = pytest.importorskip("torch").__version__.partition("+")[0]
    chosen = images.resolve_image("registry:5000/spotfit:{spotfit}-py{python}-torch{torch}-cpu")
    local_version = metadata.version("spotfit")
    assert chosen == f"registry:5000/spotfit:{local_version}-py{MINOR}-torch{torch}-cpu"


def test_image_without_placeholders_is_unchanged() -> None:
    assert images.resolve_image("registry/image:7") == "registry/image:7"
    assert images.resolve_image("") == ""


def test_placeholder_of_a_missing_package_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no-such-package, which is not installed"):
        images.resolve_image("registry/image:{no-such-package}")


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (
            "registry:5000/spotfit:0.1.0-py3.12-torch2.13.0-cpu",
            Software(python="3.12", packages={"spotfit": "0.1.0", "torch": "2.13.0"}),
        ),
        (
            "registry/image:py3.11-scikit_learn1.9",
            Software(python="3.11", packages={"scikit-learn": "1.9"}),
        ),
        (
            "registry/spotfit:0.1.0-py3.12@sha256:00",
            Software(python="3.12", packages={"spotfit": "0.1.0"}),
        ),
        ("registry:5000/image", UNKNOWN_SOFTWARE),
        ("registry/image:latest", UNKNOWN_SOFTWARE),
        ("registry/image@sha256:00", UNKNOWN_SOFTWARE),
        ("", UNKNOWN_SOFTWARE),
    ],
)
def test_versions_are_parsed_from_the_tag(image: str, expected: Software) -> None:
    assert images.parse_image_software(image) == expected


CLOUDS = [AwsBatchProvisioner, AzureBatchProvisioner, GcpBatchProvisioner, KubernetesProvisioner]


@pytest.mark.parametrize("kind", CLOUDS, ids=lambda kind: kind.name)
def test_image_for_another_python_is_rejected_before_submission(kind: type) -> None:
    wrong = kind.with_options(image="registry/spotfit:0.1.0-py3.9-cpu")  # type: ignore[attr-defined]
    (mismatch,) = predict_mismatches(wrong.traits.software)
    assert "the machines run cpython 3.9" in mismatch.message
    provisioner = kind.with_options(image="registry/spotfit:{spotfit}-py{python}-torch{torch}-cpu")  # type: ignore[attr-defined]
    assert predict_mismatches(provisioner.traits.software) == []


def test_options_contain_the_resolved_image() -> None:
    assert (
        AwsBatchOptions(image="registry/spotfit:py{python}").image == f"registry/spotfit:py{MINOR}"
    )


@pytest.mark.parametrize("suffix", ["", "-b2", "@sha256:00"])
def test_kind_of_a_baked_image_is_recognized(suffix: str) -> None:
    cuda = f"registry:5000/spotfit-cpu:0.1.0-py3.12-torch2.13.0-cuda{suffix}"
    assert images.is_cuda_image(cuda)
    assert not images.is_cpu_image(cuda)
    assert images.is_cpu_image(cuda.replace("-cuda", "-cpu"))
    assert images.parse_image_software(cuda).packages["torch"] == "2.13.0"
    assert not images.is_cuda_image("registry/cuda")
