"""Backends that restart lost machines by themselves: machines rented, and downtime per loss."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.market import SimMarketConfig
from spotfit_localsim.virtual.scenario import AtStep, ReclaimMachine, Scenario, TargetSelector
from spotfit_localsim.virtual.timeline import SimulationResult
from spotfit_localsim.virtual.workload import Workload
from tests.sim.results import simulated

BOOT_S = 100.0
SEEDS = range(6)


def one_loss(
    target: TargetSelector,
    *,
    with_notice: bool,
    restarts: int = 3,
    capacity: int = 2,
    boot_s: float = BOOT_S,
    read_lag_s: float = 0.0,
) -> Scenario:
    """Two workers on two machines, of which one is preempted."""
    return Scenario(
        "one loss",
        num_workers=2,
        slots_per_machine=1,
        workload=Workload(steps=200, save_every=5),
        market=SimMarketConfig(
            boot_s=(boot_s, boot_s),
            notice_s=30.0,
            restarts_per_machine=restarts,
            read_lag_s=read_lag_s,
            capacity=CapacityTrace("constant", ((0.0, capacity),)),
        ),
        events=(ReclaimMachine(AtStep(30), target, with_notice=with_notice),),
        faults_duration_s=1500.0,
    )


def downtime_s(result: SimulationResult) -> float:
    """Return the time from the end of the machine to the opening of the next round."""
    lost_at = next(entry.at_s for entry in result.timeline if "is terminated" in entry.text)
    return next(times_of(result, "round 2 opened")) - lost_at


def times_of(result: SimulationResult, text: str) -> Iterator[float]:
    return (entry.at_s for entry in result.timeline if text in entry.text)


@pytest.mark.parametrize("target", ["leader", "follower"])
@pytest.mark.parametrize("with_notice", [False, True], ids=["no notice", "notice"])
@pytest.mark.parametrize(("capacity", "boot_s"), [(2, BOOT_S), (10, BOOT_S), (10, 5.0)])
def test_one_loss_rents_one_machine(
    target: TargetSelector, capacity: int, boot_s: float, *, with_notice: bool
) -> None:
    for seed in SEEDS:
        scenario = one_loss(target, with_notice=with_notice, capacity=capacity, boot_s=boot_s)
        result = simulated(scenario, seed)
        assert (result.outcome, result.machine_count) == ("finished", 3), seed


@pytest.mark.parametrize("target", ["leader", "follower"])
@pytest.mark.parametrize("with_notice", [False, True], ids=["no notice", "notice"])
def test_downtime_is_one_boot_if_no_further_machine_is_available(
    target: TargetSelector, *, with_notice: bool
) -> None:
    for seed in SEEDS:
        result = simulated(one_loss(target, with_notice=with_notice), seed)
        assert downtime_s(result) <= 1.15 * BOOT_S, seed


def test_a_machine_that_is_not_restarted_is_replaced() -> None:
    """After its last attempt it is replaced while it works."""
    result = simulated(one_loss("follower", with_notice=False, restarts=0), 1)
    assert (result.outcome, result.machine_count) == ("finished", 3)


@pytest.mark.parametrize("with_notice", [False, True], ids=["no notice", "notice"])
def test_late_reads_rent_no_second_machine(*, with_notice: bool) -> None:
    for seed in SEEDS:
        scenario = one_loss("follower", with_notice=with_notice, capacity=10, read_lag_s=50.0)
        result = simulated(scenario, seed)
        assert (result.outcome, result.machine_count) == ("finished", 3), seed
