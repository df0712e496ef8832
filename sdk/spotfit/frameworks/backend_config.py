"""BackendConfig, the base of all framework configurations, and Backend, its optional hooks.

A `BackendConfig` is created by the user and read by the trainer; it selects the framework of the
workers. A `Backend` subclass adds hooks that run once per round beside the leader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.model.config import ScalingConfig

NO_FRAMEWORK = "none"


class _SingletonMeta(type):
    """Metaclass that creates one instance per class, as Ray Train does for its backends."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


class Backend(metaclass=_SingletonMeta):
    """Hooks around the training function, called once per round.

    Subclass it and return the class from `BackendConfig.backend_cls`. Hooks run in a separate
    process on the leader's node, with one instance per class. `worker_group` runs functions on the
    workers. An exception in a hook ends the run with a `ControllerError`.
    """

    share_cuda_visible_devices: bool = False
    """Whether each worker also sees the GPUs of the other workers on its node."""
    has_replica_groups: bool = False
    """Always False: the workers of a round form a single group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Called in the hooks process when all workers have started, before they form their group.

        Blocks the round until it returns. `worker_group` calls functions on the workers:
        `worker_group.execute(fn, *args)` returns the results by rank. `backend_config` is the
        object that the user passed to the trainer. The base class does nothing.
        """

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Called in the hooks process when the workers have formed their process group.

        The workers call the training function once it has returned. The arguments are those of
        `on_start`. The base class does nothing.
        """

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Called in the hooks process when the training function has returned on all workers.

        The workers exit once it has returned; until then `worker_group` can call functions on them.
        Also called after a round that failed once its `on_start` had returned: then without
        workers, and calls fail. The arguments are those of `on_start`. The base class does nothing.
        """


class BackendConfig:
    """Configuration of the workers' training library; this base class configures none.

    Subclass it, as a dataclass if it has fields.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """The class whose hooks are called around the training function in every round.

        Read by the trainer. `Backend` itself, the default, means that there are no hooks.
        """
        return Backend

    @property
    def framework(self) -> str | None:
        """The name under which workers look up the framework, such as "torch"; None by default.

        spotfit has "torch", "torch_xla" and "torchft"; packages may add others with an entry point
        of the group `spotfit.frameworks`. With None the workers set up no framework.
        """
        return None

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Factory of the context manager in which each worker runs the training function.

        Called without arguments, once per worker and round; it is pickled with the function. The
        default context does nothing.
        """
        return nullcontext

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """Return the framework's name and its JSON-compatible options for the given workers.

        Called by the trainer before machines are requested; workers receive both in every round. {}
        and the name "none" without a framework. Subclasses raise `ConfigError` for invalid fields.
        """
        # A class without framework may have fields that cannot be serialized for the workers.
        name = self.framework or NO_FRAMEWORK
        return name, {} if name == NO_FRAMEWORK else self.to_dict()

    def required_modules(self, env_vars: Mapping[str, str]) -> tuple[str, ...]:
        """Return the top-level modules without which workers cannot start; none by default.

        `env_vars` are the run's variables. Called before machines are requested: an error is raised
        if it is known that the machines lack one. Nothing is imported.
        """
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a new dictionary by attribute name; nested values are not copied."""
        # Not dataclasses.asdict: subclasses need not be dataclasses, and nested values stay as is.
        return dict(vars(self))


def backend_hooks_class(config: BackendConfig) -> type[Backend] | None:
    """Return the class whose hooks must be called, or None if the configuration has no hooks.

    Called by the trainer: with None no process for hooks is started. Raises `ConfigError` if
    `backend_cls` is not a subclass of `Backend`.
    """
    hooks: Any = config.backend_cls
    if not (isinstance(hooks, type) and issubclass(hooks, Backend)):
        raise ConfigError(
            f"{type(config).__name__}.backend_cls is {hooks!r}, which is not a subclass of "
            "spotfit.backend.Backend.",
            do="Derive the class from Backend and return the class itself, not an instance.",
        )
    # The base class has empty hooks only: no hook process is started for it.
    return None if hooks is Backend else hooks
