"""Lightning in one process: whatever step it stops after, the resumed training is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from spotfit.lightning import CheckpointerCallback
from spotfit.torch.checkpoint import checkpointer
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession
from tests.frameworks.lightning_digits import digits, hash_of, make_module

# Lightning's advice about machines and small data.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EPOCHS = 3
STEPS = 6
"""Batches per epoch."""


class StoppedError(Exception):
    """The process has ended."""


class StopAfter(pl.Callback):  # type: ignore[misc]  # of an optional package
    def __init__(self, batches: int) -> None:
        self._batches = batches

    def on_train_batch_start(self, trainer: Any, *_args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self._batches:
            raise StoppedError


class Events(pl.Callback):  # type: ignore[misc]  # of an optional package
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
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSession]:
    """A session in which each simulated process may create a Checkpointer."""
    monkeypatch.setattr(checkpointer, "_reject_second_checkpointer", lambda _: None)
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()
    shutil.rmtree(session.snapshot_channel.segment_dirs[0].parent, ignore_errors=True)


def run(folder: Path, *, stop_after: int | None = None, every: Any = 1, **options: Any) -> Any:
    """Train in a new simulated process; return all that must be equal, or None if it stopped."""
    pl.seed_everything(3)
    folder.mkdir(exist_ok=True)
    module = make_module(pl, {"marks": str(folder), "label": "run", "monitor": "train_loss_epoch"})
    events, saves = Events(), CheckpointerCallback(every=every)
    stop = [] if stop_after is None else [StopAfter(stop_after)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[events, saves, *stop],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"max_epochs": EPOCHS, **options},
    )
    loader = DataLoader(digits(0, STEPS * 16), batch_size=16, shuffle=True)
    try:
        trainer.fit(module, loader, DataLoader(digits(480, 540), batch_size=30))
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
