"""What processes are doing, seen from beside: their state, and the stacks of their threads."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from spotfit.core.clock import Clock
from spotfit.host import process

PATIENCE_S = 5.0
LARGEST_BYTES = 256 * 1024
_PAUSE_S = 0.05
_SPY_PATIENCE_S = 10.0


def folder_of(scratch: str | Path) -> Path:
    """Where the workers of a node leave their stacks when they are asked for them."""
    return Path(scratch) / "stacks"


def examine(pids: Mapping[int, int], folder: Path, clock: Clock) -> dict[int, str]:
    """By rank, what its process is doing. Takes a few seconds where one does not answer.

    Each worker is asked by a signal, which even one that holds Python's lock answers. Where py-spy
    is installed and allowed to look, it adds the frames of compiled code.
    """
    files = {rank: folder / f"{pid}.txt" for rank, pid in pids.items()}
    before = {rank: _size(file) for rank, file in files.items()}
    states = {rank: process.state_of(pid) for rank, pid in pids.items()}
    for rank, pid in pids.items():
        if files[rank].exists():  # else nobody there listens to the signal: it would kill
            process.kill(pid, process.STACKS_SIGNAL)
    _wait_for(files, before, clock)
    return {
        rank: "\n".join([_head(pid, states[rank]), _added(files[rank], before[rank]), _spied(pid)])
        for rank, pid in pids.items()
    }


def _wait_for(files: Mapping[int, Path], before: Mapping[int, int], clock: Clock) -> None:
    """Until all have written, and nothing more comes."""
    give_up_at = clock.now() + PATIENCE_S
    sizes: dict[int, int] = {}
    while clock.now() < give_up_at:
        clock.wait(_PAUSE_S)
        seen = {rank: _size(file) for rank, file in files.items()}
        if seen == sizes and all(seen[rank] > before[rank] for rank in seen):
            return
        sizes = seen


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _head(pid: int, state: str) -> str:
    return f"process {pid}, which the kernel says is {state or 'gone'}"


def _added(file: Path, before: int) -> str:
    if _size(file) <= before:
        return "It did not tell its stacks: it is stopped, in the kernel, or has just begun."
    with file.open("rb") as stacks:
        stacks.seek(before)
        return stacks.read(LARGEST_BYTES).decode(errors="replace").rstrip()


def _spied(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - a program of this machine, with a number
            [spy, "dump", "--native", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SPY_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(py-spy: {error})"
    told = done.stdout if done.returncode == 0 else done.stderr
    return f"as py-spy sees it:\n{told[:LARGEST_BYTES].decode(errors='replace').rstrip()}"
