"""Ranks with different numbers of batches."""

from __future__ import annotations

import pytest
import torch

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from tests.unit.horovod.rank_processes import RankProcesses


def test_ranks_that_have_joined_contribute_zeros(ranks: RankProcesses) -> None:
    def reduce_batches() -> tuple[list[float], int]:
        # 1, 4 and 2 batches.
        averages = [
            hvd.allreduce(torch.full((2, 2), 3.0 * (hvd.rank() + 1))).mean().item()
            for _ in range((1, 4, 2)[hvd.rank()])
        ]
        return averages, hvd.join()

    results = ranks.run(reduce_batches)
    # 3, 6 and 9 on the ranks: the divisor remains the number of all ranks.
    assert [averages for averages, _ in results] == [[6.0], [6.0, 5.0, 2.0, 2.0], [6.0, 5.0]]
    assert [last for _, last in results] == [1, 1, 1]


def test_collectives_continue_after_join(ranks: RankProcesses) -> None:
    def work() -> list[int]:
        hvd.join()
        gathered: list[int] = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
        return gathered

    assert ranks.run(work) == [[0, 1, 2]] * 3


def test_joined_ranks_take_part_in_steps_of_an_optimizer(ranks: RankProcesses) -> None:
    def train() -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for _ in range(hvd.rank()):
            optimizer.zero_grad()
            (weight * 3.0).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters([weight], root_rank=last)
        values: list[float] = weight.tolist()
        return values

    # Rank 2 makes two steps, the first one with rank 1: -(3 + 3) / 3 - 3 / 3.
    assert ranks.run(train) == [[-3.0] * 3] * 3


def test_other_collectives_are_rejected_while_a_rank_has_joined(ranks: RankProcesses) -> None:
    def work() -> str:
        if hvd.rank() == 0:
            try:
                hvd.join()
            except ConfigError as error:
                # The others would wait for this rank.
                torch.distributed.barrier()
                return str(error)
        hvd.barrier()
        return ""

    assert "another collective" in ranks.run(work)[0]


@pytest.mark.usefixtures("alone")
def test_one_rank_alone_joins_at_once() -> None:
    assert hvd.join() == 0
