"""`data_restart.py`: a training that reads images; its process is killed, and started again.

    data_restart.py spotfit|dataloader|ray FOLDER BATCH_ROWS MARKS

Prints the time of the SIGKILL, and that of the first batch of the next process, by one clock.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.sides import data_reading

KILLED_AT = 30
"""Batches that are taken before; the data set has 62."""
SAVE_EVERY = 10
Config = dict[str, Any]


def decode(batch: dict[str, Any]) -> dict[str, Any]:
    images = np.stack([data_reading.decode(jpeg) for jpeg in batch["jpeg"]])
    return {"image": images, "label": batch["label"]}


def take(
    batches: Iterable[Any], marks: str, after_batch: Callable[[], object] = lambda: None
) -> None:
    """Take batches until the SIGKILL, or the first one in the process that follows it."""
    killed = Path(marks, "killed")
    for number, _batch in enumerate(batches, start=1):
        if killed.exists():
            Path(marks, "first").write_text(str(time.time()))
            return
        after_batch()
        if number == KILLED_AT:
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


# ── spotfit: continues at the next row after the snapshot in memory ───────────────────────────────


def train_with_spotfit(config: Config) -> None:
    import spotfit
    from spotfit.torch import Checkpointer, prepare_model

    shard = spotfit.get_dataset_shard("train")
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(model=model, optimizer=optimizer, loader=shard, every=SAVE_EVERY)
    restored = ckpt.restore()
    if restored:
        Path(config["marks"], "continued").write_text(str(ckpt.steps))
    batches = shard.iter_torch_batches(batch_size=config["batch_rows"])
    take(batches, config["marks"], ckpt.step)


def run_spotfit(folder: str, config: Config) -> None:
    import spotfit
    import spotfit.data
    from spotfit.torch import TorchTrainer

    rows = spotfit.data.read_parquet(folder, columns=["jpeg", "label"]).random_shuffle(seed=1)
    TorchTrainer(
        train_with_spotfit,
        train_loop_config=config,
        datasets={"train": rows.map_batches(decode)},
        scaling_config=spotfit.ScalingConfig(num_workers=1),
        run_config=spotfit.RunConfig(
            name="restart",
            storage_path=f"{config['marks']}/runs",
            failure_config=spotfit.FailureConfig(max_failures=1),
        ),
        provisioner="local",
    ).fit()
    continued_at = int(Path(config["marks"], "continued").read_text())
    assert continued_at == KILLED_AT, f"the second process continued at batch {continued_at}"


# ── DataLoader under torchrun: begins again, and reads the batches of before without using them ───


def run_dataloader(folder: str, config: Config) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.1"]
    worker = [__file__, "worker", folder, str(config["batch_rows"]), config["marks"]]
    subprocess.run([*torchrun, *options, *worker], check=True)


def run_worker(folder: str, config: Config) -> None:
    from torch.utils.data import DataLoader

    from benchmarks.sides import data_dataloader

    loader: DataLoader[Any] = DataLoader(
        data_dataloader.RowGroups("images", folder),
        batch_size=config["batch_rows"],
        num_workers=data_dataloader.WORKERS,
    )
    taken = KILLED_AT if Path(config["marks"], "killed").exists() else 0
    take(itertools.islice(loader, taken, None), config["marks"])


# ── Ray Train with Ray Data: begins again, with the rows of before ────────────────────────────────


def train_with_ray(config: Config) -> None:
    import ray.train

    shard = ray.train.get_dataset_shard("train")
    batches = shard.iter_torch_batches(
        batch_size=config["batch_rows"], local_shuffle_buffer_size=800, local_shuffle_seed=1
    )
    take(batches, config["marks"])


def run_ray(folder: str, config: Config) -> None:
    import ray
    import ray.data
    import ray.train
    from ray.train.torch import TorchTrainer

    # As in data_ray.py; one more CPU for the worker.
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(
        num_cpus=5,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 * 2**30,
        runtime_env={"env_vars": environment},
    )
    rows = ray.data.read_parquet(folder, columns=["jpeg", "label"])
    TorchTrainer(
        train_with_ray,
        train_loop_config=config,
        datasets={"train": rows.map_batches(decode, batch_size=config["batch_rows"])},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name="restart",
            storage_path=f"{config['marks']}/runs",
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    ray.shutdown()


SIDES = {
    "spotfit": run_spotfit,
    "dataloader": run_dataloader,
    "worker": run_worker,
    "ray": run_ray,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    side, folder, batch_rows, marks = sys.argv[1:]
    SIDES[side](folder, {"batch_rows": int(batch_rows), "marks": marks})
    if side != "worker":
        times = {name: float(Path(marks, name).read_text()) for name in ("killed", "first")}
        print(json.dumps(times))
