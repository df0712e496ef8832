"""`data.py` with Hugging Face datasets: streaming, shards and a buffer shuffled, two workers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader

from benchmarks.sides import data_reading

WORKERS = 2
BUFFER_ROWS = {"tables": 10_000, "text": 4_000, "images": 800}
COLUMNS = {"tables": ["x", "label"], "text": ["tokens"], "images": ["jpeg", "label"]}


def decode(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": data_reading.decode(row["jpeg"]), "label": row["label"]}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if "tokens" in rows[0]:
        return {"tokens": data_reading.pad([row["tokens"] for row in rows])}
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def begin(name: str, folder: str, batch_rows: int) -> Iterator[dict[str, torch.Tensor]]:
    options = None
    if "://" in folder:
        folder, address = data_reading.split_url(folder)
        options = {"client_kwargs": {"endpoint_url": address}}
    dataset = load_dataset(
        "parquet",
        data_files=f"{folder}/*.parquet",
        split="train",
        streaming=True,
        columns=COLUMNS[name],
        storage_options=options,
    )
    dataset = dataset.shuffle(seed=1, buffer_size=BUFFER_ROWS[name])
    if name == "images":
        # Lists of pixels would take most of the time.
        dataset = dataset.map(decode, remove_columns=["jpeg"])
    dataset = dataset.with_format("numpy" if name != "images" else None)
    yield from DataLoader(dataset, batch_size=batch_rows, num_workers=WORKERS, collate_fn=collate)


if __name__ == "__main__":
    name, folder, batch_rows = data_reading.arguments()
    data_reading.measure(lambda: begin(name, folder, batch_rows))
