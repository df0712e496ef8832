"""The system clock, and all randomness of spotfit: unique ids and secrets."""

from __future__ import annotations

import random
import secrets
import time
from datetime import UTC, datetime

from spotfit.core.ids import AgentId, RunId, Token


class SystemClock:
    """This machine's monotonic clock, as a `core.clock.Clock`."""

    def now(self) -> float:
        """Return seconds since an arbitrary fixed moment."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`; return at once if that is negative."""
        time.sleep(max(0.0, seconds))


def wall_ms() -> int:
    """Return milliseconds since 1970, for display only.

    Decisions must not depend on it: wall clocks of machines differ, and are adjusted.
    """
    return time.time_ns() // 1_000_000


def utc_timestamp() -> str:
    """Return the UTC date and time in microseconds, in a form that is valid in directory names."""
    return datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S.%f")


def new_run_id() -> RunId:
    """Return a new, globally unique run id."""
    # From the operating system, not `random`: forked or seeded processes must not share ids.
    return RunId(secrets.token_hex(16))


def new_agent_id() -> AgentId:
    """Return a new, globally unique agent id."""
    return AgentId(f"a-{secrets.token_hex(6)}")


def new_token() -> Token:
    """Return a new idempotency token, which is valid in resource names of every cloud."""
    return Token(f"t-{secrets.token_hex(6)}")


def new_secret_bytes(count: int = 32) -> bytes:
    """Return cryptographically secure random bytes."""
    return secrets.token_bytes(count)


def reseed() -> None:
    """Seed Python's random module from the operating system, in a newly forked process.

    Without it, all children of a fork server would share the RNG state of their parent.
    """
    random.seed()
