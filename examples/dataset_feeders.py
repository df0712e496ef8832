"""Two machines transform a dataset for two others that train; one of each is killed.

Handwritten digits are augmented by random noise on machines for feeders. One of these machines and
one of those that train are killed without notice, and replaced. The run ends with the weights of a
run without failures.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import spotfit
import spotfit.data
from spotfit.torch import Checkpointer, TorchTrainer, prepare_model
from spotfit_localsim.live.preemption import Reclaimer
from spotfit_provisioners.local.state_dir import LocalCloudDir

FOLDER = Path(tempfile.mkdtemp(prefix="feeders-"))
MACHINES = FOLDER / "machines"
EPOCHS, BATCH = 4, 96


def add_noise(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    # Each process that calls this leaves a mark, for `wait_for_feeders`.
    process = Path("/proc/self/comm").read_text().strip()
    Path(FOLDER, f"{process}-{os.getpid()}").touch()
    noise = np.random.normal(0, 0.5, batch["pixels"].shape)
    return {**batch, "pixels": (batch["pixels"] + noise).astype(np.float32) / 16}


def train(config: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    shard = spotfit.get_dataset_shard("train")
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=shard, every=5)
    restored = checkpointer.restore()
    if restored is None:
        wait_for_feeders(config["processes"])
    for _ in range(restored.epoch if restored else 0, EPOCHS):
        for batch in shard.iter_torch_batches(global_batch_size=BATCH):
            loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["digit"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch lacks types
            optimizer.step()
            checkpointer.step()
            Path(FOLDER, f"step {checkpointer.steps}").touch()
            time.sleep(0.05)  # noqa: TID251  # the steps of a larger model
    return [value.item() for parameter in model.parameters() for value in parameter.flatten()]


def wait_for_feeders(count: int) -> None:
    """Read another dataset until the machines have booted: this training is short."""
    while len(list(FOLDER.glob("spotfit-feeder-*"))) < count:
        for _ in spotfit.get_dataset_shard("other").iter_batches(batch_size=16):
            pass


def start(name: str, feeders: int, dataset: spotfit.data.Dataset) -> spotfit.RunHandle:
    return TorchTrainer(
        train,
        train_loop_config={"processes": feeders},
        datasets={"train": dataset, "other": dataset.limit(64)},
        data_feeders=spotfit.data.Feeders(nodes=feeders, cpus=1, processes=0) if feeders else None,
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(name=name, storage_path=f"{FOLDER}/runs"),
        provisioner=f"local?nodes=2&root={MACHINES}",
    ).submit()


def kill(step: int, kind: str) -> None:
    """Kill a machine after that step, as a spot market does."""
    while not (FOLDER / f"step {step}").exists():
        time.sleep(0.05)  # noqa: TID251  # this is no test
    reclaimer = Reclaimer(LocalCloudDir(MACHINES))
    nodes = reclaimer.running_nodes()
    # Both machines with workers are in one group, each of those with feeders is alone.
    worker = next(node for node in nodes if node.number == 1)
    feeder = next(node for node in nodes if node.group.token != worker.group.token)
    killed = {"worker": worker, "feeder": feeder}[kind]
    print(f"step {step}: kill machine {killed.group.token}/{killed.number}, a {kind}")
    reclaimer.kill(killed)


def main() -> None:
    digits = load_digits()
    rows = [
        {"pixels": pixels, "digit": digit}
        for pixels, digit in zip(digits.data.astype(np.float32), digits.target, strict=True)
    ]
    dataset = spotfit.data.from_items(rows).random_shuffle(seed=1).map_batches(add_noise)

    undisturbed = start("undisturbed", 0, dataset).result()
    for mark in FOLDER.glob("step *"):
        mark.unlink()
    run = start("killed", 2, dataset)
    kill(15, "feeder")
    kill(40, "worker")
    killed = run.result()
    print(f"equal weights: {killed.return_value == undisturbed.return_value}")


if __name__ == "__main__":
    main()
