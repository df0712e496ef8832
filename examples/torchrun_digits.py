"""A script for torchrun that also survives the loss of its machines.

    spotfit run --workers 4 --provisioner 'local?nodes=2' examples/torchrun_digits.py --epochs 3

The lines marked with (+) are added: they save the training state and continue from it. Without them
the script also runs, and starts again from the beginning after a loss.
"""

import argparse
import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from spotfit.torch import Checkpointer  # (+)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.0, help="longer steps, for a test")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=16, sampler=sampler)
    layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    # The order of summation then is the same after a restart (docs/guides/checkpointer.md).
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader, every=5)  # (+)
    restored = checkpointer.restore()  # (+)
    for epoch in range(restored.epoch if restored else 0, arguments.epochs):  # (+)
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss: Any = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(arguments.step_s)  # noqa: TID251  # a step of real work
            checkpointer.step({"loss": loss.item()})  # (+)

    if dist.get_rank() == 0:
        weights = b"".join(one.detach().numpy().tobytes() for one in layers.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
