"""Arguments that are gone: whoever still passes one gets `DeprecationWarning` as an exception."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEPRECATED: Any = "DEPRECATED"
"""Stands for 'not given' where None may be given, too."""


def refuse_deprecated(
    owner: str, given: Mapping[str, Any], *, instead: Mapping[str, str], unset: Any = DEPRECATED
) -> None:
    """Raises one `DeprecationWarning` that names all that were given, each with what to do."""
    passed = [name for name, value in given.items() if not _is(value, unset)]
    if passed:
        names = ", ".join(f"{name}=..." for name in passed)
        remedies = "; ".join(f"{name}: {instead[name]}" for name in passed)
        raise DeprecationWarning(f"{owner}({names}) is no longer supported. {remedies}.")


def _is(value: Any, unset: Any) -> bool:
    """Without asking an object that may compare as it likes."""
    return value is unset or (isinstance(value, str) and value == unset)
