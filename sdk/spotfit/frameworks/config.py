"""What every backend's options have in common, and the hooks a user's own may have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.model.config import ScalingConfig

NO_FRAMEWORK = "none"


class _OnePerClass(type):
    """Makes one object of each class, and gives that to whoever asks again."""

    _made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._made:
            cls._made[cls] = super().__call__(*args, **kwargs)
        return cls._made[cls]


class Backend(metaclass=_OnePerClass):
    """Hooks around the training function, called beside the workers, in every attempt.

    Derive from it, and name the class in `BackendConfig.backend_cls`. Hooks run in a process of
    their own on the leader's node; each class has one object there. `worker_group` calls functions
    on the workers. An exception in a hook ends the run as a `ControllerError`.
    """

    share_cuda_visible_devices: bool = False
    """Whether each worker sees the GPUs of its node's other workers, too."""
    has_replica_groups: bool = False
    """There are none here: a round is one group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """The workers of an attempt are there; their framework has not formed its group."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """The group is formed, and the training function is about to be called."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """The attempt is over. Only after a success are its workers still there to be called."""


class BackendConfig:
    """How the workers' training library is set up; this one sets up nothing.

    Derive from it, as a dataclass if it has fields.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """Whose hooks are called around the training function."""
        return Backend

    @property
    def framework(self) -> str:
        """The name under which the workers find the framework."""
        return NO_FRAMEWORK

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes a context that is entered around the training function, on every worker."""
        return nullcontext

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """The framework's name, and its options as plain data, for workers of that scaling."""
        name = self.framework
        return name, {} if name == NO_FRAMEWORK else self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Its fields, as plain data."""
        return dict(vars(self))


def hooks_of(config: BackendConfig) -> type[Backend] | None:
    """The class whose hooks want to be called; None where there are none.

    Raises `ConfigError` where `backend_cls` is no class of that kind.
    """
    kind: Any = config.backend_cls
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        raise ConfigError(
            f"{type(config).__name__}.backend_cls is {kind!r}, no subclass of "
            "spotfit.backend.Backend.",
            do="Derive it from Backend, and give the class, not an object of it.",
        )
    return None if kind is Backend else kind
