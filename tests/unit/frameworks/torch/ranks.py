"""Ranks that are threads of one process: each gives something, and gets what all gave."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from spotfit.frameworks.torch.shares import Gather

Told = TypeVar("Told")


def on_ranks(world_size: int, work: Callable[[int, Gather], Told]) -> list[Told]:
    """What `work` returned on each of so many ranks."""
    meeting = Barrier(world_size, timeout=60)
    given: list[Any] = [None] * world_size

    def gather(rank: int) -> Gather:
        def gathered(mine: Any) -> list[Any]:
            given[rank] = mine
            meeting.wait()
            all_s = list(given)
            meeting.wait()
            return all_s

        return gathered

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: work(rank, gather(rank)), range(world_size)))
