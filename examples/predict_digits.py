"""Predict handwritten digits with two workers, then export the model for serving.

    python examples/predict_digits.py

A small network is trained in this process. Two workers on a local machine then predict all images
in 36 shards. In a cloud only `output`, `storage_path` and `provisioner` differ, and a lost machine
costs the shards that it was working on.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import spotfit
from spotfit.prediction import BatchPredictor, TorchPredictor
from spotfit.torch import Checkpointer, export_checkpoint


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
    """Returns digits in place of the scores of the network."""

    def predict_batch(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the most probable digit of each image."""
        scores = super().predict_batch(data, dtype=torch.float32, **kwargs)["predictions"]
        return {"digit": scores.argmax(axis=1)}


def main(folder: Path) -> None:
    trainer = spotfit.DataParallelTrainer(
        train, scaling_config=spotfit.ScalingConfig(num_workers=0)
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None

    digits = load_digits()
    rows = {"image": digits.data / 16, "id": np.arange(len(digits.data))}
    predictor = BatchPredictor.from_checkpoint(checkpoint, DigitPredictor, model=make_model())
    result = predictor.predict(
        rows,
        feature_columns=["image"],
        keep_columns=["id"],
        min_scoring_workers=2,
        max_scoring_workers=2,
        output=folder / "output",
        run_config=spotfit.RunConfig(name="digits", storage_path=folder / "runs"),
        provisioner=f"local?root={folder}/machines",
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
