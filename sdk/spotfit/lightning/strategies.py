"""Lightning's strategies and environment in a worker: ranks, device and group are spotfit's.

The process group of a worker stands before the training function runs. These classes answer
Lightning's questions about it, and start no processes. `lightning_classes` combines them with the
base classes of the package in use.
"""

from __future__ import annotations

from typing import Any

from spotfit.core.errors import UnpreparedTrainerError
from spotfit.frameworks.torch.deepspeed_ops import import_deepspeed
from spotfit.frameworks.torch.lightning_check import (
    PREPARED_TRAINER,
    reject_unprepared_trainer,
)
from spotfit.torch.loop import get_device
from spotfit.worker.training_api import get_context


class WorkerEnvironment:
    """Lightning's cluster environment in a worker: sizes and ranks are those of `get_context()`."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning must not start processes: always, the workers are running."""
        return True

    def world_size(self) -> int:
        """Return the number of workers of the run."""
        return get_context().get_world_size()

    def global_rank(self) -> int:
        """Return this worker's rank in the run."""
        return get_context().get_world_rank()

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the number of this worker's node."""
        return get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Do nothing: Lightning computes `size` from devices and nodes, which are not its own."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: Lightning computes `rank` from devices and nodes, which are not its own."""

    def teardown(self) -> None:
        """Do nothing: the group and the variables of this process belong to the worker."""


class WorkerStrategy:
    """Part of a Lightning strategy: one process per worker, in the group that stands already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of Lightning's strategy; those about the process group are unused."""
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> Any:
        """This worker's `torch.device`, as `spotfit.torch.get_device()` returns it."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments with which Lightning creates a DistributedSampler: size and rank."""
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}

    def _configure_launcher(self) -> None:
        """Called by Lightning: leave the strategy without a launcher of processes."""


class WorkerDeepSpeedStrategy(WorkerStrategy):
    """As `WorkerStrategy`; on the CPU, DeepSpeed compiles no extension for its collectives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of Lightning's strategy. Raises `MissingExtraError`."""
        import_deepspeed()
        super().__init__(*args, **kwargs)


class WorkerFSDPStrategy(WorkerStrategy):
    """As `WorkerStrategy`, with the method of Ray's `RayFSDPStrategy`."""

    def lightning_module_state_dict(self) -> Any:
        """Return the state of the module as Lightning's FSDPStrategy does. A collective."""
        return super().lightning_module_state_dict()  # type: ignore[misc]  # of Lightning's class


def prepare_trainer(trainer: Any) -> Any:
    """Return `trainer` after checking that it trains one model on all workers.

    Raises `UnpreparedTrainerError` (a RuntimeError) if its strategy or its cluster environment is
    none of spotfit.lightning, for either package of Lightning. Outside of a training function it
    raises `SessionMisuseError`.
    """
    world_size = get_context().get_world_size()
    strategy = trainer.strategy
    environment = getattr(strategy, "cluster_environment", None)
    for part, expected, names in (
        (strategy, WorkerStrategy, "RayDDPStrategy, RayFSDPStrategy or RayDeepSpeedStrategy"),
        (environment, WorkerEnvironment, "RayLightningEnvironment in plugins="),
    ):
        if not isinstance(part, expected):
            raise UnpreparedTrainerError(
                f"This Trainer has {type(part).__name__}, but in a worker it needs {names}.",
                do=f"Create it by `{PREPARED_TRAINER}`, with the names of spotfit.lightning.",
                retryable=False,
            )
    reject_unprepared_trainer(trainer, world_size)
    return trainer
