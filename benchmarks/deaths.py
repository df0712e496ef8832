"""Recoveries of a run with repeated kills, from the events that it recorded."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.run_once import Events
from benchmarks.work import STEPS_BEFORE_DEATH


@dataclass(frozen=True, slots=True)
class Death:
    """One kill: its time, the time to the next step of all ranks (None: never), and lost steps."""

    at: float
    recovered_s: float | None
    steps_lost: int | None


def deaths(events: Events, ranks: int) -> list[Death]:
    """Return every kill, in order."""
    return [_death(events, kill.facts["life"], kill.at, ranks) for kill in events.named("killed")]


def _death(events: Events, life: int, at: float, ranks: int) -> Death:
    again = events.when_all("life_begins", ranks, life=life + 1)
    if again is None:
        return Death(at, None, None)
    before = events.named("life_begins", life=life)[0].facts["step"]
    after = events.named("life_begins", life=life + 1)[0].facts["step"]
    return Death(at, again - at, before + STEPS_BEFORE_DEATH - after)


def summarize(found: list[Death], limit_s: float) -> tuple[float, dict[str, Any]]:
    """Return the median recovery time, where 'never' counts as the limit, and all of them."""
    took = [limit_s if death.recovered_s is None else death.recovered_s for death in found]
    more = {
        "recoveries_s": [death.recovered_s for death in found],
        "first_recovery_s": took[0],
        "recovered": sum(death.recovered_s is not None for death in found),
        "kills": len(found),
        "steps_lost": [death.steps_lost for death in found],
    }
    return median(took), more
