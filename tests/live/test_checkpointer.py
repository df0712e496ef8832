"""Checkpointer in real processes: killed, shrunk, grown or damaged, a training ends as it would."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotfit
from spotfit.client.trainers import TorchTrainer
from spotfit.torch import Checkpointer, prepare_data_loader, prepare_model
from tests.live.cloud import Cloud

Config = dict[str, Any]
SAMPLES = 96
EPOCHS = 2


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[int, torch.Tensor]:
        return place, torch.full((8,), place / SAMPLES)


def train(config: Config) -> list[list[float]]:
    """Two epochs with dropout, momentum and a schedule; the weights at the end, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    world_size = spotfit.get_context().get_world_size()
    rank = spotfit.get_context().get_world_rank()
    torch.manual_seed(rank)
    blank = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 1))
    model = prepare_model(blank, parallel_strategy=config["strategy"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    batch = SAMPLES // 8 // world_size
    loader = prepare_data_loader(DataLoader(Numbered(), batch_size=batch, shuffle=True))
    ckpt = Checkpointer(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, every=config["every"]
    )
    restored = ckpt.restore()
    begun = restored.step if restored else 0
    (Path(config["marks"]) / f"begun-{begun}-of-{world_size}").touch()
    for epoch in range(restored.epoch if restored else 0, EPOCHS):
        if world_size > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for places, inputs in loader:
            loss = (model(inputs) - inputs.mean()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen = Path(config["marks"]) / f"seen-{epoch}-{ckpt.steps}-{rank}-{world_size}"
            seen.write_text(" ".join(str(int(place)) for place in places))
            ckpt.step({"loss": loss.item()})
            meet(config, ckpt.steps, rank)
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [weight.flatten().tolist() for weight in whole.values()] if rank == 0 else []


def meet(config: Config, step: int, rank: int) -> None:
    """Die by SIGKILL at that step, the first time one comes there."""
    dies = Path(config["marks"]) / "died"
    if step == config.get("dies_at") and rank == 0 and not dies.exists():
        dies.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fitted(cloud: Cloud, name: str, **config: Any) -> spotfit.Result:
    config = {"strategy": "ddp", "every": 3, **config}
    return cloud.fit(train, workers=2, name=name, kind=TorchTrainer, max_failures=2, config=config)


def test_a_killed_training_ends_as_an_undisturbed_one(cloud: Cloud) -> None:
    for strategy in ("ddp", "fsdp2"):
        undisturbed = fitted(cloud, f"calm-{strategy}", strategy=strategy)
        (cloud.marks / "died").unlink(missing_ok=True)
        killed = fitted(cloud, f"killed-{strategy}", strategy=strategy, dies_at=11)
        assert len(cloud.closed(f"killed-{strategy}")) == 1
        assert (cloud.marks / "begun-9-of-2").exists(), "from the third snapshot"
        assert killed.return_value == undisturbed.return_value
