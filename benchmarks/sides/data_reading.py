"""What the sides of `data.py` have in common: the batches, and the measurement of a pass.

It imports neither spotfit nor a peer. A side calls `measure` with a function that begins a pass and
yields batches: dictionaries of tensors, for tables `x` and `label`, for text padded `tokens`, for
images uint8 `image` and `label`. All of it is imported before the measurement begins.
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import torch
from PIL import Image

TAG = "SPOTFIT_BENCH_RUN"
MAX_TOKENS = 1_024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def arguments() -> tuple[str, str, int]:
    """Return the name of the data set, its folder or URL, and the rows of a batch."""
    name, folder, batch_rows = sys.argv[1:]
    return name, folder, int(batch_rows)


def measure(begin: Callable[[], Iterator[dict[str, torch.Tensor]]]) -> None:
    """Read a pass; print the numbers of rows, seconds and CPU seconds to the first and last batch.

    The CPU seconds are those of all processes with the tag of the run, from now on.
    """
    torch.set_num_threads(1)
    started_s, started_cpu_s = time.monotonic(), tree_cpu_s()
    first_s = first_cpu_s = 0.0
    rows = batches = 0
    checksum = 0
    for batch in begin():
        if not batches:
            first_s, first_cpu_s = time.monotonic(), tree_cpu_s()
        values = next(iter(batch.values()))
        checksum += int(values[0].ravel()[0] != 0)
        rows += len(values)
        batches += 1
    ended_cpu_s, ended_s = tree_cpu_s(), time.monotonic()
    reading = {
        "rows": rows,
        "batches": batches,
        "checksum": checksum,
        "first_s": first_s - started_s,
        "first_cpu_s": first_cpu_s - started_cpu_s,
        "wall_s": ended_s - started_s,
        "cpu_s": ended_cpu_s - started_cpu_s,
    }
    print(json.dumps(reading), flush=True)


def tree_cpu_s() -> float:
    """Return the CPU seconds of all processes of the run, and of those that they waited for."""
    wanted = f"{TAG}={os.environ[TAG]}".encode()
    total_s = 0.0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # user, system, and both of the children
        total_s += sum(map(int, fields[11:15])) / TICKS_PER_S
    return total_s


def split_url(url: str) -> tuple[str, str]:
    """Return the URL without its options, and the address of the S3 server that they name."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    address = f"{options['scheme']}://{options['endpoint_override']}"
    return f"{parts.scheme}://{parts.netloc}{parts.path}", address


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


def pad(documents: Sequence[Any]) -> torch.Tensor:
    """Return the documents as int64, padded to the longest, at most `MAX_TOKENS`."""
    lengths = [min(len(document), MAX_TOKENS) for document in documents]
    tokens = np.zeros((len(documents), max(lengths)), dtype=np.int64)
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        tokens[row, :length] = document[:length]
    return torch.from_numpy(tokens)


def decode(jpeg: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels of an image."""
    return np.array(Image.open(io.BytesIO(jpeg)).convert("RGB"))
