"""`data.py` with MosaicML Streaming: MDS shards, shuffled by py1e, two workers.

    data_streaming.py write tables|text|images FILES SHARDS

writes the shards, before the measurement. From S3 they are copied to an empty folder while they are
read. An environment without torchvision gets an empty one: the library imports it for data sets of
images that are not used here.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if importlib.util.find_spec("torchvision") is None:
    # Imported first: it looks for a torchvision that it can use.
    import transformers.feature_extraction_utils  # noqa: F401

    for module in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
        sys.modules[module] = types.ModuleType(module)
    vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
    vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None

import pyarrow.parquet as pq
import torch
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from benchmarks.sides import data_reading

WORKERS = 2
COLUMNS = {
    "tables": {"x": "ndarray:float32:256", "label": "int"},
    "text": {"tokens": "ndarray:uint16"},
    "images": {"jpeg": "bytes", "label": "int"},
}


class Images(StreamingDataset):  # type: ignore[misc]  # not installed here
    def __getitem__(self, at: Any) -> Any:
        row = super().__getitem__(at)
        return {"image": data_reading.decode(row["jpeg"]), "label": row["label"]}


def collate_text(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"tokens": data_reading.pad([row["tokens"] for row in rows])}


def write(name: str, files: str, shards: str) -> None:
    """Write the rows of Parquet files as shards."""
    shutil.rmtree(shards, ignore_errors=True)
    with MDSWriter(out=shards, columns=COLUMNS[name], compression=None) as writer:
        for path in sorted(Path(files).glob("*.parquet")):
            for row in rows_of(name, pq.read_table(path, columns=list(COLUMNS[name]))):
                writer.write(row)


def rows_of(name: str, table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=500):
        columns = {column: batch.column(column) for column in batch.schema.names}
        for row in range(batch.num_rows):
            if name == "text":
                yield {"tokens": columns["tokens"][row].values.to_numpy()}
            elif name == "tables":
                x = columns["x"][row].values.to_numpy()
                yield {"x": x, "label": columns["label"][row].as_py()}
            else:
                yield {key: value[row].as_py() for key, value in columns.items()}


def begin(name: str, shards: str, batch_rows: int) -> Iterator[Any]:
    kind = Images if name == "images" else StreamingDataset
    places = {"local": shards}
    with tempfile.TemporaryDirectory() as empty:
        if "://" in shards:
            remote, os.environ["S3_ENDPOINT_URL"] = data_reading.split_url(shards)
            places = {"remote": remote, "local": empty}
        dataset = kind(**places, shuffle=True, shuffle_seed=1, batch_size=batch_rows)
        yield from DataLoader(
            dataset,
            batch_size=batch_rows,
            num_workers=WORKERS,
            collate_fn=collate_text if name == "text" else None,
        )


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(*sys.argv[2:])
    else:
        name, shards, batch_rows = data_reading.arguments()
        data_reading.measure(lambda: begin(name, shards, batch_rows))
