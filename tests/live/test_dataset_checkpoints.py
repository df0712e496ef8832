"""A model that trains on a dataset with random augmentation, saved by a `Checkpointer`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spotfit
import spotfit.data
from tests.live.cloud import LiveTestCloud

ROWS = 512
Config = dict[str, Any]


def add_noise(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    noise = np.random.standard_normal(len(batch["x"]))
    return {"x": batch["x"] + 0.1 * noise.astype(np.float32), "y": batch["y"]}


def noisy_line() -> spotfit.data.Dataset:
    rows = [{"x": np.float32(n / ROWS), "y": np.float32(2 * n / ROWS + 1)} for n in range(ROWS)]
    return spotfit.data.from_items(rows).random_shuffle(seed=1).map_batches(add_noise)


def train(config: Config) -> list[float]:
    import torch

    from spotfit.torch import Checkpointer, prepare_model

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shard = spotfit.get_dataset_shard("train")
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=shard, every=2)
    restored = checkpointer.restore()
    for _ in range(restored.epoch if restored else 0, 3):
        for batch in shard.iter_torch_batches(batch_size=16):
            loss = (model(batch["x"][:, None]) - batch["y"][:, None]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step({"loss": loss.item()})
            interrupt(config, checkpointer.steps)
    return [float(value) for parameter in model.parameters() for value in parameter.flatten()]


def interrupt(config: Config, step: int) -> None:
    """Kill rank 2 at the steps of `config`, once each."""
    mark = Path(config["marks"], f"killed-{step}")
    is_target = spotfit.get_context().get_world_rank() == 2
    if step in config.get("kill_at", ()) and is_target and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_workers_reach_the_same_weights(cloud: LiveTestCloud) -> None:
    pytest.importorskip("torch")
    options: dict[str, Any] = {
        "workers": 4,
        "nodes": 2,
        "trainer_type": spotfit.torch.TorchTrainer,
        "datasets": {"train": noisy_line()},
    }
    undisturbed = cloud.fit(train, name="undisturbed", **options)
    killed = cloud.fit(
        train, name="killed", config={"kill_at": [3, 11, 19]}, max_failures=-1, **options
    )
    assert len(list(cloud.marks.glob("killed-*"))) == 3
    assert killed.return_value == undisturbed.return_value
