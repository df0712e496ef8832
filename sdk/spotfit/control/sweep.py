"""One look at a run nobody may be awake for: to be run from a scheduler, or by hand."""

from __future__ import annotations

from spotfit.control.caretaker import Caretaker
from spotfit.core.clock import Clock
from spotfit.model.view import View


def sweep(caretaker: Caretaker, clock: Clock, *, for_s: float) -> View:
    """Mind a run for a while: step in if its leader shows no life within `for_s`, and act.

    Returns at once when the run is over and nothing is left to let go. To tell a dead leader from
    a living one takes as long as the lease's patience; a shorter `for_s` never steps in.
    """
    deadline = clock.now() + for_s
    while (now := clock.now()) < deadline:
        wake = caretaker.tick(now)
        if wake is None:
            break
        clock.wait(max(0.0, min(wake, deadline) - now))
    return caretaker.view
