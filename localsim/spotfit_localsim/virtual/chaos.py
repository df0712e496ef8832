"""Simulate random scenarios in bulk and report the seeds that violate an invariant.

    python -m spotfit_localsim.virtual.chaos --virtual 20000 --live 500
    python -m spotfit_localsim.virtual.chaos --virtual 1000 --scenarios deadlines

A seed is reproducible: `--seed-start S --virtual 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spotfit.core.clock import Clock
from spotfit.host.system import SystemClock
from spotfit_localsim.virtual.cost_invariants import unmet_conditions
from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.scenario_library import (
    budget_scenario,
    dataset_scenario,
    deadline_scenario,
    network_scenario,
    random_save_scenario,
    random_scenario,
)
from spotfit_localsim.virtual.simulation import SimWorld

_LIVE_MODULE = "spotfit_localsim.live.chaos"
# Simulations between two progress lines.
_PROGRESS_EVERY = 500


ScenarioFactory = Callable[[int], Scenario]
"""Returns the scenario of a seed."""
SCENARIO_FACTORIES: dict[str, ScenarioFactory] = {
    "storms": random_scenario,
    "saves": random_save_scenario,
    "deadlines": deadline_scenario,
    "budgets": budget_scenario,
    "networks": network_scenario,
    "datasets": dataset_scenario,
}
"""By the name in the option `--scenarios`."""


@dataclass
class VirtualChaosSummary:
    """Counts over all simulations."""

    run_count: int = 0
    failed_seeds: list[int] = field(default_factory=list)
    """Seeds with a violated invariant or an exception."""
    totals: Counter[str] = field(default_factory=Counter)
    """Sums over all simulations."""

    def __str__(self) -> str:
        totals = ", ".join(f"{count:,} {name}" for name, count in self.totals.items())
        return f"{self.run_count:,} runs, {len(self.failed_seeds)} failed; {totals}"


def run_seed(
    seed: int, summary: VirtualChaosSummary, scenario_for: ScenarioFactory | None = None
) -> str | None:
    """Simulate one seed; return its timeline if an invariant was violated, else None."""
    summary.run_count += 1
    try:
        scenario = (scenario_for or random_scenario)(seed)
        result = SimWorld(scenario, seed).run()
    except Exception:  # noqa: BLE001  # a crash of the simulator is a finding as well
        summary.failed_seeds.append(seed)
        return f"seed {seed}: the simulation raised\n{traceback.format_exc()}"
    summary.totals["rounds"] += result.rounds
    summary.totals["elections"] += result.elections
    summary.totals["journal entries"] += len(result.entries)
    summary.totals["steps repeated"] += result.steps_repeated
    summary.totals["rounds from memory"] += result.rounds_from_memory
    summary.totals["network changes"] += result.network_changes
    if result.world_sizes_by_epoch:
        sizes = result.world_sizes_by_epoch.values()
        summary.totals["epochs"] += len(sizes)
        summary.totals["epochs with resizes"] += sum(len(set(one)) > 1 for one in sizes)
        summary.totals["slices of feeders"] += result.slices_of_feeders
    summary.totals["virtual seconds"] += round(result.duration_s)
    if scenario.cost_limits is not None and result.cost.deadline_s is not None:
        is_guaranteed = not unmet_conditions(result.cost, scenario.cost_limits)
        summary.totals["guaranteed deadlines"] += is_guaranteed
    if result.violation is None:
        return None
    summary.failed_seeds.append(seed)
    return str(result)


def run_seeds(
    count: int,
    seed_start: int,
    log: Callable[[str], None],
    clock: Clock,
    *,
    scenario_for: ScenarioFactory | None = None,
) -> VirtualChaosSummary:
    """Simulate `count` seeds; log the progress and the timelines of failed seeds."""
    summary = VirtualChaosSummary()
    # Real time: it measures the simulator.
    started_at = clock.now()
    for seed in range(seed_start, seed_start + count):
        report = run_seed(seed, summary, scenario_for)
        if report is not None:
            log(report)
        if summary.run_count % _PROGRESS_EVERY == 0:
            log(f"{clock.now() - started_at:7.0f} s  {summary}")
    log(f"virtual, seeds {seed_start}..{seed_start + count - 1}: {summary}")
    if summary.failed_seeds:
        log(f"failed seeds: {summary.failed_seeds}")
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code is 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m spotfit_localsim.virtual.chaos")
    parser.add_argument(
        "--virtual", type=int, default=0, help="number of simulations in virtual time"
    )
    parser.add_argument("--live", type=int, default=0, help="number of runs with real processes")
    parser.add_argument(
        "--saves", action="store_true", help="only scenarios that save by Checkpointer"
    )
    parser.add_argument(
        "--scenarios",
        choices=SCENARIO_FACTORIES,
        default="storms",
        help="the scenarios in virtual time",
    )
    parser.add_argument("--seed-start", type=int, default=0)
    options = parser.parse_args(arguments)
    passed = True
    if options.virtual:
        scenario_for = SCENARIO_FACTORIES["saves" if options.saves else options.scenarios]
        summary = run_seeds(
            options.virtual, options.seed_start, _print, SystemClock(), scenario_for=scenario_for
        )
        passed = not summary.failed_seeds
    if options.live:
        # Imported late: the virtual simulator must not depend on the live one.
        live = importlib.import_module(_LIVE_MODULE)
        seeds = range(options.seed_start, options.seed_start + options.live)
        folder = Path(tempfile.mkdtemp(prefix="spotfit-chaos-"))  # failed runs are kept here
        plan_for = live.random_save_plan if options.saves else live.random_plan
        live_summary = live.run(seeds, folder=folder, plan_for=plan_for)
        _print(f"live, seeds {seeds.start}..{seeds.stop - 1}: {live_summary}")
        passed = live_summary.failed_runs == 0 and passed
        with contextlib.suppress(OSError):
            folder.rmdir()
    return 0 if passed else 1


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    # The output may be a pipe, and a run takes hours.
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
