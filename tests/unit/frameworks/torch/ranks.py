"""Simulated ranks: threads of one process with an all-gather."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from spotfit.torch.checkpoint.save_plan import AllGatherObjectFn

RankResult = TypeVar("RankResult")


def run_on_ranks(
    world_size: int, work: Callable[[int, AllGatherObjectFn], RankResult]
) -> list[RankResult]:
    """Run `work(rank, all_gather)` on each rank and return the results."""
    barrier = Barrier(world_size, timeout=60)
    values: list[Any] = [None] * world_size

    def gather(rank: int) -> AllGatherObjectFn:
        def all_gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            result = list(values)
            barrier.wait()
            return result

        return all_gather

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: work(rank, gather(rank)), range(world_size)))
