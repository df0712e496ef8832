"""Options of a backend: a frozen dataclass, made from whatever words somebody chose them in."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError
from spotfit.core.nearest import did_you_mean

Options = TypeVar("Options")


def parse_options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """Make `kind`, a dataclass, of those values; text is read as what its field holds.

    'a,b' does for a tuple of texts, '3' for a number, JSON for anything deeper. Raises
    `ConfigError`, or `ConfigErrors` with every mistake there is.
    """
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # it is one
    mistakes: list[SpotfitError] = []
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            if name not in known:
                raise _unknown(kind, name, known)
            values[name] = _parse(kind, name, value, hints[name])
        except ConfigError as mistake:
            mistakes.append(mistake)
    if not mistakes:
        return kind(**values)
    raise mistakes[0] if len(mistakes) == 1 else ConfigErrors(mistakes)


def chosen(options: Any) -> dict[str, Any]:
    """The options that are not as they would be anyway, as plain data."""
    plain = dataclasses.asdict(options)
    return {
        field.name: plain[field.name]
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != _default(field)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _parse(kind: type, name: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(_unwrapped(value, hint), hint, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as wrong:
        raise ConfigError(
            f"{kind.__name__}({name}={value!r}) cannot be: {wrong}.",
            do=f"{name} is {_told(hint)}.",
        ) from wrong


def _unwrapped(value: Any, hint: Any) -> Any:
    """Text for something with parts is a list with commas, or JSON."""
    if not isinstance(value, str) or not _has_parts(hint):
        return value
    if value.lstrip().startswith(("[", "{")):
        return msgspec.json.decode(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _has_parts(hint: Any) -> bool:
    """Whether it takes lists or tables, and no plain text."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    origins = {typing.get_origin(one) or one for one in alternatives}
    return bool(origins & {tuple, list, dict, frozenset}) and str not in origins


def _told(hint: Any) -> str:
    return getattr(hint, "__name__", "") if isinstance(hint, type) else str(hint)


def _unknown(kind: type, name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{kind.__name__} has no option {name!r}. {did_you_mean(name, known)}".rstrip(),
        do="Correct or drop it.",
    )
