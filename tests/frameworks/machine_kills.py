"""Kills of workers and machines at a step of a training function, once per run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import spotfit
from spotfit.client.run_handle import RunHandle
from tests.live.cloud import LiveTestCloud

POLL_S = 0.02


def kill_own_worker(marks: str, step: int, *, at_step: int, rank: int) -> None:
    """Kill the worker of `rank` with SIGKILL when it first reaches the step."""
    mark = Path(marks, f"killed-{at_step}")
    if step == at_step and spotfit.get_context().get_world_rank() == rank and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def await_machine_kill(marks: str, step: int, *, at_step: int) -> None:
    """Wait at that step until `kill_machine_of_rank` has killed the machine, once per run."""
    if step == at_step and not Path(marks, "machine-killed").exists():
        rank = spotfit.get_context().get_world_rank()
        Path(marks, f"waiting-{rank}").touch()
        while not Path(marks, "machine-killed").exists():
            time.sleep(POLL_S)


def kill_machine_of_rank(cloud: LiveTestCloud, rank: int, run: RunHandle) -> spotfit.Result:
    """Kill the machine of that rank once it waits in `await_machine_kill`; return the result."""
    cloud.wait_for_mark(f"waiting-{rank}")
    cloud.reclaimer.kill(cloud.node_of_rank(rank))
    cloud.write_mark("machine-killed")
    return run.result()


def read_file(result: spotfit.Result, filename: str) -> bytes:
    """Return a file of the result's checkpoint."""
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        return Path(directory, filename).read_bytes()


Disturbance = Callable[[Any, int], None]
"""`(config, step)`: called before each step of a training function."""


def no_disturbance(config: dict[str, Any], step: int) -> None:
    """Of a run that is compared with disturbed ones."""


def worker_kills(config: dict[str, Any], step: int) -> None:
    """SIGKILL of rank 1 in step 13, and of rank 0 in step 27."""
    kill_own_worker(config["marks"], step, at_step=13, rank=1)
    kill_own_worker(config["marks"], step, at_step=27, rank=0)


def machine_kill(config: dict[str, Any], step: int) -> None:
    """All ranks wait in step 17 for the kill of a machine."""
    await_machine_kill(config["marks"], step, at_step=17)
