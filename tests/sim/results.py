"""Results of simulations that several tests check."""

import functools

from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.simulation import simulate
from spotfit_localsim.virtual.timeline import SimulationResult

_MAX_RESULTS = 800
"""Of about 0.3 MB each."""


@functools.lru_cache(_MAX_RESULTS)
def simulated(scenario: Scenario, seed: int) -> SimulationResult:
    """Return what `simulate` returns, which tests must not change."""
    return simulate(scenario, seed)
