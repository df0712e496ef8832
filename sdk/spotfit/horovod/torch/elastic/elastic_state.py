"""ObjectState and TorchState: what elastic training saves, restores and synchronizes.

In a worker of spotfit, `elastic_run` attaches a `Checkpointer` to the state: it saves at commits,
and restores when the workers have been restarted. Elsewhere a commit is kept in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from spotfit.horovod.torch.elastic.elastic_sampler import ElasticSampler
from spotfit.horovod.torch.exchanges import broadcast_object
from spotfit.horovod.torch.process_sets import rank
from spotfit.torch.checkpoint.checkpointer import Checkpointer


class ObjectState:
    """Values that are attributes of this object, the same on all ranks after `sync`.

    Values with `state_dict` and `load_state_dict` remain the same objects, and their state is
    saved; others are replaced. What a worker saves must be numbers, texts, tensors, and lists or
    dictionaries of them.
    """

    _checkpointer: Checkpointer | None = None

    if TYPE_CHECKING:  # the names of the values are not known

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        """`kwargs` are the values by name. The other arguments have no effect."""
        self._names = tuple(kwargs)
        self._reset_callbacks: list[Callable[[], object]] = []
        self._saved: dict[str, Any] | None = None
        for name, value in kwargs.items():
            setattr(self, name, value)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these functions after a restart, when the state is restored, on all ranks.

        For example to adapt the learning rate to another number of ranks.
        """
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """Call `reset` and the registered callbacks; `hvd.elastic.run` does after a restart."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Called after a restart, before the callbacks. Does nothing; subclasses may."""

    def commit(self) -> None:
        """Record that all ranks have come to this point, from which training can continue.

        In a worker, the state is saved if a save is due, in the background; all ranks call it
        equally often. Elsewhere it is copied for `restore`. Raises `ConfigError` for values that
        cannot be saved.
        """
        if self._checkpointer is not None:
            self._checkpointer.step()
        else:
            self.save()

    def check_host_updates(self) -> None:
        """Do nothing: when machines come or leave, spotfit restarts the workers."""

    def save(self) -> None:
        """Copy the state in memory, for `restore`."""
        self._saved = copy.deepcopy(self.state_dict())

    def restore(self) -> None:
        """Return to the last `save` or `commit`, if there is one.

        Raises `ConfigError` in a worker, which restores when the workers have been restarted.
        """
        if self._checkpointer is not None:
            raise ConfigError(
                "state.restore() was called in a worker: commits are saved, not kept in memory.",
                do="End the function with an exception: the workers are restarted, and continue "
                "with the last state that was saved.",
                retryable=False,
            )
        if self._saved is not None:
            self.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Set the state to that of rank 0. A collective."""
        self.load_state_dict(broadcast_object(self.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """Return all values, and the states of those that have one."""
        return {name: _state_of(value) for name, value in self._values().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set all values to those of a state that `state_dict` has returned."""
        for name, value in state_dict.items():
            current = getattr(self, name)
            if _is_stateful(current):
                current.load_state_dict(value)
            else:
                setattr(self, name, value)

    def attach(self, make_checkpointer: Callable[..., Checkpointer]) -> bool:
        """Let a new `Checkpointer` save this state from now on, and restore it if there is one.

        `make_checkpointer` is called with the arguments that depend on the state. Collective.
        Returns whether a state was restored. Raises the errors of `Checkpointer`.
        """
        values = self._values()
        models = {key: one for key, one in values.items() if isinstance(one, torch.nn.Module)}
        optimizers = [one for one in values.values() if isinstance(one, torch.optim.Optimizer)]
        others = {
            key: one
            for key, one in values.items()
            if key not in models and not isinstance(one, torch.optim.Optimizer)
        }
        self._checkpointer = make_checkpointer(
            model=torch.nn.ModuleDict(models),
            optimizer=optimizers,
            extra={"elastic_state": _StateOfValues(self, tuple(others))},
        )
        for value in values.values():
            if isinstance(value, ElasticSampler):
                # A loader draws a seed when it begins to read, also in the middle of an epoch.
                value.before_first_row = self._checkpointer.restore_rng_state
        return self._checkpointer.restore() is not None

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}


class TorchState(ObjectState):
    """State of a PyTorch training: models, optimizers, an `ElasticSampler` and other values.

    All arguments become attributes: `TorchState(model=model, optimizer=optimizer, epoch=0)`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Further models and optimizers may be given by name, too."""
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def sync(self) -> None:
        """Set the state to that of rank 0. A collective."""
        values = self._values()
        for value in values.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
        tensors = torch.nn.Module | torch.optim.Optimizer
        names = [name for name, value in values.items() if not isinstance(value, tensors)]
        rest = _StateOfValues(self, tuple(names))
        rest.load_state_dict(broadcast_object(rest.state_dict()))


class _StateOfValues:
    """Some values of a state, for a `Checkpointer`."""

    def __init__(self, state: ObjectState, names: tuple[str, ...]) -> None:
        self._state, self._names = state, names

    def state_dict(self) -> dict[str, Any]:
        return {name: _state_of(getattr(self._state, name)) for name in self._names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state_dict)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state_of(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value
