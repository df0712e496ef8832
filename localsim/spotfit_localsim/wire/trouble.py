"""What a simulated cloud is told to refuse: quotas, permissions, capacity, or all service."""

from __future__ import annotations

from typing import Literal, get_args

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean

Kind = Literal["quota", "permission", "capacity", "credentials", "unavailable", "throttled"]


class Troubles:
    """Each kind for so many of the next requests it concerns."""

    def __init__(self) -> None:
        self._left: dict[Kind, int] = {}

    def expect(self, kind: str, times: int) -> None:
        """From now on, so often; 0 lifts it. Raises `ConfigError` for a kind that is none."""
        if kind not in get_args(Kind):
            raise ConfigError(
                f"No trouble is called {kind!r}. {did_you_mean(kind, get_args(Kind))}"
            )
        self._left[kind] = times  # type: ignore[index]  # checked a line above

    def strikes(self, kind: Kind) -> bool:
        """Whether this request meets that trouble; one time less remains."""
        left = self._left.get(kind, 0)
        if left > 0:
            self._left[kind] = left - 1
        return left > 0

    def now(self, kind: Kind) -> bool:
        """Whether it is expected, without counting."""
        return self._left.get(kind, 0) > 0
