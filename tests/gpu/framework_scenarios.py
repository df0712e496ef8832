"""Training functions of the GPU tests of frameworks. Each imports its framework in the worker."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotfit
from spotfit.torch import enable_reproducibility
from tests.gpu.records import Config, die_once, parent_process, record
from tests.gpu.scenarios import BATCH, EPOCHS, SAVE_EVERY, a_model, digest, some_data


def train_with_lightning(config: Config) -> dict[str, Any]:
    """Train `a_model` by a Lightning `Trainer` that a `CheckpointerCallback` saves."""
    import lightning.pytorch as pl

    from spotfit.lightning import (
        CheckpointerCallback,
        RayDDPStrategy,
        RayLightningEnvironment,
        prepare_trainer,
    )

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = a_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, labels = batch
            return nn.functional.mse_loss(self.net(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Recorder(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            record_start(config, trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
            record_step(config, trainer.global_step)

    enable_reproducibility(config["seed"])
    pl.seed_everything(config["seed"])
    saves = CheckpointerCallback(every=SAVE_EVERY)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        devices="auto",
        accelerator="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[saves, Recorder()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=config["marks"],
    )
    module = Module()
    trainer = prepare_trainer(trainer)
    trainer.fit(module, DataLoader(some_data(), batch_size=BATCH, shuffle=True))
    return {
        # Lightning moves the module to the CPU at the end of `fit`.
        "device": str(trainer.strategy.root_device),
        "digest": digest([weight.detach() for weight in module.parameters()]),
    }


class Tokens(Dataset[dict[str, Any]]):
    """Sequences of 16 random tokens; the label is whether their mean is above the middle."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(64, (96, 16), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._tokens[index]
        return {"input_ids": tokens, "labels": int(tokens.float().mean() > 31.5)}


def train_with_transformers(config: Config) -> dict[str, Any]:
    """Train a small BERT with dropout by a Trainer of transformers that spotfit saves."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from spotfit.huggingface import prepare_trainer

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record_start(config, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record_step(config, state.global_step)

    enable_reproducibility(config["seed"])
    torch.manual_seed(config["seed"])
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    )
    arguments = TrainingArguments(
        output_dir=f"{config['marks']}/output",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        full_determinism=True,
        seed=config["seed"],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[Recorder()])
    prepare_trainer(trainer, every=SAVE_EVERY).train()
    return {
        "device": str(arguments.device),
        "digest": digest([weight.detach() for weight in trainer.model.parameters()]),
    }


def record_start(config: Config, step: int) -> None:
    rank = spotfit.get_context().get_world_rank()
    record(config, "starts", rank=rank, step=step, **parent_process())


def record_step(config: Config, step: int) -> None:
    """Record that a step has ended, and die after it if the test says so."""
    rank = spotfit.get_context().get_world_rank()
    record(config, "steps", rank=rank, step=step, at=time.time())
    die_once(config, rank, step)
