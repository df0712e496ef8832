"""What a cluster must allow is looked at one by one, by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.provision.checkup import Finding
from spotfit_localsim.wire.kubernetes import KubernetesCloud
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import Simulator, serving
from spotfit_provisioners.kubernetes.checkup import RENTS
from spotfit_provisioners.kubernetes.provisioner import KubernetesProvisioner

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with serving(tmp_path, SimOptions(cloud="kubernetes", boot_s=0.0)) as simulator:
        yield simulator


def examined(sim: Simulator, **options: Any) -> dict[str, Finding]:
    access = KubernetesCloud.access(sim.server.url)
    provisioner = KubernetesProvisioner.with_options(**{**access.options, **options})
    return {one.what: one for one in provisioner.examine()}


def wrong(findings: dict[str, Finding]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.well)
    return {what: one.found for what, one in findings.items() if not one.well}


def test_of_a_cluster_that_allows_all_everything_is_told(sim: Simulator) -> None:
    findings = examined(sim)
    assert not wrong(findings)
    assert all(one.seen for one in findings.values())
    assert {f"we may {right.told}" for right in RENTS} <= set(findings)
    assert findings["a Job would be taken"].found == "a dry run of one machine is admitted"
    assert not any(sim.cloud.memory.objects.values()), "a dry run leaves nothing behind"


def test_everything_that_is_wrong_is_told_at_once(sim: Simulator) -> None:
    sim.troubles.forbid(["get pods/log", "delete jobs", "trainer create jobs"])
    sim.troubles.expect("quota", 1)
    told = wrong(
        examined(
            sim,
            namespace="runs",
            service_account="trainer",
            image_pull_secrets=("registry",),
            priority_class="low",
        )
    )
    assert told.pop("a Job would be taken").startswith("A quota of the namespace")
    assert told == {
        "the namespace runs is there": "There is no Namespace runs.",
        "we may delete jobs": "The cluster says no in namespace runs.",
        "we may get pods/log": "The cluster says no in namespace runs.",
        "agents may rent machines": (
            "system:serviceaccount:runs:trainer may not create jobs, delete jobs, get pods/log."
        ),
        "the ServiceAccount trainer is there": "There is no ServiceAccount trainer.",
        "the Secret registry is there": "There is no Secret registry.",
        "the PriorityClass low is there": "There is no PriorityClass low.",
    }


def test_what_we_may_not_ask_is_not_held_to_be_wrong(sim: Simulator) -> None:
    sim.troubles.forbid(["create subjectaccessreviews", "get namespaces", "get serviceaccounts"])
    findings = examined(sim, service_account="default")
    assert not wrong(findings)
    assert {what for what, one in findings.items() if not one.seen} == {
        "the namespace default is there",
        "agents may rent machines",
        "agents hear of the end of their node",
        "the ServiceAccount default is there",
    }


def test_agents_that_may_not_see_nodes_hear_later(sim: Simulator) -> None:
    assert "taints" in examined(sim)["agents hear of the end of their node"].found
    sim.troubles.forbid(["get nodes"])
    finding = examined(sim)["agents hear of the end of their node"]
    assert finding.well
    assert "reads_nodes" in finding.found


def test_who_is_not_known_hears_of_it_and_nothing_stops(sim: Simulator) -> None:
    sim.troubles.expect("credentials", 100)
    told = wrong(examined(sim))
    assert "does not know who asks" in told["we may create jobs"]
    assert "does not know who asks" in told["a Job would be taken"]
