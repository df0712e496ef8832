"""States of elastic training outside of workers: copies in memory, and synchronization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spotfit.horovod.torch as hvd
from tests.unit.horovod.rank_processes import RankProcesses


@pytest.mark.usefixtures("alone")
def test_restore_returns_to_the_last_commit() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=3, losses=[1.0])
    state.commit()
    saved = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    state.epoch = 4
    state.losses.append(0.5)
    state.restore()
    assert model.weight.equal(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state_dict()["state"]
    assert (state.epoch, state.losses) == (3, [1.0])


@pytest.mark.usefixtures("alone")
def test_a_state_without_commit_remains() -> None:
    state = hvd.elastic.ObjectState(epoch=1)
    state.epoch = 2
    state.restore()
    assert state.epoch == 2


def test_all_ranks_receive_the_state_of_rank_0(ranks: RankProcesses) -> None:
    def sync() -> Any:
        torch.manual_seed(hvd.rank())
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=hvd.rank() + 1)
        sampler = hvd.elastic.ElasticSampler(range(30))
        sampler.set_epoch(hvd.rank())
        state = hvd.elastic.TorchState(
            model, optimizer, scheduler=scheduler, sampler=sampler, name=f"rank {hvd.rank()}"
        )
        state.sync()
        assert state.scheduler is scheduler, "the object remains"
        rates = [group["lr"] for group in optimizer.param_groups]
        weights = model.weight.flatten().tolist()
        return weights, rates, scheduler.step_size, sampler.epoch, state.name

    results = ranks.run(sync)
    assert results[0][1:] == ([0.1], 1, 0, "rank 0")
    assert results[1:] == [results[0]] * 2


def test_objects_without_tensors_receive_those_of_rank_0(ranks: RankProcesses) -> None:
    def sync() -> list[Any]:
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=hvd.rank(), x=[1])
        state.sync()
        return [state.step, state.x]

    assert ranks.run(sync) == [[0, [1]]] * 3


@pytest.mark.usefixtures("alone")
def test_a_reset_calls_the_callbacks_in_their_order() -> None:
    calls: list[int] = []
    state = hvd.elastic.ObjectState()
    state.register_reset_callbacks([lambda: calls.append(1), lambda: calls.append(2)])
    state.on_reset()
    state.check_host_updates()
    assert calls == [1, 2]
