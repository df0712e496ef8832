"""The training functions of `frameworks.py`: libraries under spotfit and under Ray Train.

spotfit is imported nowhere. Where the two sides differ, each saves and resumes as its guide says;
Ray's side uploads asynchronously wherever its report allows it.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import (
    Config,
    api_of,
    framework_state,
    kill_count,
    kill_worker,
    rank_of,
    record,
)

WIDTH = 1024
SAMPLES = 4096


@dataclass(slots=True)
class Progress:
    """Records the steps of one attempt on one rank; kills one worker after a step, once."""

    config: Config
    entered: float
    rank: int = -1
    attempt: int = -1

    def __post_init__(self) -> None:
        self.rank, self.attempt = rank_of(self.config), kill_count(self.config)
        self._record("first_line", entered=self.entered, **framework_state())

    def begin(self, step: int) -> None:
        self._record("began", step=step)

    def end(self, step: int) -> None:
        """Record a step that has ended; `step` counts from 1."""
        self._record("trained", step=step)
        if step == self.config["kill_after"] and self.attempt == 0:
            kill_worker(self.config, self.attempt)

    def _record(self, event: str, **fields: Any) -> None:
        record(self.config, event, rank=self.rank, attempt=self.attempt, **fields)


# ── PyTorch Lightning ─────────────────────────────────────────────────────────────────────────────


def lightning(config: Config) -> None:
    """Train with Adam; an epoch has as many steps as there are between two saves."""
    progress = Progress(config, time.time())
    import lightning.pytorch as pl
    import torch

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(config["layers"])]
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(config["step_s"])
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    class Steps(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            progress.begin(trainer.global_step + 1)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            progress.end(trainer.global_step)

    torch.manual_seed(1)
    api = api_of(config, ".lightning")
    with _checkpoint_directory(config) as folder:
        trainer = pl.Trainer(
            max_steps=config["steps"],
            limit_train_batches=config["save_every"],
            strategy=api.RayDDPStrategy(),
            plugins=[api.RayLightningEnvironment()],
            callbacks=[Steps(), _lightning_saves(config, api)],
            accelerator="cpu",
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
        )
        samples = torch.utils.data.TensorDataset(torch.randn(SAMPLES, WIDTH))
        loader = torch.utils.data.DataLoader(samples, batch_size=4)
        path = None if folder is None else f"{folder}/checkpoint.ckpt"
        api.prepare_trainer(trainer).fit(Module(), loader, ckpt_path=path)


def _lightning_saves(config: Config, api: Any) -> Any:
    if config["side"] == "ours":
        return api.CheckpointerCallback(every=config["save_every"])
    return api.RayTrainReportCallback(
        checkpoint_upload_mode=api_of(config).CheckpointUploadMode.ASYNC
    )


# ── Transformers ──────────────────────────────────────────────────────────────────────────────────


def transformers(config: Config) -> None:
    """Train a BERT with random weights by a `transformers.Trainer`."""
    progress = Progress(config, time.time())
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.begin(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(config["step_s"])
            progress.end(state.global_step)

    set_seed(1)
    bert = BertConfig(
        vocab_size=64,
        hidden_size=config["hidden"],
        num_hidden_layers=config["layers"],
        num_attention_heads=2,
        intermediate_size=4 * config["hidden"],
        max_position_embeddings=16,
    )
    ours = config["side"] == "ours"
    trainer = Trainer(
        model=BertForSequenceClassification(bert),
        args=TrainingArguments(
            output_dir=str(Path(config["events"]).with_name("saved")),
            max_steps=config["steps"],
            per_device_train_batch_size=2,
            save_strategy="no" if ours else "steps",
            save_steps=config["save_every"],
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": [n % 64] * 16, "labels": n % 2} for n in range(SAMPLES)],
    )
    trainer.add_callback(Steps())
    api = api_of(config, ".huggingface.transformers")
    if ours:
        api.prepare_trainer(trainer, every=config["save_every"]).train()
        return
    trainer.add_callback(_asynchronous_report(config, api))
    with _checkpoint_directory(config) as folder:
        api.prepare_trainer(trainer).train(resume_from_checkpoint=folder)


def _asynchronous_report(config: Config, api: Any) -> Any:
    """Return Ray's callback without its two costs: the copy, and the wait for the upload."""
    train = api_of(config)

    class Report(api.RayTrainReportCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            checkpoint = None
            if state.is_world_process_zero:
                saved = Path(args.output_dir, f"checkpoint-{state.global_step}")
                checkpoint = train.Checkpoint.from_directory(saved)
            train.report(
                {"step": state.global_step},
                checkpoint=checkpoint,
                checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
            )

    return Report()


# ── XGBoost, LightGBM ─────────────────────────────────────────────────────────────────────────────


def xgboost(config: Config) -> None:
    """Train trees; rank 0 saves the model, the same code on both sides."""
    progress = Progress(config, time.time())
    import numpy
    import xgboost

    class Steps(xgboost.callback.TrainingCallback):  # type: ignore[misc]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            time.sleep(config["step_s"])
            progress.end(model.num_boosted_rounds())
            return False

    saves = api_of(config, ".xgboost").RayTrainReportCallback(frequency=config["save_every"])
    random = numpy.random.default_rng(progress.rank)
    rows = xgboost.DMatrix(random.random((SAMPLES, 20)), label=random.integers(2, size=SAMPLES))
    checkpoint = api_of(config).get_checkpoint()
    model = None if checkpoint is None else saves.get_model(checkpoint)
    xgboost.train(
        {"objective": "binary:logistic", "nthread": 1},
        rows,
        config["steps"] - (model.num_boosted_rounds() if model else 0),
        evals=[(rows, "train")],
        xgb_model=model,
        callbacks=[Steps(), saves],
        verbose_eval=False,
    )


def lightgbm(config: Config) -> None:
    """Train trees; rank 0 saves the model, the same code on both sides."""
    progress = Progress(config, time.time())
    import lightgbm
    import numpy

    api = api_of(config, ".lightgbm")
    saves = api.RayTrainReportCallback(frequency=config["save_every"])
    random = numpy.random.default_rng(progress.rank)
    rows = lightgbm.Dataset(random.random((SAMPLES, 20)), random.integers(2, size=SAMPLES))
    checkpoint = api_of(config).get_checkpoint()
    model = None if checkpoint is None else saves.get_model(checkpoint)

    def step(environment: Any) -> None:
        time.sleep(config["step_s"])
        progress.end(environment.iteration + 1)

    lightgbm.train(
        {
            "objective": "binary",
            "num_threads": 1,
            "tree_learner": "data",
            "pre_partition": True,
            "verbose": -1,
            **api.get_network_params(),
        },
        rows,
        config["steps"] - (model.current_iteration() if model else 0),
        valid_sets=[rows],
        init_model=model,
        callbacks=[step, saves],
    )


@contextlib.contextmanager
def _checkpoint_directory(config: Config) -> Iterator[str | None]:
    """Yield the directory of the latest checkpoint; None on the first attempt, and with spotfit,
    which restores by itself."""
    checkpoint = api_of(config).get_checkpoint() if config["side"] != "ours" else None
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield str(folder)
