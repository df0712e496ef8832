"""Callbacks of a run: classes from SPOTFIT_CALLBACKS, and contexts around the training function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector
from spotfit.host import env
from spotfit.model.user_callback import UserCallback

ContextFactory = Callable[[], AbstractContextManager[Any]]
"""Returns a context manager in which the training function runs."""


@dataclass(frozen=True)
class NestedContexts:
    """Combines context factories; the first is the outermost. It is pickled to the workers."""

    factories: tuple[ContextFactory, ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter all contexts in order; exit them in reverse order."""
        with ExitStack() as stack:
            # The stack exits what it has entered also if a later factory raises.
            for factory in self.factories:
                stack.enter_context(factory())
            yield


def nest_train_contexts(
    outermost: ContextFactory, callbacks: Sequence[UserCallback]
) -> ContextFactory:
    """Return a factory of the backend's context with the context of each callback inside.

    Returns `nullcontext` if there is none.
    """
    factories = [outermost] if outermost is not nullcontext else []
    factories += [
        callback.train_func_context for callback in callbacks if callback.has_train_func_context()
    ]
    # A single factory is returned as it is, because unpickling needs no class of spotfit then.
    return NestedContexts(tuple(factories)) if len(factories) > 1 else (*factories, nullcontext)[0]


def load_callbacks_from_env() -> list[UserCallback]:
    """Return an instance of every class in SPOTFIT_CALLBACKS.

    Raises `ConfigError` for a class that cannot be imported or instantiated, or `ConfigErrors`.
    """
    errors = ErrorCollector()
    callbacks = [errors.check(partial(_create_callback, path)) for path in env.read(env.CALLBACKS)]
    errors.raise_all()
    return callbacks


def _create_callback(path: str) -> UserCallback:
    module, _, name = path.rpartition(".")
    try:
        callback_class = getattr(importlib.import_module(module), name)
        if isinstance(callback_class, type) and issubclass(callback_class, UserCallback):
            return callback_class()
        cause, reason = None, "it is not a subclass of spotfit.UserCallback"
    # Importing the module and calling the constructor execute user code, which may raise anything.
    except Exception as error:  # noqa: BLE001  # it becomes the cause of the ConfigError below
        cause, reason = error, f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"The callback {path!r} in {env.CALLBACKS.name} cannot be created: {reason}.",
        do="Name classes as package.module.Class; they are instantiated without arguments.",
    ) from cause
