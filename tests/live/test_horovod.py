"""Horovod's elastic training in four real workers: kills do not change the weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotfit
import spotfit.horovod.torch as hvd
from spotfit.horovod import HorovodTrainer
from spotfit.model.events import FailureCause
from tests.live.cloud import LiveTestCloud

EPOCHS, BATCH_SIZE, ROWS = 3, 4, 101
BATCHES_PER_EPOCH = 7
"""Of each of the four ranks; the last one has rows of the epoch's begin, as 101 is odd."""


def train(config: dict[str, Any]) -> list[list[float]]:
    """Return the weights. Rank 1 is killed once, after the batch of that number."""
    hvd.init()
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(ROWS, 8, generator=generator)
    sampler = hvd.elastic.ElasticSampler(rows)
    loader = DataLoader(TensorDataset(rows, rows.sum(dim=1)), BATCH_SIZE, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())

    @hvd.elastic.run(every=4)
    def train_epochs(state: Any) -> None:
        for epoch in range(state.epoch, EPOCHS):
            state.epoch = epoch
            for number, (inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                sampler.record_batch(number, BATCH_SIZE)
                state.batches += 1
                state.commit()
                kill_once(config, state.batches)
            scheduler.step()
            sampler.set_epoch(epoch + 1)

    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batches=0
    )
    state.register_reset_callbacks([lambda: note_resume(config, state.batches)])
    train_epochs(state)
    assert state.batches == EPOCHS * BATCHES_PER_EPOCH
    return [weight.flatten().tolist() for weight in model.parameters()]


def kill_once(config: dict[str, Any], batches: int) -> None:
    mark = Path(config["marks"], "killed")
    if hvd.rank() == 1 and batches == config["kill_after"] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def note_resume(config: dict[str, Any], batches: int) -> None:
    if hvd.rank() == 0:
        Path(config["marks"], "resumed").write_text(str(batches))


def fit(cloud: LiveTestCloud, name: str, *, kill_after: int) -> spotfit.Result:
    return cloud.fit(
        train,
        workers=4,
        nodes=2,
        max_failures=1,
        config={"kill_after": kill_after},
        name=name,
        trainer_type=HorovodTrainer,
    )


def test_a_killed_worker_does_not_change_the_weights(cloud: LiveTestCloud) -> None:
    calm = fit(cloud, "calm", kill_after=0)
    assert not (cloud.marks / "resumed").exists(), "callbacks are for restarts"
    # In the middle of the second epoch.
    killed = fit(cloud, "killed", kill_after=11)
    assert killed.return_value == calm.return_value
    assert [one.cause for one in cloud.rounds_closed("killed")] == [FailureCause.WORKER]
    assert int((cloud.marks / "resumed").read_text()) in (4, 8), "a multiple of every=4"
