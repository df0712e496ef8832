"""What a cluster must allow is looked at one by one, by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.provision.checkup import AccountCheck
from spotfit_localsim.clouds.kubernetes import KubernetesCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.kubernetes.checkup import PROVISION_PERMISSIONS
from spotfit_provisioners.kubernetes.provisioner import KubernetesProvisioner

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="kubernetes", boot_s=0.0)) as simulator:
        yield simulator


def examined(sim: Simulator, **options: Any) -> dict[str, AccountCheck]:
    access = KubernetesCloud.client_access(sim.server.url)
    provisioner = KubernetesProvisioner.with_options(**{**access.options, **options})
    return {one.name: one for one in provisioner.check_account()}


def wrong(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


def test_of_a_cluster_that_allows_all_everything_is_told(sim: Simulator) -> None:
    findings = examined(sim)
    assert not wrong(findings)
    assert all(one.conclusive for one in findings.values())
    assert {f"the caller may {right.description}" for right in PROVISION_PERMISSIONS} <= set(
        findings
    )
    assert findings["a Job is admitted"].detail == "a dry run of one machine is admitted"
    assert not any(sim.cloud.state.objects.values()), "a dry run leaves nothing behind"


def test_everything_that_is_wrong_is_told_at_once(sim: Simulator) -> None:
    sim.faults.deny_permissions(["get pods/log", "delete jobs", "trainer create jobs"])
    sim.faults.inject("quota", 1)
    told = wrong(
        examined(
            sim,
            namespace="runs",
            service_account="trainer",
            image_pull_secrets=("registry",),
            priority_class="low",
        )
    )
    assert told.pop("a Job is admitted").startswith(
        "The ResourceQuota of the namespace is exceeded"
    )
    assert told == {
        "the namespace runs exists": "The Namespace runs does not exist in the cluster.",
        "the caller may delete jobs": "The caller may not delete jobs in the namespace runs "
        "(RBAC).",
        "the caller may get pods/log": (
            "The caller may not get pods/log in the namespace runs (RBAC)."
        ),
        "agents may rent machines": (
            "The agents' service account system:serviceaccount:runs:trainer may not create jobs, "
            "delete jobs, get pods/log."
        ),
        "the ServiceAccount trainer exists": "The ServiceAccount trainer does not exist in the "
        "cluster.",
        "the Secret registry exists": "The Secret registry does not exist in the cluster.",
        "the PriorityClass low exists": "The PriorityClass low does not exist in the cluster.",
    }


def test_what_we_may_not_ask_is_not_held_to_be_wrong(sim: Simulator) -> None:
    sim.faults.deny_permissions(
        ["create subjectaccessreviews", "get namespaces", "get serviceaccounts"]
    )
    findings = examined(sim, service_account="default")
    assert not wrong(findings)
    assert {what for what, one in findings.items() if not one.conclusive} == {
        "the namespace default exists",
        "agents may rent machines",
        "agents get preemption notices",
        "the ServiceAccount default exists",
    }


def test_agents_that_may_not_see_nodes_hear_later(sim: Simulator) -> None:
    assert "taints" in examined(sim)["agents get preemption notices"].detail
    sim.faults.deny_permissions(["get nodes"])
    finding = examined(sim)["agents get preemption notices"]
    assert finding.passed
    assert "reads_nodes" in finding.detail


def test_who_is_not_known_hears_of_it_and_nothing_stops(sim: Simulator) -> None:
    sim.faults.inject("credentials", 100)
    told = wrong(examined(sim))
    assert "authentication failed" in told["the caller may create jobs"]
    assert "authentication failed" in told["a Job is admitted"]
