"""Four workers on two machines train a loop with Accelerate; one of the machines is lost.

Needs `pip install 'spotfit[torch]' accelerate scikit-learn`. The lines marked with (+) are those
that a script for `accelerate launch` does not have. After the loss the run resumes within the
epoch.
"""

import tempfile
import time
from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotfit
from spotfit.torch import Checkpointer, TorchTrainer
from spotfit_localsim.live.preemption import at_step, scheduled_reclaims
from spotfit_provisioners.local.options import LocalOptions

EPOCHS, BATCH_SIZE = 6, 16


def train() -> dict[str, Any]:
    """Return the accuracy, and the step from which the last start has resumed."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    digits, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(classes))
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model, optimizer, loader = accelerator.prepare(
        layers,
        torch.optim.Adam(layers.parameters(), lr=0.005),
        DataLoader(data, BATCH_SIZE, shuffle=True),
    )
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader, every=5)  # (+)
    restored = checkpointer.restore()  # (+)
    for _ in range(restored.epoch if restored else 0, EPOCHS):  # (+)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            time.sleep(0.01)  # noqa: TID251  # a step of real work
            checkpointer.step({"step": checkpointer.steps + 1, "loss": loss.item()})  # (+)
    model.eval()
    images, labels = data.tensors
    accuracy = (layers(images).argmax(1) == labels).float().mean().item()
    return {"accuracy": accuracy, "resumed_from": restored.step if restored else 0}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        machines = LocalOptions(nodes=2, root=f"{folder}/machines")
        trainer = TorchTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="digits", storage_path=f"{folder}/runs"),
            provisioner=machines,
        )
        reclaims = [at_step(30, node=1)]
        with scheduled_reclaims(f"{folder}/runs/digits", reclaims, options=machines) as schedule:
            result = trainer.fit().return_value
        print(f"lost machines: {len(schedule.completed)}, resumed: {result['resumed_from'] > 0}")
        print(f"accuracy above 90 %: {result['accuracy'] > 0.9}")
