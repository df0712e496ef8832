"""Ranks in processes of their own, connected by gloo, which run functions of a test."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

TIMEOUT_S = 100.0


class RankProcesses:
    """Processes that have called `hvd.init()`, on as many nodes as there are local ranks 0."""

    def __init__(self, store: Path, local_ranks: Sequence[int]) -> None:
        # The modules are imported once, as optimizers of torch import for seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "spotfit.horovod.torch"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.is_broken = False
        """Whether a rank does not answer: then the others may wait for it."""
        for rank, local_rank in enumerate(local_ranks):
            pipe, other = context.Pipe()
            arguments = (other, str(store), rank, len(local_ranks), local_rank)
            process = context.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            other.close()  # so that the end of the process can be noticed
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what the function returns on each rank; an exception on any of them fails."""
        assert not self.is_broken, "a rank has not answered in an earlier test"
        self.is_broken = True
        for pipe in self.pipes:
            pipe.send_bytes(cloudpickle.dumps((function, args)))
        answers = [self._receive(rank) for rank in range(len(self.pipes))]
        self.is_broken = False
        return answers

    def _receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(TIMEOUT_S), f"rank {rank} does not answer"
        try:
            error, value = self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join()
            raise AssertionError(f"rank {rank} died: {self.processes[rank].exitcode}") from None
        assert error is None, f"rank {rank}: {error}"
        return value

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def serve_rank(pipe: Any, store: str, rank: int, world_size: int, local_rank: int) -> None:
    """Run functions until the process is killed."""
    import torch
    import torch.distributed as dist

    import spotfit.horovod.torch as hvd

    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    hvd.init()
    while True:
        function, args = cloudpickle.loads(pipe.recv_bytes())
        try:
            answer: tuple[str | None, Any] = None, function(*args)
        except Exception:  # noqa: BLE001 - of the test's function
            answer = traceback.format_exc(), None
        pipe.send(answer)
