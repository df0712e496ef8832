"""Describes hung workers from outside: the kernel's process state and the stacks of all threads."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from spotfit.core.clock import Clock
from spotfit.host import process

# A process in uninterruptible sleep does not answer; the leader waits 30 s for all nodes.
DUMP_TIMEOUT_S = 5.0
MAX_DUMP_BYTES = 256 * 1024
_POLL_S = 0.05
_PY_SPY_TIMEOUT_S = 10.0  # it reads the symbols of torch's libraries first


def stacks_dir(scratch: str | Path) -> Path:
    """Return the directory in which `worker.heartbeat` writes stacks, one file per pid."""
    return Path(scratch) / "stacks"


def dump_stacks(pids: Mapping[int, int], directory: Path, clock: Clock) -> dict[int, str]:
    """Return a description of each process of `pids` (rank to pid), by rank.

    Blocks for `DUMP_TIMEOUT_S` if a process does not answer. The workers write their Python stacks
    on a signal, even while a thread holds the GIL. If py-spy is installed and permitted to attach,
    it adds native frames.
    """
    files = {rank: directory / f"{pid}.txt" for rank, pid in pids.items()}
    before = {rank: _size(file) for rank, file in files.items()}
    # Read before the signal, which would end a wait in the kernel.
    states = {rank: process.describe_state(pid) for rank, pid in pids.items()}
    for rank, pid in pids.items():
        # Without the file the worker has not registered its handler, and the signal would kill it.
        if files[rank].exists():
            process.kill(pid, process.STACK_DUMP_SIGNAL)
    # Until all files have grown and stopped growing: the handler writes a stack in several calls.
    deadline = clock.now() + DUMP_TIMEOUT_S
    sizes: dict[int, int] = {}
    while clock.now() < deadline:
        clock.wait(_POLL_S)
        previous, sizes = sizes, {rank: _size(file) for rank, file in files.items()}
        if sizes == previous and all(sizes[rank] > before[rank] for rank in sizes):
            break
    dumps = {}
    for rank, pid in pids.items():
        state = f"process {pid}, kernel state: {states[rank] or 'no such process'}"
        stacks = (
            "No Python stacks: the process is stopped, blocked in the kernel, or still starting."
        )
        if _size(files[rank]) > before[rank]:
            with files[rank].open("rb") as file:
                file.seek(before[rank])  # the file still has the stacks of earlier dumps
                stacks = file.read(MAX_DUMP_BYTES).decode(errors="replace").rstrip()
        dumps[rank] = f"{state}\n{stacks}\n{_run_py_spy(pid)}"
    return dumps


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _run_py_spy(pid: int) -> str:
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return ""
    try:
        completed = subprocess.run(  # noqa: S603 - a local program with a pid as argument
            [py_spy, "dump", "--native", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PY_SPY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy failed: {error}"
    # It fails without ptrace permission, as in most containers: its message says so.
    output = completed.stdout if completed.returncode == 0 else completed.stderr
    return f"py-spy dump --native:\n{output[:MAX_DUMP_BYTES].decode(errors='replace').rstrip()}"
