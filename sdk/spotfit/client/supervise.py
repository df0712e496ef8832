"""Supervise a run for a limited time, from a cron job or a shell (`spotfit sweep`)."""

from __future__ import annotations

from pathlib import Path

from spotfit.client.run_handle import attach
from spotfit.control.headless_leader import sweep
from spotfit.core.errors import ConfigError
from spotfit.host import system


def supervise_run(url: str | Path, *, duration_s: float) -> str:
    """Supervise the run for up to `duration_s`; return its state in a sentence.

    If all machines of an active run are lost, it requests new ones; if the run has ended, it
    releases remaining machines. Raises `ConfigError` if the run's key is not on this machine:
    machines that it requested could not authenticate.
    """
    handle = attach(url)
    if handle.headless_leader is None:
        raise ConfigError(
            f"{handle.url} cannot be supervised: the run's key is not on this machine.",
            do="Run the command where fit() was called, or set SPOTFIT_RUN_SECRET to the key.",
        )
    # Bounded, unlike a driver: the next call of the cron job continues.
    view = sweep(handle.headless_leader, system.SystemClock(), duration_s=duration_s)
    if view.fit_end is not None:
        return f"The run is {view.fit_end.outcome}; its machines are released."
    return f"The run is active; leader: {view.leader.leader if view.leader else 'none'}."
