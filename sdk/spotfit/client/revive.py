"""Mind a run from a scheduler or a shell: for runs nobody is awake for."""

from __future__ import annotations

from pathlib import Path

from spotfit.client.handle import attach
from spotfit.control.sweep import sweep
from spotfit.core.errors import LedgerError
from spotfit.host import clocks


def revive(url: str | Path, *, for_s: float) -> str:
    """Look at the run for a while and step in where nobody leads; how it stands, in a sentence.

    Raises `LedgerError` when this machine does not hold the run's key: machines it asked for
    could not prove that they belong to the run.
    """
    handle = attach(url)
    if handle.caretaker is None:
        raise LedgerError(
            f"This machine cannot revive {handle.url}: it does not hold the run's key.",
            do="Run it where fit() was called, or set SPOTFIT_RUN_SECRET to that run's key.",
        )
    view = sweep(handle.caretaker, clocks.SystemClock(), for_s=for_s)
    if view.ended is not None:
        return f"The run is {view.ended.outcome}; nothing is left behind."
    leader = view.leader.leader if view.leader else "nobody"
    return f"The run goes on, led by {leader}."
