"""What workers of the GPU tests record, without a framework: each has its own CUDA libraries."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from spotfit.checkpoint.base_checkpointer import BaseCheckpointer
from spotfit.fork_server.server import open_gpu_files

Config = dict[str, Any]
_UPLOAD_POLL_S = 0.05


def record(config: Config, kind: str, **facts: Any) -> None:
    """Append a line that survives this process."""
    path = Path(config["marks"]) / f"{kind}-{config['label']}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def recorded(marks: Path, kind: str, label: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (marks / f"{kind}-{label}.jsonl").read_text().splitlines()]


def recovery_s(marks: Path, label: str, *, step: int) -> float:
    """Return the seconds from the only SIGKILL until `step` was completed again."""
    (kill,) = recorded(marks, "kills", label)
    steps = recorded(marks, "steps", label)
    ends = [one["at"] for one in steps if one["at"] > kill["at"] and one["step"] == step]
    return float(min(ends) - kill["at"])


def die_once(config: Config, rank: int, step: int) -> None:
    """SIGKILL this process, rank 0, at the steps of `kill_at`, `kills` times at each of them."""
    marks = Path(config["marks"])
    if rank != 0 or step not in config.get("kill_at", ()):
        return
    for number in range(config.get("kills", 1)):
        mark = marks / f"killed-{config['label']}-{step}-{number}"
        if not mark.exists():
            mark.touch()
            record(config, "kills", step=step, at=time.time())
            # The other ranks wait in the next step's collective, without this one.
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_uploads(ckpt: BaseCheckpointer) -> None:
    """A save waits while both slots are uploaded, which is not what is measured."""
    for slot in ckpt._slots:
        while slot.report_index is not None and ckpt._channel.status_of(slot.report_index) in (
            "submitted",
            "uploaded",
        ):
            time.sleep(_UPLOAD_POLL_S)


def agent_pid() -> int:
    """Return the agent: the first ancestor that is not a fork server."""
    pid = os.getppid()
    while process_name(pid) == "spotfit-forksrv":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def process_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def parent_process() -> dict[str, Any]:
    """Return what forked this worker, and the GPU files that it has open."""
    pid = os.getppid()
    return {"parent": process_name(pid), "parent_gpus": open_gpu_files(Path(f"/proc/{pid}/fd"))}
