"""`fit()` on a real Slurm, with requeued and preempted tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.run_handle import RunHandle
from spotfit.ledger.journal import Journal
from spotfit.model.events import FailureCause, JournalEntry, PreemptionNoticed
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit.torch import TorchTrainer
from spotfit_localsim.live.reference_jobs import train_gradient_descent
from spotfit_provisioners.slurm.options import SlurmOptions
from tests.live.cloud import eventually
from tests.live.test_simulated_clouds import CONFIG, uninterrupted_result
from tests.slurm_cluster import (
    SlurmCluster,
    requires_slurm,
    requires_slurm_accounting,
    run_slurm_cluster,
)

LONG: dict[str, Any] = {**CONFIG, "steps": 400, "step_s": 0.05}
"""A preempted task runs for its GraceTime, and the preempting job waits for it."""
GRACE_S = 5.0
"""GraceTime of partition and QOS, and KillWait, in `tests/slurm_cluster.py`."""


class SlurmHarness:
    """A cluster of four nodes, and a run of two workers on it."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.notices: list[PreemptionNoticed] = []

    def submit(self, config: Mapping[str, Any], **options: Any) -> RunHandle:
        trainer = TorchTrainer(
            train_gradient_descent,
            train_loop_config=dict(config),
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=str(self.folder / "runs"), name="run"),
            provisioner=SlurmOptions(
                partitions=("spot",),
                python=sys.executable,
                work_dir=str(self.folder),
                grace_s=GRACE_S,
                **options,
            ),
        )
        return trainer.submit()

    def view(self) -> JournalView:
        journal = Journal(open_store(str(self.folder / "runs" / "run")), ignore_view_cache=True)
        self.notices.clear()
        journal.on_entry = self._on_entry
        return journal.catch_up()

    def _on_entry(self, _slot: int, _body: bytes, entry: JournalEntry) -> None:
        if isinstance(entry.event, PreemptionNoticed):
            self.notices.append(entry.event)

    def has_saved(self, step: int) -> bool:
        latest = self.view().latest_checkpoint
        return latest is not None and latest.metrics["step"] >= step

    def preempt(self, *options: str) -> str:
        """Submit a job with higher priority for a node of the run; return its number."""
        [node, *_] = self.cluster.run_command("squeue", "-h", "-t", "R", "-o", "%N").split()
        sleep = ("--output=/dev/null", "--wrap=sleep 300")
        result = self.cluster.run_command("sbatch", "--parsable", "-w", node, *options, *sleep)
        assert result, "sbatch refused"
        return result.strip()


@pytest.fixture
def harness(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmHarness]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    accounts = getattr(request, "param", "") == "with accounts"
    with run_slurm_cluster(folder, nodes=4, accounting=accounts) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        yield SlurmHarness(cluster, tmp_path)


@requires_slurm
def test_requeued_task_does_not_change_the_result(harness: SlurmHarness) -> None:
    handle, cluster = harness.submit(CONFIG), harness.cluster
    eventually(lambda: harness.has_saved(5))
    cluster.run_command("scontrol", "requeue", max(cluster.running_jobs(), key=int))
    eventually(lambda: harness.view().failure_counts.get(FailureCause.PREEMPTION))
    assert handle.result().return_value == uninterrupted_result()
    assert harness.view().failure_counts == {FailureCause.PREEMPTION: 1}
    eventually(lambda: not cluster.run_command("squeue", "--noheader").strip())


@requires_slurm
def test_preemption_by_a_partition_does_not_change_the_result(harness: SlurmHarness) -> None:
    check_recovery_from_preemption(
        harness, harness.submit(LONG), "--partition=urgent", "--exclusive"
    )


@requires_slurm_accounting
@pytest.mark.parametrize("harness", ["with accounts"], indirect=True)
def test_preemption_by_a_qos_does_not_change_the_result(harness: SlurmHarness) -> None:
    handle = harness.submit(LONG, account="lab", qos="low")
    check_recovery_from_preemption(harness, handle, "--account=lab", "--qos=high", "--exclusive")


def check_recovery_from_preemption(harness: SlurmHarness, handle: RunHandle, *options: str) -> None:
    """SIGTERM at the start of GraceTime is the notice. Slurm requeues a task that still runs when
    GraceTime ends; a task that has exited is replaced by the run."""
    eventually(lambda: harness.has_saved(5))
    other = harness.preempt(*options)
    eventually(lambda: harness.view().failure_counts.get(FailureCause.PREEMPTION))
    assert handle.result().return_value == uninterrupted_result(LONG["steps"])
    assert harness.view().failure_counts == {FailureCause.PREEMPTION: 1}
    # A task that still runs when GraceTime ends receives SIGTERM again, KillWait before SIGKILL.
    assert len(harness.notices) in (1, 2)
    assert len({noticed.agent for noticed in harness.notices}) == 1
    for noticed in harness.notices:
        assert noticed.notice.seconds_left is not None
        assert 0 < noticed.notice.seconds_left <= GRACE_S
    eventually(lambda: [other, "RUNNING"] in harness.cluster.jobs("JobID", "State"))
    harness.cluster.run_command("scancel", other)
    eventually(lambda: not harness.cluster.run_command("squeue", "--noheader").strip())
