"""Checks of a cluster by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.provision.api import AccountCheck
from spotfit_localsim.clouds.kubernetes import KubernetesCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.kubernetes.checkup import PROVISION_PERMISSIONS
from spotfit_provisioners.kubernetes.provisioner import KubernetesProvisioner

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="kubernetes", boot_s=0.0)) as simulator:
        yield simulator


def run_checks(sim: Simulator, **options: Any) -> dict[str, AccountCheck]:
    access = KubernetesCloud.client_access(sim.server.url)
    provisioner = KubernetesProvisioner.with_options(**{**access.options, **options})
    return {one.name: one for one in provisioner.check_account()}


def failed_checks(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


def test_permissive_cluster_passes_all_checks(sim: Simulator) -> None:
    findings = run_checks(sim)
    assert not failed_checks(findings)
    assert all(one.conclusive for one in findings.values())
    assert {
        f"the caller may {permission.description}" for permission in PROVISION_PERMISSIONS
    } <= set(findings)
    assert findings["a Job is admitted"].detail == "a dry run of one machine is admitted"
    on_demand = findings["a Job on on-demand nodes is admitted"]
    assert on_demand.detail == "a dry run of one machine is admitted"
    assert findings["its pods are admitted"].detail.startswith("a dry run of one pod is admitted")
    assert not any(sim.cloud.state.objects.values()), "a dry run creates no objects"


def test_all_failed_checks_are_reported_together(sim: Simulator) -> None:
    sim.faults.deny_permissions(["get pods/log", "delete jobs", "trainer create jobs"])
    sim.faults.inject("quota", 1)
    result = failed_checks(
        run_checks(
            sim,
            namespace="runs",
            service_account="trainer",
            image_pull_secrets=("registry",),
            priority_class="low",
        )
    )
    assert result.pop("a Job is admitted").startswith(
        "The ResourceQuota of the namespace is exceeded"
    )
    assert result == {
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


def test_on_demand_job_is_checked_where_its_nodes_are_distinguished(sim: Simulator) -> None:
    assert "a Job on on-demand nodes is admitted" not in run_checks(sim, flavour="")
    template = {"spec": {"affinity": None}}
    result = failed_checks(run_checks(sim, pod_template=template))
    assert set(result) == {"a Job on on-demand nodes is admitted"}


def test_denied_access_reviews_are_inconclusive(sim: Simulator) -> None:
    sim.faults.deny_permissions(
        ["create subjectaccessreviews", "get namespaces", "get serviceaccounts"]
    )
    findings = run_checks(sim, service_account="default")
    assert not failed_checks(findings)
    assert {what for what, one in findings.items() if not one.conclusive} == {
        "the namespace default exists",
        "agents may rent machines",
        "agents get preemption notices",
        "the ServiceAccount default exists",
    }


def test_missing_node_permission_is_reported_as_optional(sim: Simulator) -> None:
    assert "taints" in run_checks(sim)["agents get preemption notices"].detail
    sim.faults.deny_permissions(["get nodes"])
    finding = run_checks(sim)["agents get preemption notices"]
    assert finding.passed
    assert "reads_nodes" in finding.detail


def test_missing_credentials_do_not_stop_other_checks(sim: Simulator) -> None:
    sim.faults.inject("credentials", 100)
    result = failed_checks(run_checks(sim))
    assert "authentication failed" in result["the caller may create jobs"]
    assert "authentication failed" in result["a Job is admitted"]


def test_pods_are_admitted_to_a_restricted_namespace(sim: Simulator) -> None:
    sim.cloud.restricted_namespaces.add("default")  # type: ignore[attr-defined]
    assert not failed_checks(run_checks(sim))


def test_pod_that_the_security_standard_rejects_is_reported_although_its_job_is_admitted(
    sim: Simulator,
) -> None:
    """Pod Security Admission enforces the standard for pods only."""
    sim.cloud.restricted_namespaces.add("default")  # type: ignore[attr-defined]
    findings = run_checks(sim, pod_security="none")
    assert findings["a Job is admitted"].passed
    [(what, detail)] = failed_checks(findings).items()
    assert what == "its pods are admitted"
    assert 'violates PodSecurity "restricted' in detail
    assert "pod_security='restricted'" in findings[what].do


def test_admission_of_pods_is_not_determined_without_permission_to_create_them(
    sim: Simulator,
) -> None:
    sim.faults.deny_permissions(["create pods"])
    finding = run_checks(sim)["its pods are admitted"]
    assert (finding.passed, finding.conclusive) == (True, False)
    assert "may not create pods" in finding.detail
