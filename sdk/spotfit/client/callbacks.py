"""The callbacks of a run: those its environment names, then those it was given."""

from __future__ import annotations

import importlib

from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError
from spotfit.host import env
from spotfit.model.callbacks import UserCallback


def named_callbacks() -> list[UserCallback]:
    """One instance of every class that SPOTFIT_CALLBACKS names.

    Raises `ConfigError` for one that cannot be had, or `ConfigErrors` with all of them.
    """
    found: list[UserCallback] = []
    mistakes: list[SpotfitError] = []
    for path in env.value(env.CALLBACKS):
        try:
            found.append(_made(path))
        except ConfigError as mistake:
            mistakes.append(mistake)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise ConfigErrors(mistakes)
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
