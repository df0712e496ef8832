"""FitCheckpointer: saves and restores one `Trainer.fit` with a Checkpointer.

It follows Lightning's loops, in this order (the methods that it wraps are in quotation marks):

| state | event | next |
|---|---|---|
| new | the model is set up: data loader, `restore` | restored, or training |
| restored | "begin epoch": the RNG states are set once more | restored |
| restored | "begin batches": the loops forget that they were restarted | training |
| training | "end batch": `step`; the last batch of an epoch holds its save | training |
| training | "end epoch": the epoch ends, and the held save is taken if due | training |

Saves are taken at the end of a batch, after validation, loggers and all hooks, and at the end of an
epoch after its schedulers: a resume has nothing to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spotfit.checkpoint.base_checkpointer import RestoreResult
from spotfit.core.errors import ConfigError
from spotfit.deepspeed.engine_checkpointer import Checkpointer as EngineCheckpointer
from spotfit.host import log
from spotfit.lightning.epoch_report import plain_metrics
from spotfit.lightning.logged_values import LoggedValues
from spotfit.lightning.loop_state import LoopState
from spotfit.torch.checkpoint.checkpointer import Checkpointer, TrainingStateCheckpointer
from spotfit.torch.checkpoint.data_position import is_stateful_loader
from spotfit.worker.training_api import require_session

_LOOPS_NAME = "lightning"
_LOGGED_NAME = "lightning_logged_values"
_SCHEDULERS_NAME = "lightning_schedulers"


class FitCheckpointer:
    """The Checkpointer of one `Trainer.fit`, which its loops drive."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        """Create the Checkpointer; `options` are its arguments besides what Lightning has.

        A collective, called in `on_fit_start`: model and optimizers are set up, the loops have not
        begun. Raises `ConfigError`.
        """
        self._trainer = trainer
        self._fit_loop = trainer.fit_loop
        _reject_unsupported(trainer)
        self._fit_loop.setup_data()  # does nothing when the loop calls it again
        self._loops = LoopState(trainer)
        self._metrics: dict[str, Any] = {}
        """Metrics of the last validation or epoch: reading those of each batch waits for a GPU."""
        self._wrapped: list[tuple[Any, str]] = []
        self._is_resuming = False
        self.checkpointer = _make_checkpointer(trainer, _with_loops(trainer, self._loops, options))

    def restore(self) -> RestoreResult | None:
        """Restore the newest state, if there is one, and start the data's pass. A collective."""
        restored = self.checkpointer.restore()
        if restored is not None:
            self._is_resuming = True
            _discard_other_checkpoint(self._trainer)
            self._recount_batches()
        if restored is None or self._loops.is_within_epoch:
            # Lightning's iterator was created before the loader's position was set. Between two
            # epochs the loop creates one itself, as it did in the original run.
            iter(self._fit_loop._data_fetcher)
        return restored

    def follow_loops(self) -> None:
        """Wrap the methods of Lightning's loops at which steps and epochs begin and end."""
        epoch_loop = self._fit_loop.epoch_loop
        self._wrap(self._fit_loop, "on_advance_start", self._begin_epoch)
        self._wrap(epoch_loop, "on_run_start", self._begin_batches)
        self._wrap(epoch_loop, "on_advance_end", self._end_batch)
        self._wrap(self._fit_loop, "on_advance_end", self._end_epoch)

    def unfollow_loops(self) -> None:
        """Restore the methods of Lightning's loops. Idempotent."""
        while self._wrapped:
            loop, name = self._wrapped.pop()
            delattr(loop, name)

    def record_metrics(self) -> None:
        """Store the current `callback_metrics` with the next saves."""
        self._metrics = plain_metrics(self._trainer)

    def _wrap(self, loop: Any, name: str, wrapper: Callable[..., None]) -> None:
        setattr(loop, name, partial(wrapper, getattr(loop, name)))
        self._wrapped.append((loop, name))

    def _begin_epoch(self, original: Callable[[], None]) -> None:
        if self._is_resuming:
            if not self._loops.is_within_epoch:
                self._is_resuming = False
                self._loops.finish_restart()
            # Hooks at the beginning of the training have run again, and may have drawn numbers.
            self.checkpointer.restore_rng_state()
        original()

    def _begin_batches(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        original(data_fetcher)
        if self._is_resuming:
            self._is_resuming = False
            self._loops.finish_restart()
            # In an epoch's first batch Lightning resets the values logged before.
            self._trainer._logger_connector._first_loop_iter = False

    def _end_batch(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        original(data_fetcher)
        epoch_loop = self._fit_loop.epoch_loop
        # DeepSpeed's engine counts accumulated batches itself, across epochs; its Checkpointer
        # knows its steps.
        is_counted_here = not self._trainer.strategy.handles_gradient_accumulation
        # A resume after the last batch would skip the epoch's end.
        self.checkpointer.step(
            self._metrics,
            accumulating=is_counted_here and epoch_loop._should_accumulate(),
            hold=epoch_loop.done,
        )

    def _end_epoch(self, original: Callable[[], None]) -> None:
        original()
        self.record_metrics()
        self.checkpointer.end_epoch()
        self.checkpointer.save_if_due(self._metrics)

    def _recount_batches(self) -> None:
        """After a resize, let the epoch end with the last of the batches that are left."""
        is_resized = self._loops.saved_world_size not in (None, self._trainer.world_size)
        left = self.checkpointer.remaining_batches
        if is_resized and left is not None and self._loops.is_within_epoch:
            self._loops.count_batches_again(max(0, int(self._fit_loop.max_batches) - left))


def _make_checkpointer(trainer: Any, options: dict[str, Any]) -> TrainingStateCheckpointer:
    strategy, loader = trainer.strategy, _only_loader(trainer.fit_loop)
    scheduler = _SchedulerGroup(trainer) if trainer.lr_scheduler_configs else None
    if "DeepSpeed" in type(strategy).__name__:
        # Lightning steps the schedulers itself, and hides them from the engine.
        extra = options["extra"] | ({} if scheduler is None else {_SCHEDULERS_NAME: scheduler})
        return EngineCheckpointer(strategy.model, loader=loader, **{**options, "extra": extra})
    return Checkpointer(
        model=strategy.model,
        optimizer=strategy.optimizers,
        scheduler=scheduler,
        scaler=getattr(trainer.precision_plugin, "scaler", None),
        loader=loader,
        **options,
    )


class _SchedulerGroup:
    """All learning rate schedulers of the trainer, as one object with a state dict."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        configs = self._trainer.lr_scheduler_configs
        return {str(n): config.scheduler.state_dict() for n, config in enumerate(configs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for n, config in enumerate(self._trainer.lr_scheduler_configs):
            config.scheduler.load_state_dict(state[str(n)])


def _with_loops(trainer: Any, loops: LoopState, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Checkpointer's options with the state of Lightning's loops."""
    extra, per_rank = dict(options.get("extra") or {}), dict(options.get("per_rank") or {})
    extra[_LOOPS_NAME] = loops
    # State of one rank cannot be restored by a group of another size.
    if not require_session("CheckpointerCallback").snapshot_channel.outlook().allows_resize:
        per_rank[_LOGGED_NAME] = LoggedValues(trainer)
    total = options.get("total_steps") or _total_batches(trainer)
    return {**options, "extra": extra, "per_rank": per_rank, "total_steps": total}


def _total_batches(trainer: Any) -> int | None:
    """Return the number of batches of the complete training on one rank; None if it is unknown."""
    limits = []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limits.append(trainer.max_epochs * trainer.fit_loop.max_batches)
    if trainer.max_steps > 0:
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    total = min(limits, default=float("inf"))
    return int(total) if 0 < total < float("inf") else None


def _only_loader(fit_loop: Any) -> Any:
    """Return the training's data loader; None, with a warning, if it has several.

    Raises `ConfigError` for one whose position would be wrong.
    """
    combined = fit_loop._combined_loader  # its bool() raises without a length
    loaders = [] if combined is None else combined.flattened
    if len(loaders) > 1:
        log.warning(
            "lightning.several_loaders",
            loaders=len(loaders),
            reason="the position in their data is not saved",
            do="combine the datasets in one DataLoader; otherwise a restart within an epoch begins "
            "the data again",
        )
        return None
    loader = loaders[0] if loaders else None
    # Without a length Lightning reads one batch ahead of the training, also when a save is taken.
    if loader is not None and is_stateful_loader(loader) and fit_loop._data_fetcher.length is None:
        raise ConfigError(
            f"CheckpointerCallback cannot save the position of a {type(loader).__name__} without a "
            "length: Lightning reads one batch ahead, which a resume would skip.",
            do="Set Trainer(limit_train_batches=...) to the number of batches of an epoch.",
            retryable=False,
        )
    return loader


def _reject_unsupported(trainer: Any) -> None:
    fit_loop = trainer.fit_loop
    if missing := [
        name
        for loop, name in (
            (fit_loop, "setup_data"),
            (fit_loop, "on_advance_start"),
            (fit_loop, "on_advance_end"),
            (fit_loop.epoch_loop, "on_run_start"),
            (fit_loop.epoch_loop, "on_advance_end"),
            (fit_loop.epoch_loop, "_should_accumulate"),
        )
        if not hasattr(loop, name)
    ]:
        raise ConfigError(
            f"CheckpointerCallback does not support this version of Lightning: its loops have no "
            f"{', '.join(missing)}.",
            do="Install lightning 2.6, or use RayTrainReportCallback.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "CheckpointerCallback does not support Trainer(reload_dataloaders_every_n_epochs=…): "
            "it tracks the position in one data loader.",
            do="Use one loader for all epochs, or use RayTrainReportCallback.",
            retryable=False,
        )


def _discard_other_checkpoint(trainer: Any) -> None:
    """Let the restored state replace the checkpoint of `Trainer.fit(ckpt_path=...)`.

    Lightning loads the rest of that checkpoint after `on_fit_start`. Raises `ConfigError` if it
    would load the weights then, too.
    """
    connector = trainer._checkpoint_connector
    if not connector._loaded_checkpoint and not trainer.ckpt_path:
        return
    if trainer.strategy.restore_checkpoint_after_setup:
        raise ConfigError(
            f"Trainer.fit(ckpt_path=...) with {type(trainer.strategy).__name__} would replace the "
            "state that CheckpointerCallback has restored.",
            do="Load the weights in configure_model() or setup() instead.",
            retryable=False,
        )
    connector._loaded_checkpoint = {}
