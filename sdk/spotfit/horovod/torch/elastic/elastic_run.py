"""hvd.elastic.run: a training that continues after restarts of its workers.

In spotfit a lost worker or machine ends the round, and all workers start again. So the function is
called once per process: the state is restored before it, and no exception is handled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.elastic.elastic_state import ObjectState
from spotfit.model.failure_model import SaveCondition
from spotfit.torch.checkpoint.checkpointer import Checkpointer
from spotfit.worker.training_api import has_session

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@overload
def run(func: FunctionT) -> FunctionT: ...


@overload
def run(
    *,
    every: SaveCondition | Sequence[SaveCondition] = "auto",
    max_overhead: float | None = None,
) -> Callable[[FunctionT], FunctionT]: ...


def run(
    func: Callable[..., Any] | None = None,
    *,
    every: SaveCondition | Sequence[SaveCondition] = "auto",
    max_overhead: float | None = None,
) -> Any:
    """Decorate a function whose first argument is a `TorchState` or `ObjectState`.

    A call restores the state if the workers have been restarted, calls the state's reset callbacks
    then, sets the state to that of rank 0, and calls the function. In a worker of spotfit the state
    is saved at commits, when a save is due: `every` and `max_overhead` are those of
    `spotfit.torch.Checkpointer`, and a number counts commits. `@hvd.elastic.run` has the defaults.

    The decorated function raises `ConfigError` if its first argument is no state, and the errors of
    `Checkpointer`.
    """
    if func is None:
        return functools.partial(run, every=every, max_overhead=max_overhead)

    @functools.wraps(func)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, ObjectState):
            raise ConfigError(
                f"The first argument of a function with @hvd.elastic.run is {type(state)!r}, not a "
                "state.",
                do="Pass hvd.elastic.TorchState(model, optimizer, ...).",
            )
        checkpointer = functools.partial(Checkpointer, every=every, max_overhead=max_overhead)
        if has_session() and state.attach(checkpointer):
            state.on_reset()
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper
