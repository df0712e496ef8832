"""`data.py` with torch's DataLoader: an iterable dataset over row groups, as many scripts have it.

Each of two worker processes reads every second file, permutes the rows of a row group, and yields
them one by one.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.sides import data_reading

WORKERS = 2


class RowGroups(IterableDataset[Any]):
    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.url = folder if "://" in folder else Path(folder).absolute().as_uri()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        rng = np.random.default_rng(number)
        # In the worker process: an S3 client does not survive a fork.
        filesystem, folder = fs.FileSystem.from_uri(self.url)
        listed = filesystem.get_file_info(fs.FileSelector(folder))
        for path in sorted(file.path for file in listed)[number::WORKERS]:
            file = pq.ParquetFile(path, filesystem=filesystem, pre_buffer=True)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield from rows_of(self.name, table, rng.permutation(table.num_rows))


def rows_of(name: str, table: pa.Table, order: Any) -> Iterator[Any]:
    columns = {column: table[column].combine_chunks() for column in table.column_names}
    if name == "text":
        values = columns["tokens"].values.to_numpy()
        offsets = columns["tokens"].offsets.to_numpy()
        for row in order:
            yield values[offsets[row] : offsets[row + 1]]
        return
    labels = columns["label"].to_numpy()
    if name == "tables":
        features = columns["x"].values.to_numpy().reshape(table.num_rows, -1)
        for row in order:
            yield {"x": features[row], "label": labels[row]}
        return
    for row in order:
        image = data_reading.decode(columns["jpeg"][row].as_py())
        yield {"image": image, "label": labels[row]}


def collate_text(documents: list[Any]) -> dict[str, torch.Tensor]:
    return {"tokens": data_reading.pad(documents)}


if __name__ == "__main__":
    name, folder, batch_rows = data_reading.arguments()
    loader = DataLoader(
        RowGroups(name, folder),
        batch_size=batch_rows,
        num_workers=WORKERS,
        collate_fn=collate_text if name == "text" else None,
    )
    data_reading.measure(lambda: iter(loader))
