"""Validation of user input, shared by all packages.

`ErrorCollector` reports all invalid values of one call together. `did_you_mean` suggests the
nearest valid name. `reject_deprecated_arguments` refuses arguments of Ray Train that have no
equivalent. `parse_log_level` accepts the level names of the `logging` module. `is_dataframe` knows
DataFrames of pandas, which need not be installed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from spotfit.core.errors import ConfigError, ConfigErrors, ConfigTypeError, SpotfitError
from spotfit.core.unsupported_names import UNSUPPORTED_ARGUMENTS

ClassT = TypeVar("ClassT")


class ErrorCollector:
    """Runs checks and collects the `SpotfitError`s they raise, to report them together.

    Created for one call or object that is validated; ends with `raise_all`.
    """

    def __init__(self) -> None:
        self._errors: list[SpotfitError] = []

    def add(self, error: SpotfitError) -> None:
        """Record `error` without raising it; the errors of a `ConfigErrors` are recorded singly."""
        self._errors += error.errors if isinstance(error, ConfigErrors) else [error]

    def check(self, check: Callable[[], Any]) -> Any:
        """Return the result of `check()`, or None after recording the `SpotfitError` it raised.

        Other exceptions are not caught. A check that other checks depend on returns a value other
        than None.
        """
        try:
            return check()
        except SpotfitError as error:
            self.add(error)
            return None

    @property
    def errors(self) -> tuple[SpotfitError, ...]:
        """All recorded errors in the order of recording; empty if all checks passed so far."""
        return tuple(self._errors)

    def raise_all(self) -> None:
        """Raise the single recorded error, or `ConfigErrors` with all; return if there is none.

        The errors stay recorded: a second call raises again.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigErrors(self._errors)


def did_you_mean(word: str, known: Iterable[str], *, min_similarity: float = 0.6) -> str:
    """Return a hint for an error message: the most similar known name, and all known names.

    Example: "Did you mean 'epoch'? Known: at_notice, auto, epoch." Without a similar name, or one
    that begins with `word`, only the list; '' if `known` is empty. `min_similarity`, from 0 to 1:
    0.6 finds typing errors and ignores unrelated names.
    """
    names = sorted(known)
    if not names:
        return ""
    near = difflib.get_close_matches(word, names, n=1, cutoff=min_similarity)
    # Such as 'aws', which is too short to be similar to 'aws_batch'.
    near = near or [name for name in names if word and name.startswith(word)]
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(names)}."


def suggest_argument(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown argument: what replaces one of Ray AIR, else `did_you_mean`."""
    return UNSUPPORTED_ARGUMENTS.get(name) or did_you_mean(name, known)


def suggest_keywords(cls: type[ClassT]) -> type[ClassT]:
    """Let the constructor of the class suggest the nearest keyword for an unknown one.

    A class decorator; signature and documentation stay those of `__init__`. The constructor raises
    `ConfigTypeError`, a `TypeError`, instead of Python's own error. Classes derived from it that
    define `__init__` are not affected.
    """
    construct: Callable[..., None] = vars(cls)["__init__"]
    parameters = inspect.signature(construct).parameters
    known = frozenset(parameters) - {"self"}
    # Removed arguments are accepted, for an error of their own.
    suggested = [name for name in known if parameters[name].default is not DEPRECATED]

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        unknown = [name for name in keywords if name not in known]
        if unknown:
            names = ", ".join(f"{name}=..." for name in unknown)
            raise ConfigTypeError(
                f"{type(self).__name__}({names}): there is no such argument.",
                do=" ".join(suggest_argument(name, suggested) for name in unknown),
                retryable=False,
            )
        construct(self, *args, **keywords)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


DEPRECATED: Any = "DEPRECATED"
"""Default value of removed arguments, where None is a valid value (the same sentinel as Ray's)."""


def reject_deprecated_arguments(
    owner: str,
    arguments: Mapping[str, Any],
    *,
    replacements: Mapping[str, str],
    unset: Any = DEPRECATED,
) -> None:
    """Raise one `DeprecationWarning` that names every passed argument and its replacement.

    Returns if none was passed. `owner` is the callable as the user writes it ("ScalingConfig").
    `arguments` maps the deprecated arguments to the values that they have; those that are `unset`
    count as not passed. `replacements` has a text for each of them ("use max_failures=0"). Ray
    raises the same exception type.
    """
    # Only strings are compared with ==: arrays and tensors return arrays from `==`.
    passed = [
        name
        for name, value in arguments.items()
        if value is not unset and not (isinstance(value, str) and value == unset)
    ]
    if passed:
        names = ", ".join(f"{name}=..." for name in passed)
        remedies = "; ".join(f"{name}: {replacements[name]}" for name in passed)
        raise DeprecationWarning(f"{owner}({names}) is no longer supported. {remedies}.")


LOG_LEVELS = {
    "NOTSET": 0,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "WARNING": 30,
    "ERROR": 40,
    "FATAL": 50,
    "CRITICAL": 50,
}
"""Level names and numbers of the `logging` module, which `core` does not import."""


def parse_log_level(name: Any, *, owner: str = "") -> str:
    """Return the level name in upper case, such as "INFO" for "info".

    For `LoggingConfig` and SPOTFIT_LOG_LEVEL. Raises `ConfigError`, which names the setting
    `owner`, for an unknown name and for a value that is not a string.
    """
    level = name.upper() if isinstance(name, str) else repr(name)
    if level not in LOG_LEVELS:
        setting = f" in {owner}" if owner else ""
        raise ConfigError(
            f"Invalid log_level {name!r}{setting}.", do=did_you_mean(level, LOG_LEVELS)
        )
    return level


def is_dataframe(value: object) -> bool:
    """Return whether `value` is a pandas DataFrame, without importing pandas."""
    kind = type(value)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"
