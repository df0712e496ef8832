"""A few chaos runs with new seeds per session; `make chaos` executes many.

The seeds derive from the one in the header of the session. `python -m spotfit_localsim.live.chaos
--start SEED --seeds 1 --torch 0` repeats a run. Seeds that found a bug are pinned below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos import ChaosPlan, ChaosRunner, PlannedKill, random_plan
from spotfit_localsim.live.chaos_runs import ChaosOutcome, faulty_store_proxy
from tests.conftest import DRAWN_SEED

WITHIN_S = 90.0
SEED_RANGE = 50


def plan_with_all_targets(first: int) -> list[int]:
    """Seeds from `first` on that cover all targets and both stores.

    Without stalls of the bucket, which take minutes: `test_stall` and `make chaos` have them.
    """
    plans = [random_plan(seed, torch_fraction=0.0) for seed in range(first, first + SEED_RANGE)]
    targets_by_seed = {plan.seed: targets_of(plan) for plan in plans if not plan.has_stalls}
    missing = set.union(*targets_by_seed.values())
    seeds: list[int] = []
    while missing:
        seeds.append(max(targets_by_seed, key=lambda seed: len(targets_by_seed[seed] & missing)))
        missing -= targets_by_seed[seeds[-1]]
    return seeds


def targets_of(plan: ChaosPlan) -> set[str]:
    return {plan.store, *(kill.target for kill in plan.kills)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drawn" in metafunc.fixturenames:
        metafunc.parametrize("drawn", plan_with_all_targets(metafunc.config.stash[DRAWN_SEED]))


@pytest.fixture(scope="module")
def proxy_url() -> Iterator[str]:
    with faulty_store_proxy() as proxy_url:
        yield proxy_url


def run_chaos_plan(plan: ChaosPlan, folder: Path, proxy_url: str) -> ChaosOutcome:
    outcome = ChaosRunner(folder, timeout_s=WITHIN_S).run_plan(plan, proxy_url)
    assert outcome.violations == [], [f"seed {plan.seed}", *outcome.log_lines]
    return outcome


def test_random_kills_do_not_change_the_result(tmp_path: Path, proxy_url: str, drawn: int) -> None:
    outcome = run_chaos_plan(random_plan(drawn, torch_fraction=0.0), tmp_path, proxy_url)
    assert outcome.effective_kills > 0, "no kill while the run was active"


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
