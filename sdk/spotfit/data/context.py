"""Settings of the data layer in this process, with the names of `ray.data`.

Most settings of Ray concern its scheduler and object store, which do not exist here: they are
accepted and have no effect.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from spotfit.core.errors import ConfigError
from spotfit.host import log


@dataclass
class ExecutionResources:
    """Limits of Ray's executor, which does not exist here: they have no effect."""

    cpu: float | None = None
    gpu: float | None = None
    object_store_memory: float | None = None
    memory: float | None = None

    @classmethod
    def for_limits(cls, **limits: float | None) -> ExecutionResources:
        """Return limits, with the arguments of the constructor."""
        return cls(**limits)

    def copy(self, **limits: float | None) -> ExecutionResources:
        """Return these limits with some of them replaced."""
        return replace(self, **limits)


@dataclass
class ExecutionOptions:
    """Options of Ray's executor, which have no effect. The order of rows is always preserved."""

    resource_limits: ExecutionResources = field(default_factory=ExecutionResources)
    exclude_resources: ExecutionResources | None = None
    preserve_order: bool = False
    actor_locality_enabled: bool = True
    verbose_progress: bool = True
    label_selector: dict[str, str] | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a negative limit."""
        for name, limit in vars(self.resource_limits).items():
            if limit is not None and limit < 0:
                raise ConfigError(
                    f"ExecutionResources({name}={limit}) must not be negative.",
                    do=f"Pass a positive number, or leave {name} out.",
                )


_EFFECTIVE_SETTINGS = (
    *("enable_progress_bars", "execution_options"),
    *("operation_memory_bytes", "spill_directory", "materialize_path"),
)


class DataContext:
    """Settings of this process for `spotfit.data`. Any attribute of Ray's `DataContext` can be set.

    `enable_progress_bars` has an effect, and settings that Ray does not have:
    `operation_memory_bytes`, `spill_directory` and `materialize_path`.
    """

    _current: ClassVar[DataContext | None] = None

    def __init__(self, **settings: Any) -> None:
        self.enable_progress_bars = True
        self.execution_options = ExecutionOptions()
        self.operation_memory_bytes: int | None = None
        """Memory for `sort`, `join`, `groupby`, `unique` and `random_shuffle(exact=True)`.

        Rows that need more are computed in files. None: the free memory.
        """
        self.spill_directory: str | None = None
        """Directory for temporary files of these operations. None: that of the system."""
        self.materialize_path: str | None = None
        """Path or URL for results that do not fit into memory, and for fits of preprocessors.

        Later runs find them there. None: results are temporary files, fits are not stored.
        """
        vars(self).update(settings)

    @classmethod
    def get_current(cls) -> DataContext:
        """Return the settings of this process, which the caller may change."""
        if DataContext._current is None:
            DataContext._current = DataContext()
        return DataContext._current

    @classmethod
    def _set_current(cls, context: DataContext) -> None:
        DataContext._current = context

    def copy(self) -> DataContext:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None  # a setting of Ray that was not set

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _EFFECTIVE_SETTINGS:
            log.debug("data.setting_ignored", setting=name)
        super().__setattr__(name, value)


DatasetContext = DataContext
"""The name before Ray 2.4."""


@dataclass(frozen=True)
class RandomSeedConfig:
    """A seed, as `random_shuffle` and `random_sample` also take it as an integer.

    The order of rows differs in each epoch, also with `reseed_after_execution=False`.
    """

    seed: int | None = None
    reseed_after_execution: bool = True
    use_timestamp_as_default: bool = False


class ActorPoolStrategy:
    """The number of processes for `map` and `map_batches`, which has no effect."""

    def __init__(
        self,
        *,
        size: int | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
        initial_size: int | None = None,
        max_tasks_in_flight_per_actor: int | None = None,
        max_concurrent_calls_per_actor: int | None = None,
        enable_true_multi_threading: bool | None = None,
    ) -> None:
        if size is not None and (min_size, max_size, initial_size) != (None, None, None):
            raise ConfigError(
                "ActorPoolStrategy(size=...) excludes min_size, max_size and initial_size.",
                do="Pass either size or the other arguments.",
            )
        self.min_size = size or min_size or 1
        self.max_size = size or max_size
        self.initial_size = initial_size
        check_pool_size("ActorPoolStrategy(...)", self.min_size, self.max_size)


class TaskPoolStrategy:
    """The largest number of processes for `map` and `map_batches`, which has no effect."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        check_pool_size("TaskPoolStrategy(...)", 1, size)


def check_pool_size(setting: str, min_size: int, max_size: int | None) -> None:
    """Raise `ConfigError` for numbers of processes below 1, or in the wrong order."""
    if min_size < 1 or (max_size is not None and max_size < min_size):
        raise ConfigError(
            f"{setting}: {min_size} to {max_size} processes is not a valid range.",
            do="Pass numbers of at least 1, the smaller one first.",
        )


NodeIdStr: TypeAlias = str
"""The name of a node, as in annotations of scripts for Ray."""
