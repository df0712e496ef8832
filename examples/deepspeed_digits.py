"""Four workers on two machines train with DeepSpeed's ZeRO 2; one of the machines is lost.

Needs scikit-learn, and DeepSpeed as docs/guides/deepspeed.md installs it. Each worker keeps a
quarter of the optimizer's state. After the loss all workers resume from the memory of the machine
that remains.
"""

import tempfile
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import spotfit
from spotfit.deepspeed import Checkpointer, initialize
from spotfit.torch import TorchTrainer
from spotfit_localsim.live.preemption import at_step, scheduled_reclaims
from spotfit_provisioners.local.options import LocalOptions

STEPS, BATCH_SIZE = 150, 32


def train() -> dict[str, Any]:
    """Return the accuracy, and the step from which the last start has resumed."""
    context = spotfit.get_context()
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(classes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    engine, *_ = initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
        },
    )
    checkpointer = Checkpointer(engine, every=5)
    restored = checkpointer.restore()
    for step in range(engine.global_steps, STEPS):
        # The rows depend on step and rank only: a restarted worker continues with the same ones.
        first = BATCH_SIZE * (step * context.get_world_size() + context.get_world_rank())
        rows = torch.arange(first, first + BATCH_SIZE) % len(images)
        loss = nn.functional.cross_entropy(engine(images[rows]), labels[rows])
        engine.backward(loss)
        engine.step()
        time.sleep(0.02)  # noqa: TID251  # a step of real work
        checkpointer.step({"step": step + 1, "loss": loss.item()})
    engine.eval()
    accuracy = (engine(images).argmax(1) == labels).float().mean().item()
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
