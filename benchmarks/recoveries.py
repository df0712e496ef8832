"""Recoveries of a run with repeated kills, from the events that it recorded."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.run_once import Events
from benchmarks.workload import STEPS_BEFORE_KILL


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill: its time, the time to the next step of all ranks (None: never), and lost steps."""

    at: float
    recovered_s: float | None
    steps_lost: int | None


def recoveries(events: Events, ranks: int) -> list[Recovery]:
    """Return every kill, in order."""
    return [
        _recovery(events, kill.fields["attempt"], kill.at, ranks) for kill in events.named("killed")
    ]


def _recovery(events: Events, attempt: int, at: float, ranks: int) -> Recovery:
    restarted_at = events.when_all("attempt_started", ranks, attempt=attempt + 1)
    if restarted_at is None:
        return Recovery(at, None, None)
    before = events.named("attempt_started", attempt=attempt)[0].fields["step"]
    after = events.named("attempt_started", attempt=attempt + 1)[0].fields["step"]
    return Recovery(at, restarted_at - at, before + STEPS_BEFORE_KILL - after)


def summarize(found: list[Recovery], limit_s: float) -> tuple[float, dict[str, Any]]:
    """Return the median recovery time, where 'never' counts as the limit, and all of them."""
    took = [limit_s if recovery.recovered_s is None else recovery.recovered_s for recovery in found]
    more = {
        "recoveries_s": [recovery.recovered_s for recovery in found],
        "first_recovery_s": took[0],
        "recovered": sum(recovery.recovered_s is not None for recovery in found),
        "kills": len(found),
        "steps_lost": [recovery.steps_lost for recovery in found],
    }
    return median(took), more
