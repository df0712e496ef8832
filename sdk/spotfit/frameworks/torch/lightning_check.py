"""Rejects a Lightning `Trainer` that would train one model per worker.

Lightning reads the world size from its strategy and cluster environment. A `Trainer` without those
of spotfit sees one process: each worker would train a model of its own on all data, and the run
would cost as many times as much without any error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from spotfit.core.errors import UnpreparedTrainerError

LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The packages of PyTorch Lightning, preferred first."""
PREPARED_TRAINER = (
    'Trainer(devices="auto", accelerator="auto", strategy=RayDDPStrategy(), '
    "plugins=[RayLightningEnvironment()])"
)
"""The line that fixes an unprepared Trainer."""
_TRAINER_MODULES = tuple(f"{package}.trainer.trainer" for package in LIGHTNING_PACKAGES)


def check_trainers_at_fit(world_size: int) -> None:
    """Let `Trainer.fit` of both packages raise `UnpreparedTrainerError` for unprepared trainers.

    `world_size` is the number of workers. Called in a worker before the training function; it
    imports neither package, and also applies if one is imported later.
    """
    for name in _TRAINER_MODULES:
        if name in sys.modules:
            _check_at_fit(sys.modules[name], world_size)
    # First: other finders must not return the unpatched module.
    sys.meta_path.insert(0, _TrainerFinder(world_size))


def reject_unprepared_trainer(trainer: Any, world_size: int) -> None:
    """Raise `UnpreparedTrainerError` if this Trainer would not train with the other workers.

    `world_size` is the number of workers.
    """
    strategy = trainer.strategy
    if _launches_processes(strategy):
        problem = "would start processes of its own"
    elif trainer.world_size != world_size:
        problem = (
            f"has the world size {trainer.world_size}: each worker would train a separate model"
        )
    else:
        return
    raise UnpreparedTrainerError(
        f"The run has {world_size} workers, but this Trainer, with {type(strategy).__name__}, "
        f"{problem}.",
        do=f"Create it by `trainer = prepare_trainer({PREPARED_TRAINER})`, with the names of "
        "spotfit.lightning. To train separate models, use DataParallelTrainer.",
        retryable=False,
    )


def _launches_processes(strategy: Any) -> bool:
    launcher = getattr(strategy, "launcher", None)
    environment = getattr(launcher, "cluster_environment", None)
    return launcher is not None and not getattr(environment, "creates_processes_externally", False)


def _check_at_fit(module: ModuleType, world_size: int) -> None:
    fit = module.Trainer.fit

    @wraps(fit)
    def checked_fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        reject_unprepared_trainer(trainer, world_size)
        return fit(trainer, *args, **kwargs)

    module.Trainer.fit = checked_fit


class _TrainerFinder(MetaPathFinder):
    """Finds Lightning's trainer modules, which are patched when they are executed."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that patches it; None for all other modules."""
        if fullname not in _TRAINER_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TrainerLoader(spec.loader, self._world_size)
        return spec


class _TrainerLoader(Loader):
    def __init__(self, loader: Loader, world_size: int) -> None:
        self._loader = loader
        self._world_size = world_size

    def __getattr__(self, name: str) -> Any:
        """Forward to the module's own loader, for example `get_source` for tracebacks."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the original loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then replace `Trainer.fit`."""
        self._loader.exec_module(module)
        _check_at_fit(module, self._world_size)
