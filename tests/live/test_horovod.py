"""Horovod's elastic training in four real workers: kills do not change the weights."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotfit.horovod.torch as hvd
from spotfit.client.run_handle import RunHandle
from spotfit.horovod import HorovodTrainer
from spotfit.model.events import FailureCause
from tests.live.cloud import LiveTestCloud, eventually

EPOCHS, BATCH_SIZE, ROWS = 3, 4, 101
BATCHES_PER_EPOCH = 7
"""Of each of the four ranks; the last one has rows of the epoch's begin, as 101 is odd."""
ROWS_OF_RESIZED_GROUP = 96


def train(config: dict[str, Any]) -> list[list[float]]:
    """Return the weights. `interrupt` says what happens after the batch of that number."""
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
                interrupt(config, state.batches)
            scheduler.step()
            sampler.set_epoch(epoch + 1)

    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batches=0
    )
    state.register_reset_callbacks([lambda: note_resume(config, state.batches)])
    train_epochs(state)
    assert state.batches == EPOCHS * BATCHES_PER_EPOCH
    return [weight.flatten().tolist() for weight in model.parameters()]


def interrupt(config: dict[str, Any], batches: int) -> None:
    """Kill rank 1 once, or let all ranks wait until a machine was killed."""
    mark = Path(config["marks"], "killed")
    if batches != config["interrupted_after"] or mark.exists():
        return
    if config["lost"] == "worker" and hvd.rank() == 1:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while config["lost"] == "machine" and not mark.exists():
        Path(config["marks"], f"waiting-{hvd.rank()}").touch()
        time.sleep(0.02)


def note_resume(config: dict[str, Any], batches: int) -> None:
    if hvd.rank() == 0:
        Path(config["marks"], "resumed").write_text(str(batches))


def record_rows(config: dict[str, Any]) -> Any:
    """Return the rows of all ranks with their epochs, and the group's size in each step.

    Four workers wait in the first epoch until machines are lost; two continue slowly, so that the
    group grows again within the epoch.
    """
    hvd.init()
    rows = torch.arange(ROWS_OF_RESIZED_GROUP)
    sampler = hvd.elastic.ElasticSampler(rows)
    loader = DataLoader(TensorDataset(rows), batch_size=1, sampler=sampler)

    @hvd.elastic.run(every=1)
    def train_epochs(state: Any) -> None:
        for epoch in range(state.epoch, 2):
            state.epoch = epoch
            for number, (batch,) in enumerate(loader):
                is_first_round = not Path(config["marks"], "lost").exists()
                if is_first_round and len(state.sizes) == 3:
                    signal.pause()
                time.sleep(0.5 if hvd.size() == 2 else 0)
                state.rows = [*state.rows, *([epoch, row] for row in hvd.allgather(batch).tolist())]
                state.sizes = [*state.sizes, hvd.size()]
                sampler.record_batch(number, 1)
                # Two steps of two workers read as many rows as one of four: the rest is divisible.
                if hvd.size() == 4 or number % 2 == 1:
                    state.commit()
            sampler.set_epoch(epoch + 1)

    state = hvd.elastic.ObjectState(sampler=sampler, epoch=0, rows=[], sizes=[])
    train_epochs(state)
    return state.rows, state.sizes


def submit(
    cloud: LiveTestCloud, name: str, *, lost: str = "nothing", interrupted_after: int = 0
) -> RunHandle:
    return cloud.submit(
        train,
        workers=4,
        nodes=2,
        max_failures=1,
        config={"lost": lost, "interrupted_after": interrupted_after},
        name=name,
        trainer_type=HorovodTrainer,
    )


def test_a_killed_worker_and_a_killed_machine_do_not_change_the_weights(
    cloud: LiveTestCloud,
) -> None:
    calm = submit(cloud, "calm").result(60)
    resumed = cloud.marks / "resumed"
    assert not resumed.exists(), "callbacks are for restarts"
    # In the middle of the second epoch.
    killed = submit(cloud, "worker", lost="worker", interrupted_after=11).result(60)
    assert killed.return_value == calm.return_value
    assert [one.cause for one in cloud.rounds_closed("worker")] == [FailureCause.WORKER]
    assert int(resumed.read_text()) in (4, 8), "a multiple of every=4"
    resumed.unlink()
    (cloud.marks / "killed").unlink()
    run = submit(cloud, "machine", lost="machine", interrupted_after=11)
    for rank in range(4):
        cloud.wait_for_mark(f"waiting-{rank}")
    cloud.reclaimer.kill(cloud.node_of_rank(3, "machine"))
    cloud.write_mark("killed")
    assert run.result(60).return_value == calm.return_value
    assert [one.cause for one in cloud.rounds_closed("machine")] == [FailureCause.PREEMPTION]
    assert int(resumed.read_text()) in (4, 8)


def test_a_resized_group_trains_on_each_row_of_an_epoch_once(cloud: LiveTestCloud) -> None:
    """Four workers, two after the loss of two machines, and four again."""
    run = cloud.submit(
        record_rows,
        workers=(2, 4),
        nodes=4,
        trainer_type=HorovodTrainer,
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
    )
    eventually(lambda: len(cloud.view().checkpoints) >= 2)
    cloud.write_mark("lost")
    cloud.lose_ranks(2, 3)
    cloud.wait_for_saves_of(2)
    cloud.reclaimer.set_capacity(None)
    rows, sizes = run.result(90).return_value
    assert [size for size, _ in itertools.groupby(sizes)] == [4, 2, 4]
    each_once = {(epoch, row): 1 for epoch in range(2) for row in range(ROWS_OF_RESIZED_GROUP)}
    assert Counter(map(tuple, rows)) == each_once
