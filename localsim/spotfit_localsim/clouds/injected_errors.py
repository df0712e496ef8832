"""Errors that a simulated cloud injects: quotas, permissions, capacity, unavailability."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from spotfit.core.clock import Clock
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean
from spotfit.host.system import SystemClock

ApiFaultKind = Literal[
    "quota",
    "pod_quota",
    "permission",
    "capacity",
    "misconfiguration",
    "credentials",
    "unavailable",
    "throttled",
]
"""'pod_quota': the cluster admits a Job and rejects its pods. 'misconfiguration': AWS Batch reports
that a job can never run, which it also does for a while for jobs that will run.
"""


class ApiFaults:
    """The number of requests that each kind of fault will still hit, and denied permissions."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._remaining: dict[ApiFaultKind, int] = {}
        self._until: dict[ApiFaultKind, float] = {}
        """When the faults that hit every request for a time are over."""
        self._denied_permissions: frozenset[str] = frozenset()

    def inject(self, kind: str, times: int, *, duration_s: float = 0.0) -> None:
        """Fail the next `times` requests, and all for `duration_s`; 0 and 0 stop it.

        Raises `ConfigError` for an unknown kind.
        """
        # A misspelt kind would inject nothing, and the test would pass.
        if kind not in get_args(ApiFaultKind):
            raise ConfigError(
                f"Unknown fault {kind!r}. {did_you_mean(kind, get_args(ApiFaultKind))}"
            )
        self._remaining[kind] = times  # type: ignore[index]  # checked a line above
        self._until[kind] = self._clock.now() + duration_s  # type: ignore[index]

    def take(self, kind: ApiFaultKind) -> bool:
        """Return whether the fault hits this request, and count the request."""
        if self._is_lasting(kind):
            return True
        # Not below 0: a fault that is over stays over.
        remaining = self._remaining.get(kind, 0)
        if remaining > 0:
            self._remaining[kind] = remaining - 1
        return remaining > 0

    def is_active(self, kind: ApiFaultKind) -> bool:
        """Return whether the fault is pending, without counting a request."""
        return self._remaining.get(kind, 0) > 0 or self._is_lasting(kind)

    def _is_lasting(self, kind: ApiFaultKind) -> bool:
        return kind in self._until and self._clock.now() < self._until[kind]

    def deny_permissions(self, permissions: Iterable[str]) -> None:
        """Deny these permissions from now on; an empty set allows everything.

        A permission is written as in the cloud ('batch:SubmitJob'), with a principal before it
        ('agents batch:SubmitJob') to deny it to that principal only.
        """
        self._denied_permissions = frozenset(permissions)

    def is_denied(self, permission: str, principal: str = "") -> bool:
        """Return whether the permission is denied to the principal."""
        return bool({permission, f"{principal} {permission}"} & self._denied_permissions)

    def denied_permissions(self) -> frozenset[str]:
        """Return all denied permissions."""
        return self._denied_permissions
