"""Predict handwritten digits on two machines, one of which is lost; then export the model.

    python examples/predict_digits.py

A small network is trained in this process. Two local machines then predict all images in 36
shards; the first machine is killed meanwhile. Each shard has one output.
"""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import spotfit
from spotfit.prediction import BatchPredictor, TorchPredictor
from spotfit.torch import Checkpointer, export_checkpoint
from spotfit_localsim.live.preemption import Reclaimer
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.state_dir import LocalCloudDir


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def train() -> None:
    """Train on all images, and save once at the end."""
    digits = load_digits()
    images = torch.as_tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.as_tensor(digits.target)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, every=200)
    checkpointer.restore()
    for _ in range(200):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        checkpointer.step({"loss": float(loss)})


class DigitPredictor(TorchPredictor):
    """Adds the digit to the scores of the network."""

    def predict_batch(self, data: Any, **kwargs: Any) -> Any:
        """Return the most probable digit of each image."""
        time.sleep(0.1)  # noqa: TID251  # a larger model
        scores = super().predict_batch(data, dtype=torch.float32, **kwargs)["predictions"]
        return {"digit": scores.argmax(axis=1)}


def kill_a_machine(cloud: LocalCloudDir, output: Path) -> None:
    """Kill a machine without notice once there are predictions."""
    reclaimer = Reclaimer(cloud)
    while not list(output.glob("part-*")):
        time.sleep(0.01)  # noqa: TID251
    reclaimer.kill(reclaimer.running_nodes()[0])


def main(folder: Path) -> None:
    trainer = spotfit.DataParallelTrainer(
        train, scaling_config=spotfit.ScalingConfig(num_workers=0)
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None

    digits = load_digits()
    rows = {"image": digits.data / 16, "id": np.arange(len(digits.data))}
    cloud, output = LocalCloudDir(folder / "cloud"), folder / "output"
    threading.Thread(target=kill_a_machine, args=(cloud, output), daemon=True).start()
    predictor = BatchPredictor.from_checkpoint(checkpoint, DigitPredictor, model=make_model())
    result = predictor.predict(
        rows,
        feature_columns=["image"],
        keep_columns=["id"],
        min_scoring_workers=2,
        max_scoring_workers=2,
        output=output,
        run_config=spotfit.RunConfig(name="digits", storage_path=folder / "runs"),
        provisioner=LocalOptions(nodes=2, root=str(cloud.path)),
        predict_options={"rows_per_shard": 50, "output_format": "npz"},
    )
    predictions = result.to_numpy()
    correct = (predictions["digit"] == digits.target).mean()
    print(f"{len(result.shards)} shards, {result.rows} rows, {correct:.0%} correct")

    model, example = make_model(), torch.zeros(2, 64)
    export_checkpoint(checkpoint, folder / "digits.pt2", model=model, example_inputs=(example,))
    program = torch.export.load(folder / "digits.pt2").module()
    images = torch.as_tensor(rows["image"], dtype=torch.float32)
    exported = program(images).argmax(dim=1).numpy()
    print(f"the exported program agrees: {np.array_equal(exported, predictions['digit'])}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
