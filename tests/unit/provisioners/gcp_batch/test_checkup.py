"""What Google Cloud Batch needs is looked at one by one, against a simulated project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.provision.checkup import Finding
from spotfit_localsim.wire.gcp_batch import AGENTS, NUMBER, PROJECT, REGION, GcpBatchCloud
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import Simulator, serving
from spotfit_provisioners.gcp_batch import checkup
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch import provisioner as verbs
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner

pytest.importorskip("google.cloud.batch_v1")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")

IMAGE = f"sim-docker.pkg.dev/{PROJECT}/spotfit/worker"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with serving(tmp_path, SimOptions(cloud="gcp_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._service, calls._session, verbs._client_in):
        cache.cache_clear()


def examined(sim: Simulator, **options: Any) -> dict[str, Finding]:
    access = GcpBatchCloud.access(sim.server.url)
    told = {"image": f"{IMAGE}:sim", "machine_type": "g2-standard-8", **options}
    provisioner = GcpBatchProvisioner.with_options(**{**access.options, **told})
    return {one.what: one for one in provisioner.examine()}


def wrong(findings: dict[str, Finding]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.well)
    return {what: one.found for what, one in findings.items() if not one.well}


def test_of_a_sound_project_everything_is_told(sim: Simulator) -> None:
    findings = examined(sim, accelerator="nvidia-l4", service_account="")
    assert not wrong(findings)
    assert all(one.seen for one in findings.values())
    assert findings["Google knows who asks"].found == f"project {PROJECT}"
    assert findings["its machines are to be had there"].found == f"{REGION}-a"
    assert f"{NUMBER}-compute@" in findings["agents may be who they are to be"].found


def test_everything_that_is_wrong_is_told_at_once(sim: Simulator) -> None:
    sim.troubles.forbid(["batch.jobs.create", "batch.jobs.delete", checkup.ACTS_AS])
    told = wrong(examined(sim, image=f"{IMAGE}:other", zones=(f"{REGION}-c",)))
    assert told == {
        "its machines are to be had there": f"The region {REGION} has no zone {REGION}-c.",
        "we may rent machines": "We lack batch.jobs.create, batch.jobs.delete.",
        "agents may be who they are to be": f"We lack {checkup.ACTS_AS} on {AGENTS}.",
        "the image is there": f"The registry has no {IMAGE}:other.",
    }


@pytest.mark.parametrize(
    ("options", "what", "told"),
    [
        ({"machine_type": "a9"}, "its machines are to be had there", "No zone that may be used"),
        (
            {"zones": (f"{REGION}-b",)},
            "its machines are to be had there",
            "No zone that may be used has g2-standard-8",
        ),
        (
            {"service_account": "nobody@x.iam.gserviceaccount.com"},
            "agents may be who they are to be",
            "There is no nobody@x",
        ),
    ],
)
def test_what_is_not_there_is_named(
    sim: Simulator, options: dict[str, Any], what: str, told: str
) -> None:
    [(only, found)] = wrong(examined(sim, **options)).items()
    assert only == what
    assert found.startswith(told)


def test_a_region_that_is_none_is_named(sim: Simulator) -> None:
    told = wrong(examined(sim, region="mars-east1"))
    assert "no location 'mars-east1'" in told["Batch is at home in mars-east1"]
    assert told["its machines are to be had there"] == "There is no region mars-east1."


def test_what_we_may_not_see_is_not_held_to_be_wrong(sim: Simulator) -> None:
    sim.troubles.forbid(
        [
            "compute.regions.get",
            "resourcemanager.projects.getIamPolicy",
            "artifactregistry.tags.get",
        ]
    )
    findings = examined(sim)
    assert not wrong(findings)
    assert {what for what, one in findings.items() if not one.seen} == {
        "its machines are to be had there",
        "agents may do what they must",
        "the image is there",
    }
    assert not examined(sim, image="docker.io/spotfit:1")["the image is there"].seen


def test_roles_that_agents_have_by_no_name_may_come_from_elsewhere(sim: Simulator) -> None:
    sim.cloud.roles = {"roles/batch.jobsEditor"}  # type: ignore[attr-defined]
    finding = examined(sim)["agents may do what they must"]
    assert not finding.seen
    assert "roles/batch.agentReporter" in finding.found
    sim.cloud.roles = {"roles/editor"}  # type: ignore[attr-defined]
    assert examined(sim)["agents may do what they must"].seen


def test_who_is_not_known_hears_of_it(sim: Simulator) -> None:
    sim.troubles.expect("credentials", 100)
    told = wrong(examined(sim))
    assert "does not know who asks" in told[f"jobs can be listed in {REGION}"]


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
def test_where_the_registry_tells_of_an_image(image: str, path: str | None) -> None:
    assert checkup._in_registry(image) == path
