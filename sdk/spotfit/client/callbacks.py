"""The callbacks of a run: those its environment names, then those it was given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes
from spotfit.host import env
from spotfit.model.callbacks import UserCallback

Surround = Callable[[], AbstractContextManager[Any]]
"""Makes a context for the training function to run in."""


@dataclass(frozen=True)
class Nested:
    """Several of them, the first outermost. It travels to the workers."""

    surrounds: tuple[Surround, ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter them in order, and leave them the other way round."""
        with ExitStack() as stack:
            for surround in self.surrounds:
                stack.enter_context(surround())
            yield


def surrounding(outermost: Surround, callbacks: Sequence[UserCallback]) -> Surround:
    """What is entered around the training function: the backend's context, then each callback's."""
    own = [outermost] if outermost is not nullcontext else []
    found = [*own, *(one.train_func_context for one in callbacks if one.surrounds())]
    return Nested(tuple(found)) if len(found) > 1 else (*found, nullcontext)[0]


def named_callbacks() -> list[UserCallback]:
    """One instance of every class that SPOTFIT_CALLBACKS names.

    Raises `ConfigError` for one that cannot be had, or `ConfigErrors` with all of them.
    """
    mistakes = Mistakes()
    found = [mistakes.check(partial(_made, path)) for path in env.value(env.CALLBACKS)]
    mistakes.raise_all()
    return found


def _made(path: str) -> UserCallback:
    kind = _kind(path)
    if not (isinstance(kind, type) and issubclass(kind, UserCallback)):
        raise _useless(path, "it is no subclass of spotfit.UserCallback")
    try:
        return kind()
    except Exception as error:
        raise _useless(path, f"{type(error).__name__}: {error}") from error


def _kind(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise _useless(path, f"{type(error).__name__}: {error}") from error


def _useless(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"The callback {path!r}, named by {env.CALLBACKS.name}, cannot be made: {why}.",
        do="Name classes as package.module.Class; each is made without arguments.",
    )
