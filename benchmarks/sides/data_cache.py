"""`data.py --cache`: a pass of spotfit.data, whose rows are in files of a cache or not.

Arguments: the data set, its URL, the rows of a batch, the directory of the cache or '', and the
number of passes before the one that is measured.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.sides import data_reading
from benchmarks.sides.data_spotfit import COLUMNS, decode, pad
from spotfit.data import DataIterator, Dataset, read_parquet

DISK_BYTES = 4 * 2**30


def open_rows(name: str, url: str, directory: str) -> DataIterator:
    rows: Dataset = read_parquet(url, columns=COLUMNS[name])
    if name == "images":
        rows = rows.map_batches(decode)
    if directory:
        rows = rows.cache(disk_bytes=DISK_BYTES, directory=directory)
    return rows.random_shuffle(seed=1).iterator()


def main() -> None:
    name, url, batch_rows, directory, passes = sys.argv[1:]
    rows = open_rows(name, url, directory)

    def begin() -> Iterator[dict[str, torch.Tensor]]:
        yield from rows.iter_torch_batches(
            batch_size=int(batch_rows), collate_fn=pad if name == "text" else None
        )

    for _ in range(int(passes)):
        for _ in begin():
            pass
    data_reading.measure(begin)


if __name__ == "__main__":
    main()
