"""Checks of a cluster, with a real controller and accounting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.api import AccountCheck
from spotfit_provisioners.slurm import checkup
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.provisioner import SlurmProvisioner
from tests.slurm_cluster import (
    SlurmCluster,
    requires_slurm,
    requires_slurm_accounting,
    run_slurm_cluster,
)

real = pytest.mark.real_time("a real Slurm uses real time")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with run_slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=1, accounting=True) as cluster:
        yield cluster


@pytest.fixture
def configured_cluster(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return cluster


def run_checks(folder: Path, **options: Any) -> dict[str, AccountCheck]:
    result = {"python": sys.executable, "work_dir": str(folder), "grace_s": 5.0, **options}
    return {one.name: one for one in SlurmProvisioner.with_options(**result).check_account()}


def failed_checks(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


@real
@requires_slurm_accounting
@pytest.mark.usefixtures("configured_cluster")
def test_sound_cluster_passes_all_checks(tmp_path: Path) -> None:
    findings = run_checks(tmp_path, account="lab", qos="low")
    assert not failed_checks(findings)
    assert {what: one.detail for what, one in findings.items()} == {
        "the controller answers": "lab",
        "the default partition accepts jobs": "1 nodes, up to UNLIMITED",
        "the default partition requeues preempted tasks": (
            "PreemptMode REQUEUE: Slurm requeues the task"
        ),
        "the account can be charged": "lab",
        "a job is accepted": "sbatch --test-only accepts it",
        "the grace period is long enough": "KillWait 5 s; preemption is announced",
        "tasks can write to the working directory": f"{tmp_path}, if the nodes mount it as well",
    }


@real
@requires_slurm_accounting
@pytest.mark.usefixtures("configured_cluster")
def test_on_demand_offers_are_submitted_as_a_test(tmp_path: Path) -> None:
    findings = run_checks(
        tmp_path, account="lab", qos="low", on_demand_partitions=("urgent",), on_demand_qos="high"
    )
    assert not failed_checks(findings)
    found = findings["the offer slurm/urgent/high/on_demand is accepted"]
    assert found.detail == "sbatch --test-only accepts it"
    findings = run_checks(tmp_path, account="lab", on_demand_qos="forbidden")
    assert set(failed_checks(findings)) == {"the offer slurm/forbidden/on_demand is accepted"}


@real
@requires_slurm_accounting
def test_all_failed_checks_are_reported_together(
    configured_cluster: SlurmCluster, tmp_path: Path
) -> None:
    limits = ("State=DOWN", "AllowAccounts=root", "DenyQos=")
    configured_cluster.run_command("scontrol", "update", "PartitionName=urgent", *limits[:2])
    try:
        result = failed_checks(
            run_checks(
                tmp_path,
                partitions=("urgent", "none"),
                account="lab",
                qos="forbidden",
                grace_s=60.0,
            )
        )
    finally:
        configured_cluster.run_command(
            "scontrol", "update", "PartitionName=urgent", "State=UP", "AllowAccounts=ALL"
        )
    assert result.pop("a job is accepted")
    assert result == {
        "the partition urgent accepts jobs": (
            "The partition urgent is DOWN, does not allow the account lab."
        ),
        "the partition none accepts jobs": (
            "SlurmOptions(partitions=…) names 'none', which does not exist in the cluster."
        ),
        "the partition none requeues preempted tasks": (
            "SlurmOptions(partitions=…) names 'none', which does not exist in the cluster."
        ),
        "the account can be charged": (
            "The user may not use the QOS forbidden; allowed: high, low, normal."
        ),
        "the grace period is long enough": (
            "SlurmOptions(grace_s=60) is longer than the cluster's KillWait: Slurm kills tasks 5 "
            "s after SIGTERM."
        ),
    }


@real
@requires_slurm_accounting
@pytest.mark.usefixtures("configured_cluster")
def test_unavailable_account_is_reported_with_the_available_ones(tmp_path: Path) -> None:
    result = failed_checks(run_checks(tmp_path, account="other"))
    assert result["the account can be charged"].endswith("allowed: lab, root.")


@real
@requires_slurm
def test_remote_work_dir_is_inconclusive(
    configured_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not run_checks(tmp_path / "none")["tasks can write to the working directory"].conclusive
    monkeypatch.setenv("PATH", "/none")
    assert list(failed_checks(run_checks(tmp_path))) == ["the controller answers"]


class FakeSlurmClient:
    """A fake client of a cluster with other settings."""

    def __init__(self, partition: dict[str, str], settings: dict[str, str]) -> None:
        self._partition = partition
        self._settings = settings

    def read_cluster_config(self) -> dict[str, str]:
        return self._settings

    def find_partition(self, _: str) -> dict[str, str]:
        return self._partition

    def list_own_groups(self) -> tuple[str, ...]:
        return ("students",)

    def test_submission(self, arguments: object, script: str) -> str:
        return "accepted"


@pytest.mark.parametrize(
    ("mode", "kind", "may_be_preempted"),
    [
        ("OFF", "preempt/partition_prio", False),
        ("REQUEUE", "preempt/partition_prio", True),
        ("REQUEUE", "preempt/qos", False),
        ("REQUEUE", "preempt/none", False),
    ],
)
def test_on_demand_partition_must_not_be_preempted(
    mode: str, kind: str, may_be_preempted: bool
) -> None:
    client: Any = FakeSlurmClient({"PreemptMode": mode}, {"PreemptType": kind})
    checks = checkup._SlurmChecks(SlurmOptions(on_demand_partitions=("high",)), client)
    (offer,) = checks._on_demand_offers()
    if may_be_preempted:
        with pytest.raises(ConfigError, match="PreemptMode of the partition high is REQUEUE"):
            checks._check_on_demand(offer)
    else:
        assert checks._check_on_demand(offer) == "accepted"


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("REQUEUE", {}, "Slurm requeues the task"),
        ("CANCEL", {}, "the run requests a replacement"),
        ("OFF", {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, "requests a replacement"),
        ("OFF", {}, "no preemption"),
    ],
)
def test_preempt_mode_is_checked(mode: str, settings: dict[str, str], expected: str) -> None:
    client: Any = FakeSlurmClient({"PreemptMode": mode}, settings)
    checks = checkup._SlurmChecks(SlurmOptions(), client)
    assert expected in checks._check_requeue("")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"AccountingStorageType": "accounting_storage/none"}, "has no accounting"),
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "does not enforce associations"),
        (
            {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageEnforce": "none",
            },
            "does not enforce associations",
        ),
    ],
)
def test_account_is_not_required_without_accounting(
    settings: dict[str, str], expected: str
) -> None:
    checks = checkup._SlurmChecks(SlurmOptions(), FakeSlurmClient({}, settings))  # type: ignore[arg-type]
    assert expected in str(checks._check_association())


@pytest.mark.parametrize("mode", ["SUSPEND", "GANG,SUSPEND"])
def test_preempt_mode_suspend_fails_the_check(mode: str) -> None:
    checks = checkup._SlurmChecks(SlurmOptions(), FakeSlurmClient({"PreemptMode": mode}, {}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="suspended"):
        checks._check_requeue("")


@pytest.mark.parametrize(
    ("expected", "well"),
    [
        ({"AllowGroups": "ALL"}, True),
        ({"AllowGroups": "staff,students"}, True),
        ({"AllowGroups": "staff"}, False),
        ({"AllowQos": "high"}, False),
        ({"DenyAccounts": "lab"}, False),
        ({"AllowAccounts": "lab,other"}, True),
    ],
)
def test_partition_access_is_checked(expected: dict[str, str], well: bool) -> None:
    options = SlurmOptions(account="lab", qos="low")
    checks = checkup._SlurmChecks(options, FakeSlurmClient({}, {}))  # type: ignore[arg-type]
    assert (
        all(is_met for _, is_met in checks._access_conditions({"State": "UP", **expected})) is well
    )
