"""Trains a Lightning module on scikit-learn's digits on two machines; one of them is lost.

Needs `pip install 'spotfit[lightning]' scikit-learn`. The module is written as for one process.
After the loss of a machine the run resumes within the epoch, from the memory of the other one.
"""

import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import spotfit
from spotfit.lightning import (
    CheckpointerCallback,
    LightningTrainer,
    RayDDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)
from spotfit_localsim.live.preemption import at_step, scheduled_reclaims
from spotfit_provisioners.local.options import LocalOptions


class DigitClassifier(pl.LightningModule):
    """A small network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01)  # noqa: TID251  # a step of real work
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        metrics = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        spotfit.report({"step": self.trainer.global_step, **metrics})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


def train() -> int:
    """Train six epochs; return the step from which the last start has resumed."""
    pl.seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, val_set = random_split(dataset, [1500, len(dataset) - 1500])
    saves = CheckpointerCallback(every=5)
    trainer = pl.Trainer(
        max_epochs=6,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[saves],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    prepare_trainer(trainer).fit(
        DigitClassifier(),
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(val_set, batch_size=99),
    )
    return saves.restored.step if saves.restored else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        machines = LocalOptions(nodes=2, root=f"{folder}/machines")
        trainer = LightningTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(name="digits", storage_path=f"{folder}/runs"),
            provisioner=machines,
        )
        reclaims = [at_step(48, node=1)]
        with scheduled_reclaims(f"{folder}/runs/digits", reclaims, options=machines) as schedule:
            result = trainer.fit()
        print(f"lost machines: {len(schedule.completed)}, resumed: {result.return_value > 0}")
        metrics = result.metrics or {}
        print(f"accuracy above 0.9: {metrics['val_accuracy'] > 0.9}")
