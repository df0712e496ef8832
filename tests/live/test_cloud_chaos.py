"""Chaos runs on simulated clouds with fixed plans; `make chaos` executes many with random ones.

`python -m spotfit_localsim.live.cloud_chaos --start SEED --seeds 1` repeats a random one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit_localsim.live.chaos_runs import faulty_store_proxy
from spotfit_localsim.live.cloud_chaos import run_plan
from spotfit_localsim.live.cloud_plans import (
    ApiFault,
    ApiRestart,
    CapacityLimit,
    CloudChaosPlan,
    MachineLoss,
    MemoryUse,
)

WITHIN_S = 90.0

LOSS_WITH_FAULTS_OF_THE_API = CloudChaosPlan(
    1,
    "kubernetes",
    machines=2,
    lag_s=1.0,
    faults=(
        ApiFault(0.0, "throttled", times=2, since="start"),
        ApiFault(0.1, "credentials", duration_s=3.0),
        MachineLoss(0.2, notice=False),
        ApiRestart(2.0),
    ),
)
PARTIAL_CAPACITY_AND_MEMORY = CloudChaosPlan(
    2,
    "aws_batch",
    machines=2,
    faults=(CapacityLimit(0.0, 3.0, since="start"),),
    memory_use=MemoryUse(step=20, rank=1),
)
TIME_BUDGET_AND_TOTAL_LOSS = CloudChaosPlan(
    3,
    "azure_batch",
    machines=2,
    faults=(MachineLoss(0.5, notice=False, is_total=True),),
    time_budget_s=6.0,
    step_s=0.1,
)


@pytest.fixture(scope="module")
def proxy_url() -> Iterator[str]:
    with faulty_store_proxy() as proxy_url:
        yield proxy_url


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(LOSS_WITH_FAULTS_OF_THE_API, id="loss and API faults"),
        pytest.param(PARTIAL_CAPACITY_AND_MEMORY, id="partial capacity and memory"),
        pytest.param(TIME_BUDGET_AND_TOTAL_LOSS, id="time budget and total loss"),
    ],
)
def test_faults_of_a_cloud_do_not_change_the_result(
    plan: CloudChaosPlan, tmp_path: Path, proxy_url: str
) -> None:
    outcome = run_plan(plan, tmp_path, proxy_url, timeout_s=WITHIN_S)
    assert outcome.violations == [], outcome.log_lines
    assert outcome.effective_kills > 0, "no fault while the run was active"
