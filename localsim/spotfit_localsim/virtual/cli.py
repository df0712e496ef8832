"""Simulate one run and print its timeline.

python -m spotfit_localsim.virtual.cli spot_storm --seed 7
python -m spotfit_localsim.virtual.cli spot_storm --trace spot_history.json --over 600
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean
from spotfit_localsim.traces import read_trace
from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.scenario_library import (
    SCENARIOS,
    budget_scenario,
    deadline_scenario,
    network_scenario,
    random_scenario,
)
from spotfit_localsim.virtual.simulation import SimWorld


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code is 1 for a violation, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m spotfit_localsim.virtual.cli")
    parser.add_argument(
        "scenario", help="name of a scenario, or of a kind of random ones: storm, deadline, budget"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="recorded capacity trace (JSON)")
    parser.add_argument(
        "--over", type=float, default=600.0, help="replay duration of the trace in seconds"
    )
    options = parser.parse_args(arguments)
    try:
        scenario = find_scenario(options.scenario, options.seed)
        if options.trace is not None:
            scenario = with_recorded_market(scenario, options.trace, duration_s=options.over)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    result = SimWorld(scenario, options.seed).run()
    sys.stdout.write(
        f"{result}\n\n{result.rounds} rounds, {result.elections} elections, "
        f"{result.steps_repeated} steps repeated, {result.machine_seconds:.0f} machine seconds, "
        f"${result.cost.total_usd:.2f}, "
        f"requests {dict(result.requests)}\n"
    )
    return 0 if result.violation is None else 1


def find_scenario(name: str, seed: int) -> Scenario:
    """Return the scenario of that name, or a random one of that kind. Raises `ConfigError`."""
    # A name instead of an option: it is used wherever a scenario is named.
    random_kinds = {
        "storm": random_scenario,
        "deadline": deadline_scenario,
        "budget": budget_scenario,
        "network": network_scenario,
    }
    if name in random_kinds:
        return random_kinds[name](seed)
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    if name not in scenarios:
        raise ConfigError(
            f"There is no scenario {name!r}.", do=did_you_mean(name, [*scenarios, *random_kinds])
        )
    return scenarios[name]


def with_recorded_market(scenario: Scenario, trace: Path, *, duration_s: float) -> Scenario:
    """Return the scenario with the capacity of a trace, replayed within `duration_s`.

    Raises `ConfigError` for a trace that cannot be read, and for a scenario with offers.
    """
    if scenario.market.offers:
        raise ConfigError(
            f"The scenario {scenario.name} has offers with capacities of their own.",
            do="Choose a scenario without offers, such as plain.",
        )
    # Rounded up: the last machine may be partly used.
    machines = -(-scenario.num_workers // scenario.slots_per_machine)
    capacity = read_trace(trace).rescaled(duration_s=duration_s, max_machines=machines)
    return replace(
        scenario,
        name=f"{scenario.name} on {capacity.name}",
        market=replace(scenario.market, capacity=capacity),
        faults_duration_s=duration_s,
    )


if __name__ == "__main__":
    sys.exit(main())
