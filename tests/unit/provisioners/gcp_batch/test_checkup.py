"""Checks of a Google Cloud project, against a simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.provision.api import AccountCheck
from spotfit_localsim.clouds.gcp_batch import (
    AGENT_SERVICE_ACCOUNT,
    PROJECT,
    PROJECT_NUMBER,
    REGION,
    GcpBatchCloud,
)
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.gcp_batch import checkup
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch import provisioner as verbs
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner

pytest.importorskip("google.cloud.batch_v1")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

IMAGE = f"sim-docker.pkg.dev/{PROJECT}/spotfit/worker"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="gcp_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._batch_service, calls._rest_session, verbs._client_for_region):
        cache.cache_clear()


def run_checks(sim: Simulator, **options: Any) -> dict[str, AccountCheck]:
    access = GcpBatchCloud.client_access(sim.server.url)
    result = {"image": f"{IMAGE}:sim", "machine_type": "g2-standard-8", **options}
    provisioner = GcpBatchProvisioner.with_options(**{**access.options, **result})
    return {one.name: one for one in provisioner.check_account("gs://bucket/runs")}


def failed_checks(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


def test_sound_project_passes_all_checks(sim: Simulator) -> None:
    findings = run_checks(sim, accelerator="nvidia-l4", service_account="")
    assert not failed_checks(findings)
    # The name of the image does not tell its version of CUDA.
    assert [what for what, one in findings.items() if not one.conclusive] == [
        "the GPUs can run the image"
    ]
    assert findings["Google Cloud credentials are valid"].detail == f"project {PROJECT}"
    assert findings["the machine type is available"].detail == f"{REGION}-a"
    assert (
        f"{PROJECT_NUMBER}-compute@" in findings["the agents' service account can be used"].detail
    )


def test_all_failed_checks_are_reported_together(sim: Simulator) -> None:
    sim.faults.deny_permissions(
        ["batch.jobs.create", "batch.jobs.delete", checkup.ACT_AS_PERMISSION]
    )
    result = failed_checks(run_checks(sim, image=f"{IMAGE}:other", zones=(f"{REGION}-c",)))
    assert result == {
        "the machine type is available": (
            f"GcpBatchOptions(zones=…): the region {REGION} has no zone {REGION}-c."
        ),
        "the caller may rent machines": (
            "The account of your Google credentials lacks permissions in the project spotfit-sim: "
            "batch.jobs.create, "
            "batch.jobs.delete."
        ),
        "the agents' service account can be used": (
            "The account of your Google credentials lacks permissions in the project spotfit-sim: "
            f"{checkup.ACT_AS_PERMISSION} on {AGENT_SERVICE_ACCOUNT}."
        ),
        "the image exists": (
            f"GcpBatchOptions(image={IMAGE + ':other'!r}): the registry does not contain this "
            "image."
        ),
    }


@pytest.mark.parametrize(
    ("options", "what", "expected"),
    [
        (
            {"machine_type": "a9"},
            "the machine type is available",
            f"no allowed zone of {REGION} has them; a9 is missing in {REGION}-",
        ),
        (
            {"zones": (f"{REGION}-b",)},
            "the machine type is available",
            f"no allowed zone of {REGION} has them; g2-standard-8 is missing in {REGION}-b.",
        ),
        (
            {"service_account": "missing@x.iam.gserviceaccount.com"},
            "the agents' service account can be used",
            "The service account missing@x",
        ),
    ],
)
def test_missing_resources_are_named(
    sim: Simulator, options: dict[str, Any], what: str, expected: str
) -> None:
    [(only, found)] = failed_checks(run_checks(sim, **options)).items()
    assert only == what
    assert expected in found


def test_unknown_region_is_named(sim: Simulator) -> None:
    result = failed_checks(run_checks(sim, region="mars-east1"))
    assert "region='mars-east1') is not a location" in result["Batch is available in mars-east1"]
    assert result["the machine type is available"] == (
        "GcpBatchOptions(region='mars-east1'): the region does not exist."
    )


def test_denied_queries_are_inconclusive(sim: Simulator) -> None:
    sim.faults.deny_permissions(
        [
            "compute.regions.get",
            "resourcemanager.projects.getIamPolicy",
            "artifactregistry.tags.get",
        ]
    )
    findings = run_checks(sim)
    assert not failed_checks(findings)
    assert {what for what, one in findings.items() if not one.conclusive} == {
        "the machine type is available",
        "agents have the required roles",
        "the image exists",
        "the quota allows a machine",
        "the GPUs can run the image",
    }
    assert not run_checks(sim, image="docker.io/spotfit:1")["the image exists"].conclusive


def test_missing_direct_roles_of_agents_are_inconclusive(sim: Simulator) -> None:
    sim.cloud.roles = {"roles/batch.jobsEditor"}  # type: ignore[attr-defined]
    finding = run_checks(sim)["agents have the required roles"]
    assert not finding.conclusive
    assert "roles/batch.agentReporter" in finding.detail
    sim.cloud.roles = {"roles/editor"}  # type: ignore[attr-defined]
    assert run_checks(sim)["agents have the required roles"].conclusive


def test_missing_credentials_are_reported(sim: Simulator) -> None:
    sim.faults.inject("credentials", 100)
    result = failed_checks(run_checks(sim))
    assert "authentication failed" in result[f"jobs can be listed in {REGION}"]


@pytest.mark.parametrize(
    ("image", "path"),
    [
        ("spotfit:1", None),
        ("gcr.io/p/spotfit:1", None),
        (
            "us-docker.pkg.dev/p/r/a/b:1",
            "/v1/projects/p/locations/us/repositories/r/packages/a%2Fb/tags/1",
        ),
        (
            "us-docker.pkg.dev/p/r/a@sha256:00",
            "/v1/projects/p/locations/us/repositories/r/packages/a/versions/sha256:00",
        ),
    ],
)
def test_image_reference_is_parsed_to_a_registry_path(image: str, path: str | None) -> None:
    assert checkup._artifact_registry_path(image) == path


def test_network_quotas_and_bucket_are_checked_together(sim: Simulator) -> None:
    cloud: Any = sim.cloud
    cloud.project_quotas["GPUS_ALL_REGIONS"] = 0.0
    cloud.region_quotas["PREEMPTIBLE_NVIDIA_L4_GPUS"] = 0.0
    cloud.firewall_rules = []
    cloud.bucket_location = "EUROPE-WEST4"
    result = failed_checks(run_checks(sim, external_ip=False))
    quota = result.pop("the quota allows a machine")
    assert "GPUS_ALL_REGIONS is 0, needed 1; PREEMPTIBLE_NVIDIA_L4_GPUS is 0, needed 1" in quota
    assert "lets machines with the service account" in result.pop(
        "machines can connect to each other"
    )
    assert "Private Google Access, which is disabled in default" in result.pop(
        "machines reach Google Cloud"
    )
    assert "is in EUROPE-WEST4" in result.pop("the bucket is near the machines")
    assert not result


def test_gpus_that_cuda_13_does_not_support_are_reported(sim: Simulator) -> None:
    sim.cloud.images["worker"].add("1-cuda")  # type: ignore[attr-defined]
    sim.cloud.machine_types |= {"n1-standard-8", "nvidia-tesla-v100"}  # type: ignore[attr-defined]
    old = {"machine_type": "n1-standard-8", "accelerator": "nvidia-tesla-v100"}
    [(what, detail)] = failed_checks(run_checks(sim, image=f"{IMAGE}:1-cuda", **old)).items()
    assert what == "the GPUs can run the image"
    assert "nvidia-tesla-v100" in detail
