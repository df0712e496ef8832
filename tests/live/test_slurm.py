"""`fit()` on a real Slurm: a task is requeued, the result stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spotfit
from spotfit.ledger.journal import Journal
from spotfit.model.events import Blame
from spotfit.model.view import View
from spotfit.store.opening import open_store
from spotfit.torch import TorchTrainer
from spotfit_localsim.live.jobs import descend
from spotfit_provisioners.slurm.options import SlurmOptions
from tests.live.cloud import eventually
from tests.live.test_simulated_clouds import CONFIG, undisturbed
from tests.slurm_cluster import SlurmCluster, installed, slurm_cluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster(folder, nodes=4) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster


@installed
def test_a_task_is_requeued_and_the_result_stays(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = SlurmOptions(
        partitions=("spot",), python=sys.executable, folder=str(tmp_path), grace_s=5.0
    )
    trainer = TorchTrainer(
        descend,
        train_loop_config=CONFIG,
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
        provisioner=options,
    )

    def view() -> View:
        return Journal(open_store(str(tmp_path / "runs" / "run"))).catch_up()

    def saved(step: int) -> bool:
        latest = view().latest_checkpoint
        return latest is not None and latest.metrics["step"] >= step

    handle = trainer.submit()
    eventually(lambda: saved(5))
    cluster.ask("scontrol", "requeue", max(cluster.running(), key=int))
    eventually(lambda: view().failures.get(Blame.PREEMPTION))
    assert handle.result().return_value == undisturbed()
    assert view().failures == {Blame.PREEMPTION: 1}
    eventually(lambda: not cluster.ask("squeue", "--noheader").strip())
