"""What a training function of torch calls, for the worker it runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from spotfit.worker.current import current

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


def init_module() -> AbstractContextManager[None]:
    """Build the model in it, and prepare it there, to lose no time after a restart.

    Where a `Checkpointer`'s checkpoint can be gone on from, weights that would be drawn at random
    are not: they are NaN until `Checkpointer.restore()` brings them, and DDP does not send rank 0's
    to all others. Else they are drawn with dice of their own, which torch's dice seed, so that all
    else that is drawn, in it or afterwards, is the same in every life of the run.

    Every weight that is made in it has to be the Checkpointer's or to be set by yourself, or
    `restore()` raises `ConfigError`. Code that computes with fresh weights, or copies them, before
    `restore()` meets NaN.
    """
    from spotfit.frameworks.torch import undrawn

    desk = current("spotfit.torch.init_module").snapshots
    there = desk.has_snapshots and desk.begun_from is not None
    return undrawn.built(desk, left_out=there)


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,  # noqa: FBT001, FBT002 - as in Ray Train
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """The model on this worker's device, wrapped so that all workers train it together.

    `parallel_strategy` is "ddp", "fsdp" (GPUs only), "fsdp2" (torch's `fully_shard`, in place) or
    None; one worker alone gets no wrapper but fsdp2's. `parallel_strategy_kwargs` go to it. Both
    sharding ones take `auto_wrap_policy`: for fsdp2 simply the classes of the model's blocks.
    """
    from spotfit.frameworks.torch import prepare

    session = current("spotfit.torch.prepare_model")
    if isinstance(move_to_device, bool):
        device = prepare.devices(session.devices)[0]
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
    """A loader of this worker's share, with batches on its device.

    Its batch size is per worker, and shares are filled up to equal length. A DistributedSampler of
    your own is kept, any other sampler replaced by one; an IterableDataset is not split, and a
    single worker's loader kept, but for one with a place of its own in an elastic group. Call
    `loader.sampler.set_epoch(epoch)` to shuffle anew each epoch. With `auto_transfer` the next
    batch moves to a GPU while you work on this one: give the loader pin_memory=True for that. One
    that keeps its own place (`state_dict`) is not asked for a batch before its time.
    """
    from spotfit.frameworks.torch import loader, prepare

    session = current("spotfit.torch.prepare_data_loader")
    if add_dist_sampler:
        size, rank = session.context.get_world_size(), session.context.get_world_rank()
        data_loader = loader.with_share(
            data_loader, world_size=size, rank=rank, resizes=session.snapshots.resizes
        )
    if not move_to_device:
        return data_loader
    device = prepare.devices(session.devices)[0]
    return loader.on_device(data_loader, device, ahead=auto_transfer)


def get_device() -> torch.device:
    """The device of this worker; the first, if it has several."""
    return _devices("spotfit.torch.get_device")[0]


def get_devices() -> list[torch.device]:
    """All devices of this worker; its CPU if it has no accelerator."""
    return _devices("spotfit.torch.get_devices")


def enable_reproducibility(seed: int = 0) -> None:
    """Seed torch, numpy and random, and allow deterministic algorithms only.

    It costs speed; an operation that knows no deterministic way raises.
    """
    from spotfit.frameworks.torch import prepare

    prepare.enable_reproducibility(seed)


def accelerate(amp: bool = False) -> None:  # noqa: FBT001, FBT002 - as in Ray Train
    """No more."""
    raise _no_more("accelerate", "use torch.autocast, or Accelerate")


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """No more."""
    raise _no_more("prepare_optimizer", "use the optimizer as it is")


def backward(tensor: torch.Tensor) -> None:
    """No more."""
    raise _no_more("backward", "call loss.backward()")


def _devices(asker: str) -> list[torch.device]:
    session = current(asker)
    from spotfit.frameworks.torch import prepare

    return prepare.devices(session.devices)


def _no_more(name: str, instead: str) -> DeprecationWarning:
    return DeprecationWarning(f"spotfit.torch.{name} is no longer supported: {instead}.")
