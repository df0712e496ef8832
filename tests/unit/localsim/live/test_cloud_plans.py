"""Plans of chaos runs on clouds are determined by their seed and cover all faults."""

from pathlib import Path
from typing import get_args

import pytest

from spotfit.core.codec import decoder, encode
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live.cloud_plans import (
    ApiFault,
    CapacityLimit,
    CloudChaosPlan,
    CloudName,
    MachineLoss,
    random_cloud_plan,
)

SEEDS = range(200)


def test_same_seed_gives_the_same_plan() -> None:
    assert random_cloud_plan(7) == random_cloud_plan(7)
    plans = [random_cloud_plan(seed) for seed in SEEDS]
    assert [decoder(CloudChaosPlan).decode(encode(plan)) for plan in plans] == plans


def test_the_first_seeds_cover_all_clouds_and_faults() -> None:
    plans = [random_cloud_plan(seed) for seed in SEEDS]
    assert {plan.cloud for plan in plans} == set(get_args(CloudName))
    assert {plan.machines for plan in plans} == {2, 3}
    assert {plan.store for plan in plans} == {"file", "s3"}
    assert {plan.lag_s for plan in plans} == {0.0, 1.0, 3.0}
    assert {plan.restarts_machines for plan in plans} == {True, False}
    assert set.union(*(plan.fault_kinds() for plan in plans)) == {
        "API restart",
        "bucket faults",
        "capacity",
        "credentials",
        "firewall before machines",
        "firewall before storage",
        "lagging reads",
        "loss of a machine with notice",
        "loss of a machine without notice",
        "loss of all machines with notice",
        "loss of all machines without notice",
        "memory",
        "partial capacity from round",
        "partial capacity from start",
        "quota",
        "throttled",
        "time budget",
        "unavailable",
    }


def test_a_plan_has_a_fault_that_can_change_the_result_or_none_but_a_firewall() -> None:
    for plan in map(random_cloud_plan, SEEDS):
        assert bool(plan.faults) != bool(plan.firewall)


def test_refusals_that_end_a_run_before_its_first_round_come_later() -> None:
    faults = [fault for seed in SEEDS for fault in random_cloud_plan(seed).faults]
    permanent = [
        fault
        for fault in faults
        if isinstance(fault, ApiFault) and fault.kind in ("credentials", "quota")
    ]
    assert permanent
    assert {fault.since for fault in permanent} == {"round"}


def test_memory_is_exceeded_only_where_machines_are_containers() -> None:
    plans = [plan for plan in map(random_cloud_plan, SEEDS) if plan.memory_use]
    assert {plan.cloud for plan in plans} == {"aws_batch", "kubernetes"}
    assert all(1 <= plan.memory_use.step <= plan.steps for plan in plans if plan.memory_use)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_the_provisioner_of_a_plan_has_its_options(seed: int, tmp_path: Path) -> None:
    plan = random_cloud_plan(seed)
    options = plan.sim_options(tmp_path)
    sim = SimProvisioner.with_options(**options)
    assert (sim.options.cloud, sim.options.lag_s) == (plan.cloud, plan.lag_s)
    assert plan.provisioner(tmp_path).startswith(f"sim://{plan.cloud}?root=")


def test_a_cloud_without_restarts_is_configured_by_its_own_option(tmp_path: Path) -> None:
    aws = CloudChaosPlan(1, "aws_batch", 2, restarts_machines=False)
    assert aws.provisioner(tmp_path).endswith("&attempts=1")
    gcp = CloudChaosPlan(1, "gcp_batch", 2, restarts_machines=False)
    assert gcp.provisioner(tmp_path).endswith("&max_retries=0")


def test_timeouts_are_shortened_only_for_the_faults_that_need_it() -> None:
    loss = MachineLoss(1.0, notice=False)
    plan = CloudChaosPlan(1, "aws_batch", 2, faults=(loss,))
    assert plan.timings() == {}
    partial = CloudChaosPlan(1, "aws_batch", 2, faults=(loss, CapacityLimit(1.0, 2.0)))
    assert partial.timings()["partial_capacity_timeout_s"] == 2.0
    assert CloudChaosPlan(1, "aws_batch", 2, firewall="machines").timings() == {
        "reach_timeout_s": 8.0
    }


def test_restarts_are_switched_off_only_where_the_cloud_has_an_option_for_it() -> None:
    plans = [random_cloud_plan(seed) for seed in range(300)]
    assert {plan.cloud for plan in plans if not plan.restarts_machines} == {
        "aws_batch",
        "gcp_batch",
    }
