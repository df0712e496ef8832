"""A transformers.Trainer with DeepSpeed: runs with kills give the weights of an undisturbed run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

deepspeed = pytest.importorskip("deepspeed", reason="needs deepspeed: make deepspeed")
pytest.importorskip("transformers")

import torch  # noqa: E402
from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import spotfit  # noqa: E402
from spotfit.deepspeed import Checkpointer  # noqa: E402
from spotfit.frameworks.torch.deepspeed_ops import import_deepspeed  # noqa: E402
from spotfit.huggingface import export_pretrained, prepare_trainer  # noqa: E402
from spotfit.model.events import FailureCause  # noqa: E402
from spotfit.torch import TorchTrainer  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    kill_machine_of_rank,
    kill_own_worker,
    machine_kill,
)
from tests.live.cloud import LiveTestCloud  # noqa: E402

Config = dict[str, Any]
TOKENS = 20
ROWS = 220
"""Of an epoch: 14 steps of two ranks with 8 rows each, of which the last one is smaller; or 7 of
four ranks."""


def tiny_bert() -> BertForSequenceClassification:
    """Return a model whose dropout makes a loss depend on the RNG state of the rank."""
    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=3,
    )
    torch.manual_seed(3)
    return BertForSequenceClassification(config)


class Rows(torch.utils.data.Dataset[Config]):
    """Rows of eight random tokens."""

    def __init__(self) -> None:
        self._rows = torch.randint(TOKENS, (ROWS, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Config:
        row = self._rows[index]
        return {"input_ids": row, "labels": row.sum() % 3}


class Disturb(TrainerCallback):
    """Kills worker or machine when a step begins; records where an attempt begins."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        context = spotfit.get_context()
        if context.get_world_rank() == 0:
            path = Path(self._config["marks"], f"begins-{context.get_experiment_name()}")
            with path.open("a") as file:
                file.write(f"{state.global_step}\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for step, rank in self._config["kills"]:
            kill_own_worker(self._config["marks"], state.global_step, at_step=step, rank=rank)
        if self._config["loses_machine"]:
            machine_kill(self._config, state.global_step)


def allow_processors() -> None:
    """Accelerate finds no group for DeepSpeed without GPUs; nothing in it depends on them."""
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    import_deepspeed()  # it would compile an extension when the arguments are created


def digest_of(model: torch.nn.Module) -> str:
    parts = [one.detach().numpy().tobytes() for one in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(config: Config) -> Config:
    """Train by a Trainer; return what must not change."""
    allow_processors()
    zero: Config = {"stage": config["stage"], "stage3_param_persistence_threshold": 100}
    deepspeed_config: Config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {**zero, "reduce_bucket_size": 10_000},
        **config["deepspeed"],
    }
    arguments = TrainingArguments(
        output_dir=str(Path(config["marks"], "output")),
        deepspeed=deepspeed_config,
        per_device_train_batch_size=8,
        learning_rate=0.02,
        warmup_steps=9,
        save_strategy="no",
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **{"num_train_epochs": 2, **config["arguments"]},
    )
    trainer = Trainer(
        model=tiny_bert(), args=arguments, train_dataset=Rows(), callbacks=[Disturb(config)]
    )
    result = prepare_trainer(trainer, every=4).train()
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = digest_of(trainer.model)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "weights": weights,
        "loss": result.training_loss,
        "steps": result.global_step,
        "rates": rates,
    }


def train_with_accelerate(config: Config) -> Config:
    """Train by a loop with Accelerate; return the weights and the batches that were restored."""
    allow_processors()
    plugin = DeepSpeedPlugin(zero_stage=config["stage"], gradient_accumulation_steps=2)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpointer = Checkpointer(engine, loader=loader, every=4)
    restored = checkpointer.restore()
    for _ in range(restored.epoch if restored else 0, 2):
        for batch in loader:
            for step, rank in config["kills"]:
                kill_own_worker(config["marks"], checkpointer.steps, at_step=step, rank=rank)
            with accelerator.accumulate(engine):
                accelerator.backward(engine(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            checkpointer.step()
    return {"weights": digest_of(engine.module), "restored": restored and restored.step}


def trainer(
    cloud: LiveTestCloud,
    name: str,
    how: Config,
    *,
    fn: Any = train,
    workers: int = 2,
    **disturbance: Any,
) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn,
        workers=workers,
        nodes=2,
        max_failures=2,
        name=name,
        trainer_type=TorchTrainer,
        config={"arguments": {}, "deepspeed": {}, "kills": [], "loses_machine": False}
        | how
        | disturbance,
    )


def begins(cloud: LiveTestCloud, name: str) -> list[int]:
    """Return the steps at which the attempts of a run began."""
    return [int(line) for line in (cloud.marks / f"begins-{name}").read_text().split()]


OWN_OPTIMIZER: Config = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
    },
}
OWN_SCHEDULER: Config = OWN_OPTIMIZER | {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "how",
    [
        {"stage": 1},
        {"stage": 2, "arguments": {"gradient_accumulation_steps": 3}},
        {"stage": 3, "deepspeed": OWN_OPTIMIZER},
        {"stage": 3, "deepspeed": OWN_SCHEDULER},
    ],
    ids=["1", "2, accumulated gradients", "3, DeepSpeed's optimizer", "3, DeepSpeed's scheduler"],
)
def test_killed_workers_resume_from_memory_with_the_same_weights(
    cloud: LiveTestCloud, how: Config
) -> None:
    steps = 2 * 5 if "arguments" in how else 2 * 14
    kills = [(6, 1), (steps - 1, 0)]
    calm = trainer(cloud, "calm", how).fit()
    stormy = trainer(cloud, "stormy", how, kills=kills).fit()
    assert stormy.return_value == calm.return_value
    assert calm.return_value["steps"] == steps
    assert [one.cause for one in cloud.rounds_closed("stormy")] == [FailureCause.WORKER] * 2
    assert begins(cloud, "stormy") == [0, 4, (steps - 1) // 4 * 4]
    assert len(set(calm.return_value["rates"])) > 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_worker_and_a_killed_machine_of_four_workers_do_not_change_the_weights(
    cloud: LiveTestCloud, stage: int
) -> None:
    how: Config = {"stage": stage, "arguments": {"num_train_epochs": 4}}
    calm = trainer(cloud, "calm", how, workers=4).fit()
    assert calm.return_value["steps"] == 4 * 7
    run = trainer(cloud, "run", how, workers=4, kills=[(9, 2)], loses_machine=True).submit()
    assert kill_machine_of_rank(cloud, 3, run).return_value == calm.return_value
    causes = [one.cause for one in cloud.rounds_closed("run")]
    assert causes == [FailureCause.WORKER, FailureCause.PREEMPTION]
    assert begins(cloud, "run") == [0, 8, 16]


@pytest.mark.timeout(300)
def test_a_checkpoint_of_zero_2_is_exported_for_from_pretrained(
    cloud: LiveTestCloud, tmp_path: Path
) -> None:
    result = trainer(cloud, "run", {"stage": 2}).fit()
    assert result.checkpoint is not None
    export_pretrained(result.checkpoint, tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert digest_of(model) == result.return_value["weights"]


@pytest.mark.timeout(300)
def test_a_loop_with_accelerate_resumes_with_the_same_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, "calm", {"stage": 2}, fn=train_with_accelerate).fit().return_value
    stormy = trainer(cloud, "stormy", {"stage": 2}, fn=train_with_accelerate, kills=[(11, 1)])
    assert stormy.fit().return_value == {"weights": calm["weights"], "restored": 8}
    assert calm["restored"] is None


@pytest.mark.timeout(300)
def test_an_engine_without_zero_is_rejected(cloud: LiveTestCloud) -> None:
    with pytest.raises(spotfit.WorkerGroupError, match="engines with ZeRO"):
        trainer(cloud, "run", {"stage": 0}).fit()
