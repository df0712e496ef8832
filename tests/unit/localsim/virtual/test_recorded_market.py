"""Recorded markets by ticks: units, least counts, sets of zones."""

import pytest

from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.recorded_market import (
    MarketRecording,
    market_grid,
    market_recording,
    recorded_together,
)


@pytest.mark.parametrize("changeover_h", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("tick_s", [300.0, 390.0, 600.0, 3600.0])
def test_units_divide_tick_and_changeover(tick_s: float, changeover_h: float) -> None:
    units = market_grid(tick_s, changeover_h * 3600)
    assert units.unit_s * units.tick == pytest.approx(tick_s)
    assert units.unit_s * units.boot == pytest.approx(changeover_h * 3600, rel=0.02)


def test_short_intervals_are_combined_to_the_least_count() -> None:
    trace = CapacityTrace("zone", ((0.0, 4), (120.0, 1), (180.0, 4)), 60.0, duration_s=900.0)
    one = market_recording(trace)
    assert (one.tick_s, one.counts, one.machines) == (300.0, (1, 4, 4), 4)


def test_a_recording_without_prices_has_a_default_ratio() -> None:
    one = market_recording(CapacityTrace("zone", ((0.0, 1),), 300.0, duration_s=900.0))
    assert (one.spot_usd, one.on_demand_usd) == (1.0, 3.0)


def test_zones_that_were_recorded_together_form_one_set() -> None:
    zones = [
        MarketRecording(name, 600.0, (1,) * length, 1, spot_usd=1.0, on_demand_usd=3.0)
        for name, length in (
            ("gcp_h100x1_16_us-east4-a", 5),
            ("gcp_h100x1_16_asia-southeast1-b", 5),
            ("gcp_h100x1_16_us-east4-c", 6),
            ("1-node_aws-10-26-2022_us-west-2a_k80_1", 5),
            ("1-node_aws-10-26-2022_us-west-2b_k80_1", 5),
            ("1-node_aws-10-26-2022_us-west-2b_v100_1", 5),
            ("x", 5),
        )
    ]
    sets = [[zones.index(one) for one in each] for each in recorded_together(zones)]
    assert sets == [[0, 1], [2], [3, 4], [5], [6]]
