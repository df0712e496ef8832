"""What a simulated cloud is told to refuse: quotas, permissions, capacity, or all service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean

Kind = Literal[
    "quota",
    "pod_quota",
    "permission",
    "capacity",
    "misconfiguration",
    "credentials",
    "unavailable",
    "throttled",
]
"""'pod_quota': a cluster takes a group, and then none of its pods. 'misconfiguration': AWS Batch
says that a job can never run, as it does for a while of jobs that will."""


class Troubles:
    """Each kind for so many of the next requests it concerns."""

    def __init__(self) -> None:
        self._left: dict[Kind, int] = {}
        self._forbidden: frozenset[str] = frozenset()

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

    def forbid(self, rights: Iterable[str]) -> None:
        """From now on nobody has those rights, in the cloud's own words ('batch:SubmitJob'); with
        a name before it ('agents batch:SubmitJob') only whoever is called that. None lifts it."""
        self._forbidden = frozenset(rights)

    def forbids(self, right: str, who: str = "") -> bool:
        """Whether that one does not have it."""
        return bool({right, f"{who} {right}"} & self._forbidden)

    def forbidden(self) -> frozenset[str]:
        """All that was taken from somebody."""
        return self._forbidden
