"""A dataset that is read from Parquet trains a model while workers are killed.

Handwritten digits are written to a directory as Parquet, shuffled in every epoch, and augmented by
random noise. Two workers share the rows; one of them is killed twice. The run continues at the
next row each time, and ends with the weights of a run without failures.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import spotfit
import spotfit.data
from spotfit.torch import Checkpointer, TorchTrainer, prepare_model

FOLDER = Path(tempfile.mkdtemp(prefix="digits-"))
EPOCHS, BATCH = 4, 96


def add_noise(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    noise = np.random.normal(0, 0.5, batch["pixels"].shape)
    return {**batch, "pixels": (batch["pixels"] + noise).astype(np.float32) / 16}


def train(config: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    shard = spotfit.get_dataset_shard("train")
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=shard, every=5)
    restored = checkpointer.restore()
    for _ in range(restored.epoch if restored else 0, EPOCHS):
        for batch in shard.iter_torch_batches(global_batch_size=BATCH):
            loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["digit"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch lacks types
            optimizer.step()
            checkpointer.step({"loss": loss.item()})
            kill_a_worker(config["kill_at"], checkpointer.steps)
    return [value.item() for parameter in model.parameters() for value in parameter.flatten()]


def kill_a_worker(steps: list[int], step: int) -> None:
    mark = FOLDER / f"killed at {step}"
    if step in steps and spotfit.get_context().get_world_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fit(name: str, kill_at: list[int], dataset: spotfit.data.Dataset) -> spotfit.Result:
    return TorchTrainer(
        train,
        train_loop_config={"kill_at": kill_at},
        datasets={"train": dataset},
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(
            name=name,
            storage_path=str(FOLDER / "runs"),
            failure_config=spotfit.FailureConfig(max_failures=-1),
        ),
        provisioner="local?nodes=2",
    ).fit()


def main() -> None:
    digits = load_digits()
    rows = [
        {"pixels": pixels, "digit": digit}
        for pixels, digit in zip(digits.data.astype(np.float32), digits.target, strict=True)
    ]
    spotfit.data.from_items(rows).write_parquet(str(FOLDER / "digits"))

    stored = spotfit.data.read_parquet(str(FOLDER / "digits"))
    dataset = stored.random_shuffle(seed=1).map_batches(add_noise)
    undisturbed = fit("undisturbed", [], dataset)
    killed = fit("killed", [7, 40], dataset)
    kills = len(list(FOLDER.glob("killed at *")))
    print(f"{kills} kills; equal weights: {killed.return_value == undisturbed.return_value}")
    print(f"final metrics: {killed.metrics}")


if __name__ == "__main__":
    main()
