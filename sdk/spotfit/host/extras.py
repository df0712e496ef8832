"""Optional dependencies: imported on demand, or told by which extra they come."""

from __future__ import annotations

import importlib
from types import ModuleType

from spotfit.core.errors import MissingExtraError


def need(module: str, *, extra: str) -> ModuleType:
    """That module. Raises `MissingExtraError` naming the extra of spotfit that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise missing_extra(missing, what=module, extra=extra) from missing


def missing_extra(missing: ImportError, *, what: str, extra: str) -> MissingExtraError:
    """The error that says what to install."""
    return MissingExtraError(
        f"{what} needs the package {missing.name or 'that is named above'!r}, which is not "
        f"installed: {missing}",
        do=f"pip install 'spotfit[{extra}]'",
        module=missing.name,
    )
