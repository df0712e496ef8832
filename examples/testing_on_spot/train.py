"""An ordinary training script, without knowledge of tests or simulated clouds."""

import tempfile
from pathlib import Path

import torch

import spotfit
import spotfit.torch
from spotfit.torch import TorchTrainer


def train(config: dict[str, int]) -> list[float]:
    """Fit a line to points, with a checkpoint in every epoch."""
    torch.manual_seed(0)
    model = spotfit.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        model.load_state_dict(state["model"])
        first = state["epoch"] + 1
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)[spotfit.get_context().get_world_rank() :: 2]
    for epoch in range(first, config["epochs"]):
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "epoch": epoch}
            torch.save(state, Path(directory, "state.pt"))
            spotfit.report(
                {"epoch": epoch, "step": epoch + 1, "loss": loss.item()},
                checkpoint=spotfit.Checkpoint.from_directory(directory),
            )
    return [float(p.detach().sum()) for p in model.parameters()]


def main(epochs: int, storage_path: str, name: str = "line") -> spotfit.Result:
    """Train on two machines."""
    return TorchTrainer(
        train,
        train_loop_config={"epochs": epochs},
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(storage_path=storage_path, name=name),
    ).fit()
