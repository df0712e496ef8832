"""Small trainings whose result is known: what chaos lets happen to them must not change it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import spotfit
from spotfit.host.clocks import SystemClock


def count(config: dict[str, Any]) -> str:
    """A chain of digests, a link a step, in lock step; every rank saves its own file."""
    state: dict[str, Any] = {"step": 0, "steps": 0, "chain": ""}
    if saved := spotfit.get_checkpoint():
        with saved.as_directory() as folder:
            state = json.loads(_file(folder, spotfit.get_context().get_world_rank()).read_text())
    for step in range(state["step"] + 1, config["steps"] + 1):
        spotfit.collective.barrier()
        state = {"step": step, "steps": state["steps"] + 1, "chain": link(state["chain"], step)}
        SystemClock().wait(config["pace_s"])
        _report(state, config, json.dumps(state).encode())
    return str(state["chain"])


def counted(steps: int) -> str:
    """What `count` returns, by a way on which nothing can happen."""
    chain = ""
    for step in range(1, steps + 1):
        chain = link(chain, step)
    return chain


def descend(config: dict[str, Any]) -> str:
    """Gradients of four ranks, summed over gloo; the digest of the weights at the end."""
    import torch
    import torch.distributed as dist

    rank = spotfit.get_context().get_world_rank()
    state: dict[str, Any] = {"step": 0, "steps": 0, "weights": torch.linspace(-1.0, 1.0, 64)}
    if saved := spotfit.get_checkpoint():
        with saved.as_directory() as folder:
            state = torch.load(_file(folder, rank))
    for step in range(state["step"] + 1, config["steps"] + 1):
        gradient = torch.sin(state["weights"] * step + rank)
        dist.all_reduce(gradient)
        weights = state["weights"] - 0.05 * gradient
        state = {"step": step, "steps": state["steps"] + 1, "weights": weights}
        SystemClock().wait(config["pace_s"])
        _report(state, config, _torch_bytes(state))
    return hashlib.sha256(state["weights"].numpy().tobytes()).hexdigest()


def link(chain: str, step: int) -> str:
    """The next one of the chain."""
    return hashlib.sha256(f"{chain}/{step}".encode()).hexdigest()


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"rank-{rank}")


def _report(state: dict[str, Any], config: dict[str, Any], body: bytes) -> None:
    told = {"step": state["step"], "steps": state["steps"]}
    if state["step"] % config["save_every"]:
        spotfit.report(told)
        return
    with tempfile.TemporaryDirectory() as folder:
        _file(folder, spotfit.get_context().get_world_rank()).write_bytes(body)
        spotfit.report(told, checkpoint=spotfit.Checkpoint.from_directory(folder))


def _torch_bytes(state: dict[str, Any]) -> bytes:
    import io

    import torch

    body = io.BytesIO()
    torch.save(state, body)
    return body.getvalue()
