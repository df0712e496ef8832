"""`fit()` on machines that SkyPilot rents: one is lost, and the result stays. `make sky`, as root.

SkyPilot's own API server, its jobs controllers and its Slurm cloud, on a real Slurm behind a real
sshd. What stands in for the world outside is told in `tests/skypilot_slurm.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client import machines
from spotfit.client.handle import RunHandle
from spotfit.host.clocks import SystemClock
from spotfit.ledger.journal import Journal
from spotfit.model.events import Blame
from spotfit.model.view import View
from spotfit.store.opening import open_store
from spotfit.torch import TorchTrainer
from spotfit_localsim.live.jobs import descend
from spotfit_provisioners.skypilot.client import SkyClient
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from tests import skypilot_server, slurm_cluster, ssh_hosts
from tests.live.test_simulated_clouds import CONFIG, undisturbed
from tests.skypilot_slurm import INFRA, lose, possible, settings, slurm_for_skypilot
from tests.slurm_cluster import SlurmCluster

pytestmark = [
    skypilot_server.installed,
    slurm_cluster.installed,
    ssh_hosts.installed,
    possible,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # SkyPilot's own dependencies have futures, too
]

LONG: dict[str, Any] = {**CONFIG, "steps": 300, "pace_s": 0.2}
_PATIENCE_S = 600.0
"""SkyPilot needs half a minute for a machine, and on a busy computer several times that."""


class Stage:
    """A cluster of three nodes, the API server that rents them, and a run of two workers there."""

    def __init__(self, cluster: SlurmCluster, endpoint: str, folder: Path) -> None:
        self.cluster = cluster
        self.endpoint = endpoint
        self.url = str(folder / "runs" / "run")

    def submit(self, **options: Any) -> RunHandle:
        root, _, name = self.url.rpartition("/")
        return TorchTrainer(
            descend,
            train_loop_config=LONG,
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=root, name=name),
            provisioner=SkyPilotOptions(
                infra=(INFRA,),
                spot="never",  # SkyPilot's Slurm cloud knows none
                python=sys.executable,
                endpoint=self.endpoint,
                **options,
            ),
        ).submit()

    def view(self) -> View:
        return Journal(open_store(self.url)).catch_up()

    def has_saved(self, step: int) -> bool:
        latest = self.view().latest_checkpoint
        return latest is not None and latest.metrics["step"] >= step

    def machines(self) -> set[str]:
        """Names of the jobs of Slurm that are, or were not long ago, machines of the run."""
        names = {name for [name] in self.cluster.jobs("Name:100")}
        return {name for name in names if name.startswith("t-")}

    def lose_one_of_two(self) -> str:
        """All that runs there is killed; the name of the other one."""
        kept, lost = self.cluster.running()
        lose(self.cluster, lost)
        patiently(lambda: lost not in self.cluster.running())
        return self.cluster.ask("squeue", "--noheader", f"--jobs={kept}", "--format=%j").strip()

    def printed(self, machine: str) -> str:
        """By one of these, as SkyPilot kept it."""
        token, node = machine.split("-")[1:3]
        return "\n".join(machines.printed(open_store(self.url), f"t-{token}/{node}", last=50))


def patiently(happens: Callable[[], object]) -> None:
    """Wait for it, looking once a second: ten minutes, then it is a failure."""
    clock = SystemClock()
    give_up_at = clock.now() + _PATIENCE_S
    while not happens():
        assert clock.now() < give_up_at, f"not within {_PATIENCE_S} s: {happens}"
        clock.wait(1.0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with (
        slurm_for_skypilot(tmp_path, 3) as cluster,
        skypilot_server.server_with("slurm", tmp_path, settings(tmp_path)) as endpoint,
    ):
        yield Stage(cluster, endpoint, tmp_path)


def test_a_cluster_is_lost_and_the_result_stays(stage: Stage) -> None:
    loses_a_machine_and_is_none_the_worse(stage, stage.submit(via="clusters"))


def test_a_managed_job_loses_its_machine_and_the_result_stays(stage: Stage) -> None:
    """Its controller brings it back as well; it finds that it was replaced, or is cancelled."""
    loses_a_machine_and_is_none_the_worse(stage, stage.submit(via="jobs"))
    client = SkyClient(stage.endpoint, patience_s=_PATIENCE_S)
    patiently(lambda: all(job.over for job in client.jobs("t-")))


def loses_a_machine_and_is_none_the_worse(stage: Stage, handle: RunHandle) -> None:
    """An agent on the machine that is left asks the API server for another one. What the machines
    print is told meanwhile; when all is over, SkyPilot has given them all back."""
    patiently(lambda: stage.has_saved(5))
    before = stage.machines()
    kept = stage.lose_one_of_two()
    assert "agent.up" in stage.printed(kept)
    assert handle.result().return_value == undisturbed(LONG["steps"])
    assert stage.view().failures.get(Blame.PREEMPTION)
    assert stage.machines() - before
    patiently(lambda: not stage.cluster.running())
