"""An autoencoder in the style of Lightning's examples, with the five lines for spotfit marked.

Needs `pip install 'spotfit[lightning]' scikit-learn`.
"""

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import spotfit
from spotfit.lightning import (
    CheckpointerCallback,
    LightningTrainer,
    RayDDPStrategy,
    RayLightningEnvironment,
)


class LitAutoEncoder(pl.LightningModule):
    """Compresses an image of 64 pixels to 3 numbers and back."""

    def __init__(self, hidden_dim: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.encoder(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = functional.mse_loss(self.decoder(self(batch)), batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = functional.mse_loss(self.decoder(self(batch)), batch)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class DigitsDataModule(pl.LightningDataModule):
    """The digits of scikit-learn, as images of 64 pixels."""

    def setup(self, stage: str) -> None:
        images: Any = torch.tensor(load_digits().images / 16, dtype=torch.float32).flatten(1)
        self.train_set, self.val_set = images[:1600], images[1600:]

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=32)


def main() -> float:  # 1: was called below
    """Train, and return the loss of the last validation."""
    trainer = pl.Trainer(
        max_epochs=10,
        strategy=RayDDPStrategy(),  # 2: was strategy="ddp"
        plugins=[RayLightningEnvironment()],  # 3: new
        callbacks=[CheckpointerCallback()],  # 4: was ModelCheckpoint()
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(LitAutoEncoder(), datamodule=DigitsDataModule())
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = LightningTrainer(  # 5: was main()
            main,
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(name="autoencoder", storage_path=folder),
        ).fit()
    print(f"loss of the validation below 0.05: {result.return_value < 0.05}")
