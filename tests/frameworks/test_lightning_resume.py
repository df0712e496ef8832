"""Lightning in one process: whatever step it stops after, the resumed training is the same."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import spotfit
import spotfit.data
from spotfit.checkpoint.snapshot_channel import run_save_at_end
from spotfit.core.errors import ConfigError
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.frameworks.torch.torchrun_group import LauncherGroup
from spotfit.lightning import CheckpointerCallback, prepare_trainer
from spotfit.lightning.lightning_classes import CLASS_NAMES, class_for
from spotfit.model.topology import Ranks
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession, LocalSnapshotChannel
from tests.frameworks.lightning_digits import digits, hash_of, make_module
from tests.frameworks.next_process import begin_next_process

# Lightning's advice about machines and small data.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EPOCHS = 3
STEPS = 6
"""Batches per epoch."""
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "4",
}
"""Variables that Lightning would follow without an explicit environment."""


class StoppedError(Exception):
    """The process has ended."""


class StopAfter(pl.Callback):
    def __init__(self, batches: int) -> None:
        self._batches = batches

    def on_train_batch_start(self, trainer: Any, *_args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self._batches:
            raise StoppedError


class Events(pl.Callback):
    """Draws random numbers in hooks, and counts hooks in a state that is saved."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.drawn = 0.0

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        self.drawn += torch.rand(1).item()

    def on_train_start(self, *_args: Any) -> None:
        torch.rand(3)

    def on_train_epoch_start(self, *_args: Any) -> None:
        self._count("train_epoch_start")

    def on_train_epoch_end(self, *_args: Any) -> None:
        self._count("train_epoch_end")

    def on_validation_end(self, trainer: Any, *_args: Any) -> None:
        if not trainer.sanity_checking:
            self._count("validation_end")

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.drawn = dict(state["counts"]), state["drawn"]


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()
    shutil.rmtree(session.snapshot_channel.segment_dirs[0].parent, ignore_errors=True)


def run(
    folder: Path,
    *,
    stop_after: int | None = None,
    every: Any = 1,
    callbacks: Sequence[Any] = (),
    ckpt_path: Path | None = None,
    **options: Any,
) -> Any:
    """Train in a new simulated process; return all that must be equal, or None if it stopped."""
    begin_next_process()
    pl.seed_everything(3)
    folder.mkdir(exist_ok=True)
    module = make_module(pl, {"marks": str(folder), "label": "run", "monitor": "train_loss_epoch"})
    events, saves = Events(), CheckpointerCallback(every=every)
    stop = [] if stop_after is None else [StopAfter(stop_after)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[events, saves, *stop, *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"max_epochs": EPOCHS, **options},
    )
    loader = DataLoader(digits(0, STEPS * 16), batch_size=16, shuffle=True)
    try:
        validation = DataLoader(digits(480, 540), batch_size=30)
        trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    except StoppedError:
        return None
    logged = {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    loops = {k: v for k, v in trainer.fit_loop.state_dict().items() if "val_loop" not in k}
    return hash_of(module), logged, events.state_dict(), str(schedulers), trainer.global_step, loops


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "validation_within_epochs": {"val_check_interval": 2},
    "validation_every_2_epochs": {"check_val_every_n_epoch": 2},
    "max_steps": {"max_epochs": -1, "max_steps": 15},
    "shorter_epochs": {"limit_train_batches": 5},
    "without_validation": {"limit_val_batches": 0},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stop_after", [1, 5, 6, 7, 13])
def test_a_training_that_stopped_after_any_step_ends_like_an_undisturbed_one(
    session: LocalSession, tmp_path: Path, name: str, stop_after: int
) -> None:
    expected = undisturbed(name, tmp_path)
    training_api.set_session(LocalSession("run"))
    assert run(tmp_path / "stopped", stop_after=stop_after, **OPTIONS[name]) is None
    resumed = run(tmp_path / "stopped", **OPTIONS[name])
    for part, expected_part in zip(resumed, expected, strict=True):
        assert part == expected_part


_results: dict[str, Any] = {}


def undisturbed(name: str, folder: Path) -> Any:
    """Return the result without a stop, which is computed once for all tests."""
    if name not in _results:
        _results[name] = run(folder / "undisturbed", every=1000, **OPTIONS[name])
    return _results[name]


def test_the_validation_of_an_epoch_is_in_the_metrics_of_its_checkpoint(
    session: LocalSession, tmp_path: Path
) -> None:
    _, logged, *_ = run(tmp_path / "run", every="epoch", max_epochs=2)
    assert session.metrics is not None
    assert session.metrics["val_loss"] == logged["metrics-run-1"]["val_loss"]


def test_the_last_steps_are_saved_at_the_end_and_a_longer_training_continues(
    session: LocalSession, tmp_path: Path
) -> None:
    run(tmp_path / "first", every=1000, max_epochs=1)
    end = run_save_at_end(session.snapshot_channel)
    assert end is not None
    assert (end.step, end.has_snapshot, end.error) == (STEPS, True, "")
    _, logged, *_ = run(tmp_path / "second", max_epochs=2)
    assert logged.keys() == {"metrics-run-1"}, "only the second epoch is trained"


def test_a_restored_state_replaces_the_checkpoint_of_a_first_start(
    session: LocalSession, tmp_path: Path
) -> None:
    class Keep(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, *_args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "first.ckpt")

    run(tmp_path / "pretraining", every=1000, max_epochs=1, callbacks=[Keep()])
    training_api.set_session(LocalSession("run"))
    expected = run(tmp_path / "run", ckpt_path=tmp_path / "first.ckpt")
    training_api.set_session(LocalSession("run"))
    assert run(tmp_path / "stopped", ckpt_path=tmp_path / "first.ckpt", stop_after=9) is None
    resumed = run(tmp_path / "stopped", ckpt_path=tmp_path / "first.ckpt")
    assert resumed[0] == expected[0]
    assert resumed[1] == expected[1]


class FirstRows(pl.LightningModule):
    """Records the epoch, the number and the first row of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.current_epoch, batch_idx, int(batch["id"][0])))
        return self.linear(batch["id"].float()[:, None]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)


def fit_on_shard(
    channel: LocalSnapshotChannel | None = None, *, stop_after: int | None = None, **options: Any
) -> tuple[LocalSnapshotChannel, list[tuple[int, int, int]]]:
    """Train with the snapshots of an earlier process; return the snapshots and the batches."""
    datasets = {"train": spotfit.data.range(45)}
    session = LocalSession("run", datasets=datasets, dataset_config=spotfit.DataConfig())
    session.snapshot_channel = channel or session.snapshot_channel
    training_api.set_session(session)
    begin_next_process()
    stop = [] if stop_after is None else [StopAfter(stop_after)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[CheckpointerCallback(every=1), *stop],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        max_epochs=3,
        **options,
    )
    module = FirstRows()
    batches = spotfit.get_dataset_shard("train").iter_torch_batches(batch_size=10)
    with suppress(StoppedError):
        trainer.fit(module, batches)
    return session.snapshot_channel, module.seen


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}], ids=str)
@pytest.mark.parametrize("stop_after", [1, 3, 5, 7])
def test_a_shard_continues_where_it_stopped(options: dict[str, Any], stop_after: int) -> None:
    """Lightning reads a batch ahead, because batches of a shard have no length."""
    steps = options.get("limit_train_batches", 5)
    expected = [(epoch, n, 10 * n) for epoch in range(3) for n in range(steps)]
    channel, seen = fit_on_shard(stop_after=stop_after, **options)
    assert seen == expected[:stop_after]
    assert fit_on_shard(channel, **options)[1] == expected[stop_after:]


class SaveAfterReport(pl.Callback):
    """Saves what a resumed training function gets, after the report of an epoch, and stops."""

    def __init__(self, folder: Path, shard: DataIterator, *, epoch: int | None) -> None:
        self._folder, self._shard, self._epoch = folder, shard, epoch
        self.position: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: Any, *_args: Any) -> None:
        if trainer.current_epoch == self._epoch:
            self._shard.position.count()
            self.position = self._shard.position.state()
            trainer.save_checkpoint(self._folder / "last.ckpt")
            raise StoppedError


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}], ids=str)
@pytest.mark.parametrize("last_epoch", [0, 1])
def test_a_report_after_an_epoch_ends_the_epoch_of_its_shard(
    options: dict[str, Any], last_epoch: int, tmp_path: Path
) -> None:
    """Lightning resumes with the next epoch, although it has read a batch more of this one."""

    def fit(
        position: dict[str, Any], *, stops_after: int | None = None, ckpt_path: Path | None = None
    ) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
        group = ShardGroup(seed=1)
        shard = DataIterator(ShardPosition(spotfit.data.range(45), group, restore=lambda: position))
        last = SaveAfterReport(tmp_path, shard, epoch=stops_after)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[class_for("lightning.pytorch", "RayTrainReportCallback")(), last],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            max_epochs=3,
            **options,
        )
        module = FirstRows()
        with suppress(StoppedError):
            trainer.fit(module, shard.iter_torch_batches(batch_size=10), ckpt_path=ckpt_path)
        return last.position, module.seen

    steps = options.get("limit_train_batches", 5)
    expected = [(epoch, n, 10 * n) for epoch in range(3) for n in range(steps)]
    position, seen = fit({}, stops_after=last_epoch)
    assert seen == expected[: steps * (last_epoch + 1)]
    assert fit(position, ckpt_path=tmp_path / "last.ckpt")[1] == expected[len(seen) :]


def test_unsupported_options_are_rejected(session: LocalSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reload_dataloaders_every_n_epochs"):
        run(tmp_path, reload_dataloaders_every_n_epochs=1)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("strategy", ["RayDDPStrategy", "RayFSDPStrategy"])
def test_a_trainer_in_a_job_of_slurm_has_the_ranks_of_the_worker(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, package: str, strategy: str
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks(world_rank=1, world_size=2, local_rank=1, local_world_size=2)
    training_api.set_session(LocalSession("run", LauncherGroup(ranks)))
    classes = {name: class_for(package, name) for name in CLASS_NAMES}
    trainer = importlib.import_module(package).Trainer(
        strategy=classes[strategy](),
        plugins=[classes["RayLightningEnvironment"]()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    assert prepare_trainer(trainer) is trainer
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (2, 1, 1)
    assert trainer.strategy.launcher is None


def test_a_plain_trainer_is_rejected_at_its_fit() -> None:
    """In a process of its own, because the class is patched for the rest of the process."""
    script = """
from spotfit.frameworks.torch.lightning_check import check_trainers_at_fit
check_trainers_at_fit(2)
import lightning.pytorch as pl
pl.Trainer(accelerator="cpu", devices=1, logger=False).fit(pl.LightningModule())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "UnpreparedTrainerError: The run has 2 workers" in done.stderr
    assert "strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()]" in done.stderr
