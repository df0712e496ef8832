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
        """Return seconds of the monotonic clock of this machine; only differences are meaningful.

        Comparable between processes of this machine until it restarts, and never with other
        machines.
        """
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Block the calling thread for `seconds`; return at once if that is negative."""
        time.sleep(max(0.0, seconds))


def wall_ms() -> int:
    """Return the wall-clock time in milliseconds since 1970 (UTC).

    For display and for the deadlines of preemption notices. Decisions must not depend on it: wall
    clocks of machines differ, and are adjusted.
    """
    return time.time_ns() // 1_000_000


def utc_timestamp() -> str:
    """Return the UTC date and time with microseconds, such as '2026-01-31_08-15-00.000250'.

    It is valid in names of directories, for example of runs and checkpoints.
    """
    return datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S.%f")


def new_run_id() -> RunId:
    """Return a new, globally unique run id: 32 random hex digits."""
    # From the operating system, not `random`: forked or seeded processes must not share ids.
    return RunId(secrets.token_hex(16))


def new_agent_id() -> AgentId:
    """Return a new, globally unique agent id, such as 'a-0123456789ab'."""
    return AgentId(f"a-{secrets.token_hex(6)}")


def new_token() -> Token:
    """Return a new idempotency token, such as 't-0123456789ab'.

    A machine request and its repetitions carry the same one. It is valid in resource names of every
    cloud.
    """
    return Token(f"t-{secrets.token_hex(6)}")


def new_secret_bytes(count: int = 32) -> bytes:
    """Return `count` cryptographically secure random bytes, by default the length of a run key."""
    return secrets.token_bytes(count)


def reseed() -> None:
    """Seed Python's `random` module from the operating system, in a newly forked process.

    Without it, all children of a fork server would share the RNG state of their parent. Python's
    generator only: `child_setup.reseed` also does NumPy's.
    """
    random.seed()
