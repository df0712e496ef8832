"""Parsing and checks of backend options: text and plain data become a frozen options dataclass."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector, did_you_mean

OptionsT = TypeVar("OptionsT")


def parse_options(options_class: type[OptionsT], values_by_name: Mapping[str, Any]) -> OptionsT:
    """Construct `options_class`, a dataclass; strings are converted to the types of the fields.

    'a,b' is a tuple of strings, '3' a number; nested values are written as JSON. Raises
    `ConfigError`, or `ConfigErrors` if several options are invalid.
    """
    hints = typing.get_type_hints(options_class)
    known = [field.name for field in dataclasses.fields(options_class)]  # type: ignore[arg-type]  # a dataclass
    errors = ErrorCollector()
    values: dict[str, Any] = {}
    for name, value in values_by_name.items():
        if name in known:
            parse = partial(_parse_value, options_class, name, value, hints[name])
            values[name] = errors.check(parse)
        else:
            text = f"{options_class.__name__} has no option {name!r}. {did_you_mean(name, known)}"
            errors.add(ConfigError(text.rstrip(), do="Correct or remove the option."))
    errors.raise_all()
    return options_class(**values)


def non_default_options(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, as plain data."""
    plain = dataclasses.asdict(options)
    # A required option has the default MISSING, which differs from every value.
    defaults = {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(options)
    }
    return {
        name: plain[name] for name, default in defaults.items() if getattr(options, name) != default
    }


def check_minimums(options: Any, *, above_zero: Sequence[str] = (), **minimums: float) -> None:
    """Check that numeric fields of `options` are not below their minimums; None is accepted.

    The fields `above_zero` must be greater than 0. Raises `ConfigError`, or `ConfigErrors` if
    several fields are invalid.
    """
    rules: dict[str, tuple[float, str]] = {
        name: (minimum, f"at least {minimum}") for name, minimum in minimums.items()
    }
    # The smallest positive float is the minimum of a field that must be greater than 0.
    rules |= {name: (math.ulp(0.0), "greater than 0") for name in above_zero}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    errors = ErrorCollector()
    for name, (minimum, rule) in rules.items():
        value = getattr(options, name)
        if value is None or value >= minimum:
            continue
        remedy = f"Use a value that is {rule}, or omit {name}: the default is {defaults[name]!r}."
        message = f"{type(options).__name__}({name}={value!r}) must be {rule}."
        errors.add(ConfigError(message, do=remedy))
    errors.raise_all()


def _parse_value(options_class: type, name: str, value: Any, hint: Any) -> Any:
    # Not strict: values from the environment and from a query are text, also for numbers.
    try:
        return msgspec.convert(_split_text(value, hint), hint, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        type_name = hint.__name__ if isinstance(hint, type) else str(hint)
        raise ConfigError(
            f"{options_class.__name__}({name}={value!r}) is invalid: {error}.",
            do=f"Pass a value of type {type_name}.",
        ) from error


def _split_text(value: Any, hint: Any) -> Any:
    """Split text for a collection at commas, or parse it as JSON.

    Text is returned unchanged if the type accepts a plain string or no collection.
    """
    # `X | Y` and `Optional[X]` have different origins.
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    origins = {typing.get_origin(alternative) or alternative for alternative in alternatives}
    accepts_collection = origins & {tuple, list, dict, frozenset} and str not in origins
    if not isinstance(value, str) or not accepts_collection:
        return value
    if value.lstrip().startswith(("[", "{")):
        return msgspec.json.decode(value)
    return [part.strip() for part in value.split(",") if part.strip()]
