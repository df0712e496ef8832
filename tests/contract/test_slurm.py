"""Slurm against the conformance suite, with a real controller and nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.provision.api import Provisioner
from spotfit.testing.provisioner_suite import FaultInjectingCloud, ProvisionerSuite
from spotfit_provisioners.slurm.provisioner import SlurmProvisioner
from tests.slurm_cluster import SlurmCluster, requires_slurm, run_slurm_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with run_slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


class SlurmFaultInjector:
    """Fault injection of Slurm: a job that occupies all nodes, and a requeue."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster

    def inject_fault(self, kind: str, times: int) -> None:
        if kind != "capacity":
            pytest.skip("see tests/unit/provisioners/slurm/test_client.py")
        state = "DRAIN" if times else "RESUME"
        nodes = f"NodeName=n[1-{self._cluster.nodes}]"
        self._cluster.run_command("scontrol", "update", nodes, f"State={state}", "Reason=test")

    def reclaim_newest(self) -> None:
        self._cluster.run_command("scontrol", "requeue", max(self._cluster.running_jobs(), key=int))


@requires_slurm
class TestSlurm(ProvisionerSuite):
    @pytest.fixture
    def provisioner(
        self, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Provisioner:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        return SlurmProvisioner.with_options(
            partitions=("spot",),
            on_demand_partitions=("urgent",),
            python=sys.executable,
            work_dir=str(tmp_path),
            grace_s=5.0,
        )

    @pytest.fixture
    def cloud(self, cluster: SlurmCluster) -> FaultInjectingCloud:
        return SlurmFaultInjector(cluster)
