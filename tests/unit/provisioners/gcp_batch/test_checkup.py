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
    return {one.name: one for one in provisioner.check_account()}


def failed_checks(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


def test_sound_project_passes_all_checks(sim: Simulator) -> None:
    findings = run_checks(sim, accelerator="nvidia-l4", service_account="")
    assert not failed_checks(findings)
    assert all(one.conclusive for one in findings.values())
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
