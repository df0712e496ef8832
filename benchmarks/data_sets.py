"""The data sets of `data.py`, made by a seed: tables, text and images in Parquet files.

* tables: 200,000 rows of 256 float32, an id and a label; row groups of 2,500 rows, zstd.
* text: 40,000 documents of uint16 tokens with lognormal lengths; row groups of 500.
* images: 4,000 JPEGs of 192 x 192 pixels, about 10 KB each; row groups of 50.
"""

import io
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FILES = 8
SEED = 20_261_126
ROWS = {"tables": 200_000, "text": 40_000, "images": 4_000}
ROW_GROUP_ROWS = {"tables": 2_500, "text": 500, "images": 50}
BATCH_ROWS = {"tables": 256, "text": 64, "images": 64}
MAX_TOKENS = 1_024
IMAGE_SIZE = 192


def create(name: str, folder: Path) -> Path:
    """Return the folder of a data set, which is written on the first call."""
    target, partial = folder / name, folder / f"{name}.partial"
    if target.exists():
        return target
    print(f"Writing the data set {name} …", flush=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rows = ROWS[name] // FILES
    rng = np.random.default_rng(SEED)
    for number in range(FILES):
        table = _TABLES[name](rng, range(number * rows, (number + 1) * rows))
        pq.write_table(
            table,
            partial / f"part-{number:03d}.parquet",
            row_group_size=ROW_GROUP_ROWS[name],
            compression="zstd",
        )
    return partial.rename(target)


def _tables(rng: np.random.Generator, ids: range) -> pa.Table:
    values = rng.standard_normal(len(ids) * 256, dtype=np.float32)
    features = pa.FixedSizeListArray.from_arrays(pa.array(values), 256)
    labels = rng.integers(0, 10, len(ids))
    return pa.table({"id": np.arange(ids.start, ids.stop), "x": features, "label": labels})


def _text(rng: np.random.Generator, ids: range) -> pa.Table:
    lengths = np.clip(rng.lognormal(5.5, 0.9, len(ids)), 8, 4 * MAX_TOKENS).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    # Frequencies like those of words, so that the files compress like text.
    tokens = np.minimum(rng.zipf(1.3, offsets[-1]), 2**16 - 1).astype(np.uint16)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    return pa.table({"id": np.arange(ids.start, ids.stop), "tokens": lists})


def _images(rng: np.random.Generator, ids: range) -> pa.Table:
    jpegs = list(_jpegs(rng, len(ids)))
    labels = rng.integers(0, 10, len(ids))
    return pa.table({"id": np.arange(ids.start, ids.stop), "jpeg": jpegs, "label": labels})


def _jpegs(rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """Yield images of smooth noise, which JPEG encodes to about 10 KB."""
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))
        noise = rng.integers(-12, 13, smooth.shape)
        pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
        target = io.BytesIO()
        Image.fromarray(pixels).save(target, "JPEG", quality=80)
        yield target.getvalue()


_TABLES: dict[str, Callable[[np.random.Generator, range], pa.Table]] = {
    "tables": _tables,
    "text": _text,
    "images": _images,
}

if __name__ == "__main__":
    create(sys.argv[1], Path(sys.argv[2]))
