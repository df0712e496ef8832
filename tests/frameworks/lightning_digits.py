"""A training of digits with Lightning, which workers of tests run with either package."""

from __future__ import annotations

import importlib
import json
import os
import signal
from hashlib import md5
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import spotfit

Config = dict[str, Any]
WORKERS = 4
STEPS = 15
"""Batches per epoch and rank."""
EPOCHS = 4


def digits(begin: int, end: int) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(images[begin:end] / 16, dtype=torch.float32), torch.tensor(labels[begin:end])
    )


def make_module(pl: Any, config: Config) -> Any:
    """Return a module with dropout, Adam, a schedule per step and one that follows a metric."""

    class DigitsModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10)
            )
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, labels = batch
            outputs = self.net(inputs)
            loss = functional.cross_entropy(outputs, labels)
            self.accuracy(outputs, labels)
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("train_max", loss, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            inputs, labels = batch
            self.log("val_loss", functional.cross_entropy(self.net(inputs), labels), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            metrics = {k: v.item() for k, v in self.trainer.callback_metrics.items()}
            metrics["lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
            if self.trainer.is_global_zero:
                name = f"metrics-{config['label']}-{self.trainer.current_epoch}"
                Path(config["marks"], name).write_text(json.dumps(metrics))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            per_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * EPOCHS)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [
                {"scheduler": per_step, "interval": "step"},
                {
                    "scheduler": plateau,
                    "interval": "epoch",
                    "monitor": config.get("monitor", "val_loss"),
                },
            ]

    return DigitsModule()


def make_interruption(pl: Any, config: Config, saves: Any) -> Any:
    """Return a callback that kills this worker, or waits to be killed, after some batches."""

    class Interruption(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if saves.restored is not None and trainer.is_global_zero:
                name = f"restored-{config['label']}-{saves.restored.step}"
                Path(config["marks"], name).write_text(saves.restored.source)

        def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
            batches, rank = trainer.fit_loop.total_batch_idx + 1, trainer.global_rank
            marks = Path(config["marks"])
            for name, act in (("kills", kill_this_process), ("waits", signal.pause)):
                if [batches, rank] not in config.get(name, []):
                    continue
                mark = marks / f"{name}-{config['label']}-{batches}-{rank}"
                if not mark.exists():
                    mark.touch()
                    act()

    return Interruption()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(config: Config) -> str:
    """Train with a CheckpointerCallback; return a hash of the weights."""
    pl = importlib.import_module(config.get("package", "lightning.pytorch"))
    from spotfit.lightning import (
        CheckpointerCallback,
        RayDDPStrategy,
        RayLightningEnvironment,
        prepare_trainer,
    )

    pl.seed_everything(7)
    module = make_module(pl, config)
    torch.manual_seed(spotfit.get_context().get_world_rank())  # dropout differs between ranks
    saves = CheckpointerCallback(every=config.get("every", 3))
    trainer = pl.Trainer(
        accelerator=config.get("accelerator", "auto"),
        devices="auto",
        strategy=RayDDPStrategy(find_unused_parameters=True),
        plugins=[RayLightningEnvironment()],
        callbacks=[saves, make_interruption(pl, config, saves)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=config["marks"],
        **{"max_epochs": EPOCHS, **config.get("trainer", {})},
    )
    batch = 480 // STEPS // spotfit.get_context().get_world_size()
    loader = DataLoader(
        digits(0, 480), batch_size=batch, shuffle=True, num_workers=config.get("loader_workers", 0)
    )
    prepare_trainer(trainer).fit(module, loader, DataLoader(digits(480, 600), batch_size=30))
    return hash_of(module)


def train_in_fixed_batches(config: Config) -> list[list[int]]:
    """Train with batches of 8 at any number of workers; return the batches of each epoch."""
    import lightning.pytorch as pl

    from spotfit.lightning import (
        CheckpointerCallback,
        RayDDPStrategy,
        RayLightningEnvironment,
        prepare_trainer,
    )

    counts: dict[int, int] = {}

    class Counter(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
            counts[trainer.current_epoch] = counts.get(trainer.current_epoch, 0) + 1

    saves = CheckpointerCallback(every=config["every"])
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[saves, make_interruption(pl, config, saves), Counter()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=config["marks"],
    )
    loader = DataLoader(digits(0, 480), batch_size=8, shuffle=True)
    validation = DataLoader(digits(480, 600), batch_size=30)
    prepare_trainer(trainer).fit(make_module(pl, config), loader, validation)
    return [[epoch, count] for epoch, count in counts.items()]


def train_with_reports(config: Config) -> list[int]:
    """Train with Ray's callback, as a script of Ray does; return the epochs that were trained."""
    import lightning.pytorch as pl

    from spotfit.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    epochs: list[int] = []

    class Epochs(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, *_args: Any) -> None:
            epochs.append(trainer.current_epoch)

    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        devices="auto",
        accelerator="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), Epochs()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    module = make_module(pl, {**config, "label": "reports"})
    loader = DataLoader(digits(0, 480), batch_size=480 // STEPS // 2, shuffle=True)
    validation = DataLoader(digits(480, 600), batch_size=30)
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        trainer.fit(module, loader, validation)
    else:
        with checkpoint.as_directory() as folder:
            path = f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}"
            trainer.fit(module, loader, validation, ckpt_path=path)
    return epochs


def hash_of(module: nn.Module) -> str:
    weights = torch.cat([weight.detach().flatten() for weight in module.parameters()])
    return md5(weights.numpy().tobytes(), usedforsecurity=False).hexdigest()
