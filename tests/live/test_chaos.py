"""A few chaos runs with new seeds per session; `make chaos` executes many.

The seeds derive from the one in the header of the session. `python -m spotfit_localsim.live.chaos
--start SEED --seeds 1 --torch 0` repeats a run. Seeds that found a bug are pinned below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos import (
    ChaosOutcome,
    ChaosPlan,
    ChaosRunner,
    PlannedKill,
    faulty_store_proxy,
    random_plan,
)
from tests.conftest import DRAWN_SEED

WITHIN_S = 90.0
AMONG = 50


def plan_with_all_targets(first: int) -> list[int]:
    """Seeds from this one on that cover all targets, on a disk and with network faults."""
    brings = {seed: ended_by(seed) for seed in range(first, first + AMONG)}
    missing = set.union(*brings.values())
    seeds: list[int] = []
    while missing:
        seeds.append(max(brings, key=lambda seed: len(brings[seed] & missing)))
        missing -= brings[seeds[-1]]
    return seeds


def ended_by(seed: int) -> set[str]:
    plan = random_plan(seed, torch_fraction=0.0)
    return {plan.store, *(blow.target for blow in plan.kills)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drawn" in metafunc.fixturenames:
        metafunc.parametrize("drawn", plan_with_all_targets(metafunc.config.stash[DRAWN_SEED]))


@pytest.fixture(scope="module")
def wire() -> Iterator[str]:
    with faulty_store_proxy() as wire:
        yield wire


def run_chaos_plan(plan: ChaosPlan, folder: Path, wire: str) -> ChaosOutcome:
    ending = ChaosRunner(folder, timeout_s=WITHIN_S).run_plan(plan, wire)
    assert ending.violations == [], [f"seed {plan.seed}", *ending.log_lines]
    return ending


def test_random_kills_do_not_change_the_result(tmp_path: Path, wire: str, drawn: int) -> None:
    ending = run_chaos_plan(random_plan(drawn, torch_fraction=0.0), tmp_path, wire)
    assert ending.effective_kills > 0, "no kill while the run was active"


@pytest.mark.slow
def test_random_kills_do_not_change_the_result_with_torch(tmp_path: Path) -> None:
    plan = ChaosPlan(
        5,
        "gradient_descent",
        "file",
        network_faults.no_faults(),
        (PlannedKill(4.0, "node"), PlannedKill(7.0, "worker")),
    )
    assert run_chaos_plan(plan, tmp_path, "").effective_kills == 2
