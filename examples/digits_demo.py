"""The whole story in a minute: handwritten digits, four workers on two nodes, both nodes lost.

Real data, a small convolutional net, checkpoints in an S3 server on loopback. One node is
reclaimed with notice, one is killed without a word; then the same training runs undisturbed, and
the two results must be equal, bit for bit. `make demo` runs it.

For a cloud, change `provisioner=` and `storage_path=`; nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

import spotfit
from spotfit.client.story import read_story
from spotfit.store.opening import open_store
from spotfit.torch import TorchTrainer, prepare_model
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.reclaimer import Reclamation, at_step, reclaiming

WORKERS, NODES = 4, 2
BATCH, EPOCHS, SAVE_EVERY = 16, 30, 20
SEED = 7
BUCKET = "spotfit-demo"
PLAN = [at_step(120, node=1, notice_s=6.0), at_step(400, node=0)]
GOOD = 0.97
console = Console()


# --- what is trained --------------------------------------------------------------------------


def train(config: dict[str, Any]) -> float:
    """On every worker: go on from the last checkpoint, and return the accuracy at the end."""
    import numpy as np
    import torch
    from torch import nn

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    context = spotfit.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    images, labels = (torch.from_numpy(config[part]) for part in ("images", "labels"))

    # Buckets that are never rearranged add up in the same order after a restart.
    model = prepare_model(digits_net(), parallel_strategy_kwargs={"find_unused_parameters": True})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    done = 0
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory, "state.pt"))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]

    per_epoch = len(images) // (config["batch"] * world_size)
    for step in range(done, per_epoch * config["epochs"]):
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((config["seed"], epoch)).permutation(len(images))
        chosen = order[place * world_size + rank :: per_epoch * world_size][: config["batch"]]
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(config["diary"], rank, step + 1)
        metrics = {"step": step + 1, "epoch": epoch, "loss": round(loss.item(), 4)}
        if (step + 1) % config["save_every"]:
            spotfit.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            if rank == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                }
                torch.save(state, Path(directory, "state.pt"))
            mine = spotfit.Checkpoint.from_directory(directory) if rank == 0 else None
            spotfit.report(metrics, checkpoint=mine)
    with torch.no_grad():
        guesses = model.module(torch.from_numpy(config["held_out"])).argmax(dim=1)
        return float((guesses == torch.from_numpy(config["held_out_labels"])).float().mean())


def digits_net() -> Any:
    """Two convolutions and a line."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def note(diary: str, rank: int, step: int) -> None:
    """For the timeline below: which process made which step, and when."""
    if rank == 0:
        with open(diary, "a") as file:
            file.write(f"{os.getpid()} {step} {time.time()}\n")


def digits() -> dict[str, Any]:
    """1,797 images of 8 × 8 points; every fifth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16.0).astype("float32")[:, None]
    labels = found.target.astype("int64")
    held_out = [n % 5 == 0 for n in range(len(images))]
    trained = [not held for held in held_out]
    return {
        "images": images[trained],
        "labels": labels[trained],
        "held_out": images[held_out],
        "held_out_labels": labels[held_out],
    }
