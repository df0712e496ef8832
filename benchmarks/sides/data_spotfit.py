"""`data.py` with spotfit.data: rows shuffled in windows, batches of tensors, one process."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.sides import data_reading
from spotfit.data import Dataset, read_parquet

COLUMNS = {"tables": ["x", "label"], "text": ["tokens"], "images": ["jpeg", "label"]}


def decode(batch: dict[str, Any]) -> dict[str, Any]:
    images = np.stack([data_reading.decode(jpeg) for jpeg in batch["jpeg"]])
    return {"image": images, "label": batch["label"]}


def pad(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"tokens": data_reading.pad(batch["tokens"])}


def begin(name: str, folder: str, batch_rows: int) -> Iterator[dict[str, torch.Tensor]]:
    dataset: Dataset = read_parquet(folder, columns=COLUMNS[name]).random_shuffle(seed=1)
    if name == "images":
        dataset = dataset.map_batches(decode)
    yield from dataset.iter_torch_batches(
        batch_size=batch_rows, collate_fn=pad if name == "text" else None
    )


if __name__ == "__main__":
    name, folder, batch_rows = data_reading.arguments()
    data_reading.measure(lambda: begin(name, folder, batch_rows))
