"""torchft in two real processes: replicas reconnect after a failed round."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import spotfit
from spotfit.client.trainer import TorchTrainer
from spotfit.torch import TorchftConfig
from tests.live.cloud import LiveTestCloud

pytest.importorskip("torchft", reason="torchft is not installed; `pip install torchft`")


def train(config: dict[str, Any]) -> bool:
    import torchft

    rank = spotfit.get_context().get_world_rank()
    torch.manual_seed(rank)
    layer = torch.nn.Linear(1, 1)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=layer.load_state_dict,
        state_dict=layer.state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        replica_id=f"replica-{rank}",
    )
    model = torchft.DistributedDataParallel(manager, layer)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(layer.parameters(), lr=0.1))
    while manager.current_step() < 3:
        optimizer.zero_grad()
        model(torch.rand(4, 1)).sum().backward()
        optimizer.step()
        if rank == 1 and not (failed := Path(config["marks"], "failed")).exists():
            failed.touch()
            raise RuntimeError("a replica fails")
    manager.shutdown()
    weight = layer.weight.item()
    return bool(spotfit.collective.broadcast_from_rank_zero(weight) == weight)


def test_replicas_connect_in_every_round_and_agree(cloud: LiveTestCloud) -> None:
    trainer = cloud.trainer(train, workers=2, nodes=2, max_failures=1, trainer_type=TorchTrainer)
    trainer.backend_config = TorchftConfig({"min_replicas": 2}, backend="gloo")
    assert trainer.fit().return_value is True
    assert (cloud.marks / "failed").exists()
