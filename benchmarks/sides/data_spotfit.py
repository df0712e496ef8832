"""`data.py` with spotfit.data, shuffled rows in windows; one process, rank 0 of 1."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow as pa
import torch

from benchmarks.sides import data_reading
from spotfit import data
from spotfit.data.batches import to_batch
from spotfit.data.loader import RankReader
from spotfit.data.order import OrderSettings
from spotfit.data.torch_tensors import to_tensors

LANES = 4
WINDOW_ROWS = {"tables": 2_500, "text": 1_000, "images": 200}
COLUMNS = {"tables": ["x", "label"], "text": ["tokens"], "images": ["jpeg", "label"]}


class Decode:
    """Decodes the images of a block."""

    name = identity = "decode"
    runs_user_code = True

    def bind(self) -> Callable[[pa.Table], pa.Table]:
        return decode_block


def decode_block(block: pa.Table) -> pa.Table:
    import numpy as np

    images = np.stack([data_reading.decode(jpeg.as_py()) for jpeg in block["jpeg"]])
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    return pa.table({"image": tensors, "label": block["label"]})


def begin(name: str, folder: Path, batch_rows: int) -> Iterator[dict[str, torch.Tensor]]:
    dataset: Any = data.read_parquet(str(folder), columns=COLUMNS[name])
    if name == "images":
        dataset = dataset.with_transform(Decode())
    settings = OrderSettings(1, LANES, WINDOW_ROWS[name], "rows", max(batch_rows // LANES, 8))
    for block in RankReader(dataset, settings).steps(batch_rows):
        batch = to_batch(block)
        if name == "text":
            yield {"tokens": data_reading.pad(batch["tokens"])}
        else:
            yield to_tensors(batch)


if __name__ == "__main__":
    name, folder, batch_rows = data_reading.arguments()
    data_reading.measure(lambda: begin(name, folder, batch_rows))
