"""What a cluster must let us do is looked at one by one: a real controller, with accounts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.checkup import Finding
from spotfit_provisioners.slurm import checkup
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.provisioner import SlurmProvisioner
from tests.slurm_cluster import SlurmCluster, installed, keeps_accounts, slurm_cluster

real = pytest.mark.real_time("a real Slurm lives in real time")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=1, accounts=True) as cluster:
        yield cluster


@pytest.fixture
def here(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return cluster


def examined(folder: Path, **options: Any) -> dict[str, Finding]:
    told = {"python": sys.executable, "folder": str(folder), "grace_s": 5.0, **options}
    return {one.what: one for one in SlurmProvisioner.with_options(**told).examine()}


def wrong(findings: dict[str, Finding]) -> dict[str, str]:
    assert all(one.do for one in findings.values() if not one.well)
    return {what: one.found for what, one in findings.items() if not one.well}


@real
@keeps_accounts
@pytest.mark.usefixtures("here")
def test_of_a_sound_cluster_everything_is_told(tmp_path: Path) -> None:
    findings = examined(tmp_path, account="lab", qos="low")
    assert not wrong(findings)
    assert {what: one.found for what, one in findings.items()} == {
        "the controller answers": "lab",
        "the default partition lets us in": "1 nodes, up to UNLIMITED",
        "a task preempted in the default partition comes back": (
            "PreemptMode REQUEUE: Slurm brings it back"
        ),
        "the account may be charged": "lab",
        "a task would be taken": "sbatch --test-only agrees",
        "tasks are left the time that they count on": "KillWait 5 s; preemption is announced",
        "tasks can write where they run": f"{tmp_path}, if the nodes have it, too",
    }


@real
@keeps_accounts
def test_everything_that_is_wrong_is_told_at_once(here: SlurmCluster, tmp_path: Path) -> None:
    limits = ("State=DOWN", "AllowAccounts=root", "DenyQos=")
    here.ask("scontrol", "update", "PartitionName=urgent", *limits[:2])
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
        here.ask("scontrol", "update", "PartitionName=urgent", "State=UP", "AllowAccounts=ALL")
    assert told.pop("a task would be taken")
    assert told == {
        "the partition urgent lets us in": "It is DOWN, does not let the account lab in.",
        "the partition none lets us in": "There is no partition 'none'.",
        "a task preempted in the partition none comes back": "There is no partition 'none'.",
        "the account may be charged": "The QOS forbidden is not ours, only: high, low, normal.",
        "tasks are left the time that they count on": (
            "Slurm kills 5 s after SIGTERM, and grace_s is 60."
        ),
    }


@real
@keeps_accounts
@pytest.mark.usefixtures("here")
def test_an_account_that_is_not_ours_is_told_with_those_that_are(tmp_path: Path) -> None:
    told = wrong(examined(tmp_path, account="other"))
    assert told["the account may be charged"].endswith("only to: lab, root.")


@real
@installed
def test_a_folder_elsewhere_cannot_be_looked_at(
    here: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not examined(tmp_path / "none")["tasks can write where they run"].seen
    monkeypatch.setenv("PATH", "/none")
    assert list(wrong(examined(tmp_path))) == ["the controller answers"]


class Told:
    """A cluster that is set up in another way."""

    def __init__(self, partition: dict[str, str], settings: dict[str, str]) -> None:
        self._partition = partition
        self._settings = settings

    def settings(self) -> dict[str, str]:
        return self._settings

    def partition(self, _: str) -> dict[str, str]:
        return self._partition

    def groups(self) -> tuple[str, ...]:
        return ("students",)


@pytest.mark.parametrize(
    ("mode", "settings", "told"),
    [
        ("REQUEUE", {}, "Slurm brings it back"),
        ("CANCEL", {}, "the run asks for another"),
        ("OFF", {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, "asks for another"),
        ("OFF", {}, "nobody preempts it there"),
    ],
)
def test_what_becomes_of_a_preempted_task(mode: str, settings: dict[str, str], told: str) -> None:
    examiner = checkup._Examiner(SlurmOptions(), Told({"PreemptMode": mode}, settings))  # type: ignore[arg-type]
    assert told in examiner._comes_back("")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"AccountingStorageType": "accounting_storage/none"}, "keeps no accounts"),
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "lets everybody in"),
        (
            {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageEnforce": "none",
            },
            "lets everybody in",
        ),
    ],
)
def test_where_nobody_asks_for_an_account_none_is_missing(
    settings: dict[str, str], told: str
) -> None:
    examiner = checkup._Examiner(SlurmOptions(), Told({}, settings))  # type: ignore[arg-type]
    assert told in str(examiner._charged())


@pytest.mark.parametrize("mode", ["SUSPEND", "GANG,SUSPEND"])
def test_a_task_that_would_be_stopped_and_kept_is_a_trap(mode: str) -> None:
    examiner = checkup._Examiner(SlurmOptions(), Told({"PreemptMode": mode}, {}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="suspended"):
        examiner._comes_back("")


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
    examiner = checkup._Examiner(options, Told({}, {}))  # type: ignore[arg-type]
    assert all(fine for _, fine in examiner._doors({"State": "UP", **told})) is well
