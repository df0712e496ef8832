"""`fit()` on machines of SkyPilot, one of which is lost. `make sky`, as root.

SkyPilot's API server, jobs controllers and Slurm cloud run on a real Slurm behind a real sshd.
`tests/skypilot_slurm.py` describes the substituted parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client import machine_logs
from spotfit.client.run_handle import RunHandle
from spotfit.host.system import SystemClock
from spotfit.ledger.journal import Journal
from spotfit.model.events import FailureCause
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit.torch import TorchTrainer
from spotfit_localsim.live.reference_jobs import train_gradient_descent
from spotfit_provisioners.skypilot.client import SkyPilotClient
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from tests import skypilot_server, slurm_cluster, ssh_hosts
from tests.live.test_simulated_clouds import CONFIG, uninterrupted_result
from tests.skypilot_slurm import (
    INFRA,
    kill_job,
    requires_namespaces,
    run_slurm_for_skypilot,
    skypilot_config,
)
from tests.slurm_cluster import SlurmCluster

pytestmark = [
    skypilot_server.requires_skypilot,
    slurm_cluster.requires_slurm,
    ssh_hosts.requires_sshd,
    requires_namespaces,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # SkyPilot's dependencies define futures as well
]

LONG: dict[str, Any] = {**CONFIG, "steps": 300, "step_s": 0.2}
_TIMEOUT_S = 600.0
"""SkyPilot needs half a minute per machine, and several times that on a busy computer."""


class SkyPilotHarness:
    """A cluster of three nodes, an API server, and a run of two workers."""

    def __init__(self, cluster: SlurmCluster, endpoint: str, folder: Path) -> None:
        self.cluster = cluster
        self.endpoint = endpoint
        self.url = str(folder / "runs" / "run")

    def submit(self, **options: Any) -> RunHandle:
        root, _, name = self.url.rpartition("/")
        return TorchTrainer(
            train_gradient_descent,
            train_loop_config=LONG,
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=root, name=name),
            provisioner=SkyPilotOptions(
                infra=(INFRA,),
                spot="never",  # SkyPilot's Slurm cloud has none
                python=sys.executable,
                endpoint=self.endpoint,
                **options,
            ),
        ).submit()

    def view(self) -> JournalView:
        return Journal(open_store(self.url)).catch_up()

    def has_saved(self, step: int) -> bool:
        latest = self.view().latest_checkpoint
        return latest is not None and latest.metrics["step"] >= step

    def machines(self) -> set[str]:
        """Return the names of current and recent Slurm jobs that are machines of the run."""
        names = {name for [name] in self.cluster.jobs("Name:100")}
        return {name for name in names if name.startswith("t-")}

    def kill_one_of_two(self) -> str:
        """Kill all processes of a machine; return the name of the other machine."""
        kept, lost = self.cluster.running_jobs()
        kill_job(self.cluster, lost)
        wait_until(lambda: lost not in self.cluster.running_jobs())
        return self.cluster.run_command(
            "squeue", "--noheader", f"--jobs={kept}", "--format=%j"
        ).strip()

    def printed(self, machine: str) -> str:
        """Return the machine output that SkyPilot stored."""
        token, node = machine.split("-")[1:3]
        return "\n".join(
            machine_logs.read_machine_output(
                open_store(self.url), f"t-{token}/{node}", max_lines=50
            )
        )


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for the condition, polled every second, at most ten minutes."""
    clock = SystemClock()
    deadline = clock.now() + _TIMEOUT_S
    while not condition():
        assert clock.now() < deadline, f"not within {_TIMEOUT_S} s: {condition}"
        clock.wait(1.0)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SkyPilotHarness]:
    with (
        run_slurm_for_skypilot(tmp_path, 3) as cluster,
        skypilot_server.run_skypilot_server(
            "slurm", tmp_path, skypilot_config(tmp_path)
        ) as endpoint,
    ):
        yield SkyPilotHarness(cluster, endpoint, tmp_path)


def test_lost_cluster_does_not_change_the_result(harness: SkyPilotHarness) -> None:
    check_recovery_from_a_lost_machine(harness, harness.submit(launch_mode="clusters"))


def test_lost_machine_of_a_managed_job_does_not_change_the_result(harness: SkyPilotHarness) -> None:
    """The controller recovers the machine as well; its agent exits or is cancelled."""
    check_recovery_from_a_lost_machine(harness, harness.submit(launch_mode="jobs"))
    client = SkyPilotClient(harness.endpoint, request_timeout_s=_TIMEOUT_S)
    wait_until(lambda: all(job.is_over for job in client.list_jobs("t-")))


def check_recovery_from_a_lost_machine(harness: SkyPilotHarness, handle: RunHandle) -> None:
    """The remaining agent requests a replacement from the API server. Machine output is readable
    during the run, and SkyPilot releases all machines at the end."""
    wait_until(lambda: harness.has_saved(5))
    before = harness.machines()
    kept = harness.kill_one_of_two()
    assert "agent.started" in harness.printed(kept)
    assert handle.result().return_value == uninterrupted_result(LONG["steps"])
    assert harness.view().failure_counts.get(FailureCause.PREEMPTION)
    assert harness.machines() - before
    wait_until(lambda: not harness.cluster.running_jobs())
