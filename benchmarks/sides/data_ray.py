"""`data.py` with Ray Data: batches of tensors from a buffer of shuffled rows."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import ray
import ray.data
import torch

from benchmarks.sides import data_reading

BUFFER_ROWS = {"tables": 10_000, "text": 4_000, "images": 800}
COLUMNS = {"tables": ["x", "label"], "text": ["tokens"], "images": ["jpeg", "label"]}
# With two logical CPUs a read followed by a map does not begin: each of both requires one.
LOGICAL_CPUS = 4


def decode(batch: dict[str, Any]) -> dict[str, Any]:
    images = np.stack([data_reading.decode(jpeg) for jpeg in batch["jpeg"]])
    return {"image": images, "label": batch["label"]}


def pad(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"tokens": data_reading.pad(batch["tokens"])}


def begin(name: str, folder: str, batch_rows: int) -> Iterator[dict[str, torch.Tensor]]:
    ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 * 2**30,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.read_parquet(folder, columns=COLUMNS[name])
    if name == "images":
        dataset = dataset.map_batches(decode, batch_size=batch_rows)
    yield from dataset.iter_torch_batches(
        batch_size=batch_rows,
        local_shuffle_buffer_size=BUFFER_ROWS[name],
        local_shuffle_seed=1,
        collate_fn=pad if name == "text" else None,
    )


if __name__ == "__main__":
    name, folder, batch_rows = data_reading.arguments()
    data_reading.measure(lambda: begin(name, folder, batch_rows))
    ray.shutdown()
