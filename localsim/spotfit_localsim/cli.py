"""Tell the story of one simulated run.

python -m spotfit_localsim.cli spot_storm --seed 7
python -m spotfit_localsim.cli spot_storm --trace spot_history.json --over 600
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean
from spotfit_localsim.library import LIBRARY, random_storm
from spotfit_localsim.run import World
from spotfit_localsim.scenario import Scenario
from spotfit_localsim.traces import read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate one scenario, print its timeline; the exit code says whether all held."""
    given = _parser().parse_args(arguments)
    try:
        scenario = chosen(given.scenario, given.seed)
        if given.trace is not None:
            scenario = on_recorded_market(scenario, given.trace, over_s=given.over)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    story = World(scenario, given.seed).live()
    sys.stdout.write(
        f"{story}\n\n{story.rounds} rounds, {story.elections} elections, "
        f"{story.steps_repeated} steps repeated, {story.machine_seconds:.0f} machine seconds, "
        f"requests {dict(story.requests)}\n"
    )
    return 0 if story.broken is None else 1


def chosen(name: str, seed: int) -> Scenario:
    """The scenario of that name; 'storm' is one drawn from the seed. Raises `ConfigError`."""
    if name == "storm":
        return random_storm(seed)
    known = {scenario.name: scenario for scenario in LIBRARY}
    if name not in known:
        raise ConfigError(
            f"No scenario is called {name!r}.", do=did_you_mean(name, [*known, "storm"])
        )
    return known[name]


def on_recorded_market(scenario: Scenario, trace: Path, *, over_s: float) -> Scenario:
    """The same run where capacity moves as it was recorded, told within `over_s`."""
    machines = -(-scenario.workers // scenario.slots)
    capacity = read_trace(trace).squeezed(into_s=over_s, machines=machines)
    return replace(
        scenario,
        name=f"{scenario.name} on {capacity.name}",
        market=replace(scenario.market, capacity=capacity),
        storm_s=over_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spotfit_localsim.cli")
    parser.add_argument("scenario", help="one of the library, or 'storm'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="a recorded spot history to move capacity by")
    parser.add_argument("--over", type=float, default=600.0, help="seconds to tell it in")
    return parser


if __name__ == "__main__":
    sys.exit(main())
