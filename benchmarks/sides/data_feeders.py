"""`data.py --feeders`: a training that reads images, which feeder processes decode.

Prints the CPU seconds of the training loop's process, and for how long the loop waited for batches.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import spotfit
import spotfit.data
from benchmarks.sides import data_reading


def decode(batch: dict[str, Any]) -> dict[str, Any]:
    images = np.stack([data_reading.decode(jpeg) for jpeg in batch["jpeg"]])
    return {"image": images, "label": batch["label"]}


def train(config: dict[str, int]) -> dict[str, float]:
    shard = spotfit.get_dataset_shard("train")
    batches = iter(shard.iter_torch_batches(batch_size=config["batch_rows"]))
    # The feeders import their libraries before the first batch.
    rows = len(next(batches)["label"])
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    tree_cpu_s, waited_s = data_reading.tree_cpu_s(), shard.waiting_s
    rows += sum(len(batch["label"]) for batch in batches)
    return {
        "rows": rows,
        "wall_s": time.monotonic() - started_s,
        "loop_cpu_s": time.process_time() - started_cpu_s,
        "cpu_s": data_reading.tree_cpu_s() - tree_cpu_s,
        "waited_s": shard.waiting_s - waited_s,
    }


if __name__ == "__main__":
    processes, folder, batch_rows = sys.argv[1:]
    rows = spotfit.data.read_parquet(folder, columns=["jpeg", "label"]).random_shuffle(seed=1)
    with tempfile.TemporaryDirectory() as runs:
        result = spotfit.DataParallelTrainer(
            train,
            train_loop_config={"batch_rows": int(batch_rows)},
            datasets={"train": rows.map_batches(decode)},
            data_feeders=spotfit.data.Feeders(processes=int(processes)) if int(processes) else None,
            scaling_config=spotfit.ScalingConfig(num_workers=1),
            run_config=spotfit.RunConfig(name="fed", storage_path=runs),
            provisioner="local",
        ).fit()
    print(json.dumps(result.return_value))
