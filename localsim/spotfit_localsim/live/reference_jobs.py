"""Small trainings with a known result, which injected faults must not change."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import spotfit
from spotfit.host.system import SystemClock

_MEMORY_KILL_TIMEOUT_S = 30.0


def train_hash_chain(config: dict[str, Any]) -> str:
    """A chain of hashes with a barrier per step; every rank saves its own file."""
    state: dict[str, Any] = {"step": 0, "steps": 0, "chain": ""}
    if saved := spotfit.get_checkpoint():
        with saved.as_directory() as folder:
            state = json.loads(
                _rank_file(folder, spotfit.get_context().get_world_rank()).read_text()
            )
    for step in range(state["step"] + 1, config["steps"] + 1):
        spotfit.collective.barrier()
        _exceed_memory_once(config.get("memory_use"), step)
        state = {
            "step": step,
            "steps": state["steps"] + 1,
            "chain": next_chain_digest(state["chain"], step),
        }
        print(f"step {step}", flush=True)  # noqa: T201 - checked after the run
        SystemClock().wait(config["step_s"])
        _report(state, config, json.dumps(state).encode())
    return str(state["chain"])


def expected_hash_chain(steps: int) -> str:
    """Return the result of `train_hash_chain` without running it."""
    chain = ""
    for step in range(1, steps + 1):
        chain = next_chain_digest(chain, step)
    return chain


def train_gradient_descent(config: dict[str, Any]) -> str:
    """Gradients of four ranks, all-reduced by gloo; returns the hash of the final weights."""
    import torch
    import torch.distributed as dist

    rank = spotfit.get_context().get_world_rank()
    state: dict[str, Any] = {"step": 0, "steps": 0, "weights": torch.linspace(-1.0, 1.0, 64)}
    if saved := spotfit.get_checkpoint():
        with saved.as_directory() as folder:
            state = torch.load(_rank_file(folder, rank))
    for step in range(state["step"] + 1, config["steps"] + 1):
        # Depends on rank and step, so that the sum shows a missing or stale rank.
        gradient = torch.sin(state["weights"] * step + rank)
        dist.all_reduce(gradient)
        weights = state["weights"] - 0.05 * gradient
        state = {"step": step, "steps": state["steps"] + 1, "weights": weights}
        SystemClock().wait(config["step_s"])
        body = io.BytesIO()
        torch.save(state, body)
        _report(state, config, body.getvalue())
    # A digest of the bytes: equal only if every operation was.
    return hashlib.sha256(state["weights"].numpy().tobytes()).hexdigest()


def next_chain_digest(chain: str, step: int) -> str:
    """Return the next link of the chain."""
    return hashlib.sha256(f"{chain}/{step}".encode()).hexdigest()


def _exceed_memory_once(memory_use: dict[str, Any] | None, step: int) -> None:
    """Allocate memory at a step of one rank, once in a run, until its machine is killed."""
    if memory_use is None or step != memory_use["step"]:
        return
    marker = Path(memory_use["marker"])
    if spotfit.get_context().get_world_rank() != memory_use["rank"] or marker.exists():
        return
    marker.touch()
    allocated = b"x" * memory_use["size_bytes"]
    SystemClock().wait(_MEMORY_KILL_TIMEOUT_S)
    raise MemoryError(f"not killed with {len(allocated)} bytes")


def _rank_file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"rank-{rank}")


def _report(state: dict[str, Any], config: dict[str, Any], body: bytes) -> None:
    metrics = {"step": state["step"], "steps": state["steps"]}
    # Reports without files in between: both kinds of report are matched by index.
    if state["step"] % config["save_every"]:
        spotfit.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        _rank_file(folder, spotfit.get_context().get_world_rank()).write_bytes(body)
        spotfit.report(metrics, checkpoint=spotfit.Checkpoint.from_directory(folder))
