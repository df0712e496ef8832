"""A rebalance recommendation triggers a save and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.ledger.journal import Journal
from spotfit.store.factory import open_store
from spotfit.torch import Checkpointer, TorchTrainer
from spotfit_localsim.clouds.provisioner import SimProvisioner
from tests.live.cloud import eventually


def train(config: dict[str, Any]) -> int:
    """Execute steps until the mark 'enough' exists; save only on a recommendation."""
    import torch

    from spotfit.host.system import SystemClock

    model = torch.nn.Linear(4, 1)
    ckpt = Checkpointer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        every="at_notice",
        save_at_end=False,
    )
    marks = Path(config["marks"])
    rank = spotfit.get_context().get_world_rank()
    enough = False
    while not enough:
        SystemClock().wait(0.05)
        ckpt.step({"step": ckpt.steps + 1})
        if ckpt.steps == 3 and rank == 0:
            (marks / "trains").touch()
        if spotfit.get_preemption_info() is not None:
            (marks / "preempted").touch()
        enough = spotfit.collective.broadcast_from_rank_zero((marks / "enough").exists())
    return ckpt.steps


@pytest.mark.parametrize("name", ["aws_batch", "kubernetes"])
def test_rebalance_recommendation_triggers_a_save_and_no_replacement(
    name: str, tmp_path: Path
) -> None:
    """EC2's rebalance recommendation, and the taint on a node of a cluster."""
    sim = SimProvisioner.with_options(cloud=name, root=str(tmp_path / "cloud"), boot_s=0.1)
    sim.start_simulator()
    try:
        handle = TorchTrainer(
            train,
            train_loop_config={"marks": str(tmp_path)},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
            provisioner=f"sim://{name}?root={sim.root}",
        ).submit()
        eventually((tmp_path / "trains").exists, within_s=240.0)
        journal = Journal(open_store(str(tmp_path / "runs" / "run")), ignore_view_cache=True)
        assert not journal.catch_up().checkpoints
        sim.call_simulator("advise")
        eventually(lambda: journal.catch_up().checkpoints, within_s=120.0)
        (tmp_path / "enough").touch()
        assert handle.result().return_value > 3
        view = journal.catch_up()
        assert len(view.checkpoints) == 1, "one save"
        assert not (tmp_path / "preempted").exists()
        assert (view.notices, view.failure_counts) == ({}, {})
        assert len(sim.call_simulator("machines")) == 2, "no machine was replaced"
    finally:
        sim.call_simulator("leave", {"machines": True})
