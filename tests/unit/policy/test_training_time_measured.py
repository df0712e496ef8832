"""Remaining training time and changeover time from what a run has measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.model.market_record import MarketRecord, MeasuredSpeed
from spotfit.model.spec import CostSpec, RunTiming
from spotfit.policy.training_time import changeover_s, complete_training_s
from spotfit.testing.builders import a_spec, a_view

TIMING = RunTiming(lease_timeout_s=20.0)
COST = CostSpec(training_time_s=100.0, start_time_s=10.0)
# The first interval of a round was ten times slower than the following ones.
FIRST = MarketRecord(
    first_speeds={2: MeasuredSpeed(share=0.1, measured_s=150.0)}, first_gaps_s=(150.0,)
)
VIEW = a_view(spec=a_spec(cost=COST, timing=TIMING), market=FIRST)


def test_imports_and_restores_of_a_round_do_not_slow_the_measured_speed() -> None:
    assert complete_training_s(VIEW) == 100.0, "the estimate of the user"
    following = replace(
        FIRST, speeds={2: MeasuredSpeed(share=0.1, measured_s=15.0)}, commit_gaps_s=(15.0,)
    )
    assert complete_training_s(replace(VIEW, market=following)) == pytest.approx(150.0)


def test_without_an_estimate_the_first_interval_is_used() -> None:
    spec = replace(VIEW.spec, cost=replace(COST, training_time_s=None))
    assert complete_training_s(replace(VIEW, spec=spec)) == pytest.approx(1500.0)


def test_the_changeover_contains_imports_and_restores() -> None:
    following = replace(FIRST, commit_gaps_s=(15.0,) * 8)
    assert changeover_s(replace(VIEW, market=following)) == 20.0 + 10.0 + 150.0
