"""A device mesh of data and tensor parallel ranks that the script creates, as torchtitan does.

    spotfit run --workers 4 --provisioner 'local?nodes=2' examples/torchtitan_style.py --tp 2

The model is split over the mesh by `parallelize_module` and `fully_shard`. A checkpoint manager
saves stateful objects with `torch.distributed.checkpoint` (DCP); `spotfit.report` commits the files
of all ranks as one checkpoint, which a group of any size can load. The lines that mention spotfit
are the only ones that a script for torchrun does not have.
"""

import argparse
import hashlib
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import spotfit

WIDTH, LAYERS, BATCH = 32, 3, 64


class FeedForward(nn.Module):
    """A block whose layers `parallelize` splits by columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.w2(functional.silu(self.w1(self.norm(hidden))))
        return output


class Classifier(nn.Module):
    """Images of digits to the scores of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleDict({str(number): FeedForward() for number in range(LAYERS)})
        self.output = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(images)
        for layer in self.layers.values():
            hidden = layer(hidden)
        scores: torch.Tensor = self.output(hidden)
        return scores


def parallelize(model: Classifier, mesh: DeviceMesh) -> Classifier:
    """Split the blocks over the tensor parallel ranks, then all parameters over the others."""
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


class AppState(Stateful):
    """Parameters and optimizer state, by names that do not depend on the mesh."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class TrainState(Stateful):
    """The step, from which the batches follow."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class CheckpointManager:
    """Saves the states every `interval` steps, and loads the last checkpoint."""

    def __init__(self, states: dict[str, Stateful], *, interval: int) -> None:
        self.states, self.interval = states, interval

    def save(self, step: int, loss: float) -> None:
        """Report the files of all ranks, which are uploaded in the background."""
        if step % self.interval:
            return
        folder = tempfile.mkdtemp()
        save_shards(self.states, checkpoint_id=folder)
        spotfit.report(
            {"step": step, "loss": loss},
            checkpoint=spotfit.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"step-{step}",
            checkpoint_upload_mode=spotfit.CheckpointUploadMode.ASYNC,
        )

    def load(self) -> None:
        if checkpoint := spotfit.get_checkpoint():
            with checkpoint.as_directory() as folder:
                load_shards(self.states, checkpoint_id=folder)


def digest_of_all_ranks(model: nn.Module) -> str:
    shards: list[Any] = [one.detach() for one in model.parameters()]  # DTensors
    own = hashlib.sha256(b"".join(one.to_local().numpy().tobytes() for one in shards))
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, own.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.0, help="longer steps, for a test")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    sizes = (dist.get_world_size() // arguments.tp, arguments.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = parallelize(Classifier(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits).float() / 16, torch.tensor(classes)

    progress = TrainState()
    manager = CheckpointManager(
        {"app": AppState(model, optimizer), "train_state": progress}, interval=arguments.interval
    )
    manager.load()
    if dist.get_rank() == 0:
        print(f"starts at step {progress.step}")
    while progress.step < arguments.steps:
        rng = torch.Generator().manual_seed(progress.step)
        chosen = torch.randint(len(images), (BATCH,), generator=rng)
        own = chosen.chunk(sizes[0])[mesh.get_local_rank("dp_shard")]
        loss: Any = functional.cross_entropy(model(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(arguments.step_s)  # noqa: TID251  # a step of real work
        progress.step += 1
        manager.save(progress.step, loss.item())
    digest = digest_of_all_ranks(model)
    if dist.get_rank() == 0:
        print(f"weights {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
