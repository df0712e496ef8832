"""The functions of `spotfit.torch` that a training function calls in its worker.

They look up the worker's session and delegate; modules that import torch are imported on call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from spotfit.worker.training_api import require_session

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


def init_module() -> AbstractContextManager[None]:
    """Return a context in which to build and prepare the model, for faster restarts.

    Every rank enters it. If a checkpoint of a `Checkpointer` exists, weights that would be
    initialized randomly are set to NaN until `Checkpointer.restore()` loads them, and DDP does not
    broadcast rank 0's weights. Otherwise they are drawn from a separate generator, seeded from
    torch's RNG: either way the same random numbers remain for the rest of the program.

    Every weight created in the context must belong to the Checkpointer or be set by your own code:
    otherwise `restore()` raises `ConfigError`. Code that computes with fresh weights, or copies
    them, before `restore()` reads NaN. Raises `SessionMisuseError` outside of a training function.
    """
    from spotfit.torch.checkpoint import deferred_init

    channel = require_session("spotfit.torch.init_module").snapshot_channel
    can_restore = channel.has_snapshots and channel.initial_checkpoint is not None
    return deferred_init.defer_init(channel, deferred=can_restore)


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,  # noqa: FBT001, FBT002 - as in Ray Train
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Move the model to this worker's device and wrap it for training with all workers.

    All workers must call it. `move_to_device` is True for `get_device()`, a device, or False for
    the model's present one. `parallel_strategy` is "ddp", "fsdp" (GPUs only), "fsdp2" (torch's
    `fully_shard`, in place) or None; a single worker gets no wrapper except "fsdp2".
    `parallel_strategy_kwargs` are passed to the wrapper. Both FSDP strategies accept
    `auto_wrap_policy`; for "fsdp2" it may be a collection of module classes.

    Raises `ConfigError` for an invalid strategy or policy, and `SessionMisuseError` outside of a
    training function.
    """
    from spotfit.torch import prepare

    session = require_session("spotfit.torch.prepare_model")
    if isinstance(move_to_device, bool):
        device = prepare.torch_devices(session.devices)[0]
    else:
        device = move_to_device
    return prepare.prepare_model(
        model,
        world_size=session.context.get_world_size(),
        device=device,
        move=move_to_device is not False,
        strategy=parallel_strategy,
        options=parallel_strategy_kwargs or {},
    )


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,  # noqa: FBT001, FBT002 - as in Ray Train
    move_to_device: bool = True,  # noqa: FBT001, FBT002
    auto_transfer: bool = True,  # noqa: FBT001, FBT002
) -> DataLoader[Any]:
    """Return a loader over this worker's shard of the data, with batches on its device.

    The batch size is per worker, and shards are padded to equal length. Your own DistributedSampler
    is kept, any other sampler is replaced by one, unless `add_dist_sampler` is False. An
    IterableDataset is not split. A single worker's loader is kept, unless it is stateful and the
    group is elastic. Call `loader.sampler.set_epoch(epoch)` to reshuffle in each epoch.

    With `auto_transfer` and `move_to_device` the next batch is copied to the GPU while the current
    one is used; give the loader `pin_memory=True` for that. Batches of a stateful loader
    (`state_dict`) are not prefetched. Raises `ConfigError` for a custom batch sampler, and
    `SessionMisuseError` outside of a training function.
    """
    from spotfit.torch import data_loader as loader_module
    from spotfit.torch import prepare

    session = require_session("spotfit.torch.prepare_data_loader")
    if add_dist_sampler:
        data_loader = loader_module.shard_data_loader(
            data_loader,
            world_size=session.context.get_world_size(),
            rank=session.context.get_world_rank(),
            is_elastic=session.snapshot_channel.outlook().allows_resize,
        )
    if not move_to_device:
        return data_loader
    device = prepare.torch_devices(session.devices)[0]
    return loader_module.with_device_transfer(data_loader, device, prefetch=auto_transfer)


def get_device() -> torch.device:
    """Return this worker's device, such as `cuda:0`; the first one if it has several.

    `cpu` without an accelerator. GPUs are numbered among those that this process sees. Raises
    `SessionMisuseError` outside of a training function.
    """
    return _devices("spotfit.torch.get_device")[0]


def get_devices() -> list[torch.device]:
    """Return all devices of this worker; its CPU if it has no accelerator.

    GPUs are numbered among those that this process sees. Raises `SessionMisuseError` outside of a
    training function.
    """
    return _devices("spotfit.torch.get_devices")


def enable_reproducibility(seed: int = 0) -> None:
    """Seed the RNGs of torch, numpy and random and require deterministic algorithms.

    For the calling process: call it on every worker, before the model is built. Training becomes
    slower, and operations without a deterministic implementation raise RuntimeError.
    """
    from spotfit.torch import prepare

    prepare.enable_reproducibility(seed)


def accelerate(amp: bool = False) -> None:  # noqa: FBT001, FBT002 - as in Ray Train
    """Raise `DeprecationWarning`: removed API of Ray Train, replaced by torch.autocast."""
    raise _removed_api_error("accelerate", "use torch.autocast, or Accelerate")


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `DeprecationWarning`: removed API of Ray Train, optimizers need no preparation."""
    raise _removed_api_error("prepare_optimizer", "use the optimizer without preparing it")


def backward(tensor: torch.Tensor) -> None:
    """Raise `DeprecationWarning`: removed API of Ray Train, replaced by `loss.backward()`."""
    raise _removed_api_error("backward", "call loss.backward()")


def _devices(caller: str) -> list[torch.device]:
    # The session check comes first: outside of a worker its error must not wait for torch's import.
    session = require_session(caller)
    from spotfit.torch import prepare

    return prepare.torch_devices(session.devices)


def _removed_api_error(name: str, replacement: str) -> DeprecationWarning:
    return DeprecationWarning(
        f"spotfit.torch.{name} is no longer supported. Instead, {replacement}."
    )
