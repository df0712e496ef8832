"""What a cluster must let us do is looked at one by one: a real controller, with accounts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.checkup import AccountCheck
from spotfit_provisioners.slurm import checkup
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.provisioner import SlurmProvisioner
from tests.slurm_cluster import (
    SlurmCluster,
    requires_slurm,
    requires_slurm_accounting,
    run_slurm_cluster,
)

real = pytest.mark.real_time("a real Slurm lives in real time")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with run_slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=1, accounting=True) as cluster:
        yield cluster


@pytest.fixture
def here(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return cluster


def examined(folder: Path, **options: Any) -> dict[str, AccountCheck]:
    told = {"python": sys.executable, "work_dir": str(folder), "grace_s": 5.0, **options}
    return {one.name: one for one in SlurmProvisioner.with_options(**told).check_account()}


def wrong(findings: dict[str, AccountCheck]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.passed)
    return {what: one.detail for what, one in findings.items() if not one.passed}


@real
@requires_slurm_accounting
@pytest.mark.usefixtures("here")
def test_of_a_sound_cluster_everything_is_told(tmp_path: Path) -> None:
    findings = examined(tmp_path, account="lab", qos="low")
    assert not wrong(findings)
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
def test_everything_that_is_wrong_is_told_at_once(here: SlurmCluster, tmp_path: Path) -> None:
    limits = ("State=DOWN", "AllowAccounts=root", "DenyQos=")
    here.run_command("scontrol", "update", "PartitionName=urgent", *limits[:2])
    try:
        told = wrong(
            examined(
                tmp_path,
                partitions=("urgent", "none"),
                account="lab",
                qos="forbidden",
                grace_s=60.0,
            )
        )
    finally:
        here.run_command(
            "scontrol", "update", "PartitionName=urgent", "State=UP", "AllowAccounts=ALL"
        )
    assert told.pop("a job is accepted")
    assert told == {
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
@pytest.mark.usefixtures("here")
def test_an_account_that_is_not_ours_is_told_with_those_that_are(tmp_path: Path) -> None:
    told = wrong(examined(tmp_path, account="other"))
    assert told["the account can be charged"].endswith("allowed: lab, root.")


@real
@requires_slurm
def test_a_folder_elsewhere_cannot_be_looked_at(
    here: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not examined(tmp_path / "none")["tasks can write to the working directory"].conclusive
    monkeypatch.setenv("PATH", "/none")
    assert list(wrong(examined(tmp_path))) == ["the controller answers"]


class FakeSlurmClient:
    """A cluster that is set up in another way."""

    def __init__(self, partition: dict[str, str], settings: dict[str, str]) -> None:
        self._partition = partition
        self._settings = settings

    def read_cluster_config(self) -> dict[str, str]:
        return self._settings

    def find_partition(self, _: str) -> dict[str, str]:
        return self._partition

    def list_own_groups(self) -> tuple[str, ...]:
        return ("students",)


@pytest.mark.parametrize(
    ("mode", "settings", "told"),
    [
        ("REQUEUE", {}, "Slurm requeues the task"),
        ("CANCEL", {}, "the run requests a replacement"),
        ("OFF", {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, "requests a replacement"),
        ("OFF", {}, "no preemption"),
    ],
)
def test_what_becomes_of_a_preempted_task(mode: str, settings: dict[str, str], told: str) -> None:
    client: Any = FakeSlurmClient({"PreemptMode": mode}, settings)
    examiner = checkup._SlurmChecks(SlurmOptions(), client)
    assert told in examiner._check_requeue("")


@pytest.mark.parametrize(
    ("settings", "told"),
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
def test_where_nobody_asks_for_an_account_none_is_missing(
    settings: dict[str, str], told: str
) -> None:
    examiner = checkup._SlurmChecks(SlurmOptions(), FakeSlurmClient({}, settings))  # type: ignore[arg-type]
    assert told in str(examiner._check_association())


@pytest.mark.parametrize("mode", ["SUSPEND", "GANG,SUSPEND"])
def test_a_task_that_would_be_stopped_and_kept_is_a_trap(mode: str) -> None:
    examiner = checkup._SlurmChecks(SlurmOptions(), FakeSlurmClient({"PreemptMode": mode}, {}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="suspended"):
        examiner._check_requeue("")


@pytest.mark.parametrize(
    ("told", "well"),
    [
        ({"AllowGroups": "ALL"}, True),
        ({"AllowGroups": "staff,students"}, True),
        ({"AllowGroups": "staff"}, False),
        ({"AllowQos": "high"}, False),
        ({"DenyAccounts": "lab"}, False),
        ({"AllowAccounts": "lab,other"}, True),
    ],
)
def test_who_is_let_in(told: dict[str, str], well: bool) -> None:
    options = SlurmOptions(account="lab", qos="low")
    examiner = checkup._SlurmChecks(options, FakeSlurmClient({}, {}))  # type: ignore[arg-type]
    assert all(fine for _, fine in examiner._access_conditions({"State": "UP", **told})) is well
