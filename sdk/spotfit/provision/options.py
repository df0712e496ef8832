"""Parsing and checks of backend options: text and plain data become a frozen options dataclass."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError
from spotfit.core.input_checks import ErrorCollector, did_you_mean

OptionsT = TypeVar("OptionsT")


def parse_options(options_class: type[OptionsT], values_by_name: Mapping[str, Any]) -> OptionsT:
    """Construct `options_class`, a dataclass; strings are converted to the types of the fields.

    'a,b' is a tuple of strings, '3' a number; nested values are written as JSON. Raises
    `ConfigError`, or `ConfigErrors` if several options are invalid.
    """
    hints = typing.get_type_hints(options_class)
    known = [field.name for field in dataclasses.fields(options_class)]  # type: ignore[arg-type]  # a dataclass
    errors: list[SpotfitError] = []
    values: dict[str, Any] = {}
    for name, value in values_by_name.items():
        try:
            if name not in known:
                raise _unknown_option_error(options_class, name, known)
            values[name] = _parse_value(options_class, name, value, hints[name])
        except ConfigError as error:
            errors.append(error)
    if not errors:
        return options_class(**values)
    raise errors[0] if len(errors) == 1 else ConfigErrors(errors)


def non_default_options(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, as plain data."""
    plain = dataclasses.asdict(options)
    return {
        field.name: plain[field.name]
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != _default_value(field)
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
    defaults = {field.name: _default_value(field) for field in dataclasses.fields(options)}
    errors = ErrorCollector()
    for name, (minimum, rule) in rules.items():
        value = getattr(options, name)
        if value is None or value >= minimum:
            continue
        remedy = f"Use a value that is {rule}, or omit {name}: the default is {defaults[name]!r}."
        message = f"{type(options).__name__}({name}={value!r}) must be {rule}."
        errors.add(ConfigError(message, do=remedy))
    errors.raise_all()


def _default_value(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _parse_value(options_class: type, name: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(_split_text(value, hint), hint, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        type_name = hint.__name__ if isinstance(hint, type) else str(hint)
        raise ConfigError(
            f"{options_class.__name__}({name}={value!r}) is invalid: {error}.",
            do=f"Pass a value of type {type_name}.",
        ) from error


def _split_text(value: Any, hint: Any) -> Any:
    """Split text for a collection at commas, or parse it as JSON."""
    if not isinstance(value, str) or not _accepts_collection(hint):
        return value
    if value.lstrip().startswith(("[", "{")):
        return msgspec.json.decode(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _accepts_collection(hint: Any) -> bool:
    """Return whether the type is a collection and does not accept a plain string."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    origins = {typing.get_origin(alternative) or alternative for alternative in alternatives}
    return bool(origins & {tuple, list, dict, frozenset}) and str not in origins


def _unknown_option_error(options_class: type, name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{options_class.__name__} has no option {name!r}. {did_you_mean(name, known)}".rstrip(),
        do="Correct or remove the option.",
    )
