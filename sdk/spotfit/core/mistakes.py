"""Mistakes, collected one by one and told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.core.errors import ConfigErrors, SpotfitError


class Mistakes:
    """Runs checks and keeps what they complain of."""

    def __init__(self) -> None:
        self._errors: list[SpotfitError] = []

    def add(self, error: SpotfitError) -> None:
        """One more; several that came as one count one by one."""
        self._errors += error.errors if isinstance(error, ConfigErrors) else [error]

    def check(self, check: Callable[[], Any]) -> Any:
        """What `check` gives, or None where it complains."""
        try:
            return check()
        except SpotfitError as error:
            self.add(error)
            return None

    @property
    def found(self) -> tuple[SpotfitError, ...]:
        """What there is so far."""
        return tuple(self._errors)

    def raise_all(self) -> None:
        """Raises the one mistake there is, or `ConfigErrors` with all of them."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigErrors(self._errors)
