"""A transformers.Trainer on two machines: losses of workers and machines do not change it."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import spotfit
from spotfit.torch import TorchTrainer
from tests.live.cloud import LiveTestCloud

pytest.importorskip("transformers")

from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

Config = dict[str, Any]
STEPS = 19
"""Optimizer steps per epoch of four workers."""


class Digits(Dataset[dict[str, Any]]):
    """Images of digits as 64 tokens; records which samples are read."""

    def __init__(self, samples: slice, log: Path | None = None) -> None:
        digits = load_digits()
        self._tokens = torch.tensor(digits.data[samples], dtype=torch.long)
        self._labels = torch.tensor(digits.target[samples])
        self._log = log

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(f"{index}\n")
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def tiny_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=17,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=10,
    )
    return BertForSequenceClassification(config)


class Killer(TrainerCallback):
    """Kills its rank once after a step; `kills` are pairs of a step and a rank."""

    def __init__(self, kills: list[tuple[int, int]], marks: Path) -> None:
        self._kills = kills
        self._marks = marks

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rank = spotfit.get_context().get_world_rank()
        mark = self._marks / f"killed-{state.global_step}-{rank}"
        if (state.global_step, rank) in self._kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: Config) -> Config:
    """Train a tiny BERT with dropout and a linear schedule; return what must not change."""
    from spotfit.huggingface import prepare_trainer

    rank = spotfit.get_context().get_world_rank()
    marks = Path(config["marks"], config["label"])
    marks.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(marks / "output"),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        ddp_find_unused_parameters=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **config.get("arguments", {}),
    )
    torch.manual_seed(3)
    trainer = Trainer(
        model=tiny_bert(),
        args=arguments,
        train_dataset=Digits(slice(600), marks / f"reads-{rank}"),
        eval_dataset=Digits(slice(600, 700)),
        callbacks=[Killer(config.get("kills", []), marks)],
    )
    trainer = prepare_trainer(trainer, every=config.get("every", 4))
    result = trainer.train()
    weights = b"".join(
        weight.detach().numpy().tobytes() for weight in trainer.model.state_dict().values()
    )
    volatile = ("runtime", "per_second")
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "loss": result.training_loss,
        "steps": result.global_step,
        "log": [
            {name: value for name, value in entry.items() if not name.endswith(volatile)}
            for entry in trainer.state.log_history
        ],
    }


def fit(cloud: LiveTestCloud, name: str, **config: Any) -> Config:
    result: Config = cloud.fit(
        train,
        workers=4,
        nodes=2,
        name=name,
        trainer_type=TorchTrainer,
        max_failures=len(config.get("kills", [])),
        config={"label": name, **config},
    ).return_value
    return result


def test_killed_workers_change_neither_weights_nor_logs(cloud: LiveTestCloud) -> None:
    undisturbed = fit(cloud, "undisturbed")
    kills = [(6, 1), (30, 3), (31, 0)]
    killed = fit(cloud, "killed", kills=kills)
    assert len(cloud.rounds_opened("killed")) == len(kills) + 1
    assert killed == undisturbed
