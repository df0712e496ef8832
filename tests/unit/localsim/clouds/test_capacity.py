"""The market behind a simulated cloud: capacity by trace and limit, the rest by dice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.clouds.capacity import UNLIMITED_CAPACITY, MarketOptions, RealTimeMarket
from spotfit_localsim.random_streams import SeededStreams


def test_there_is_plenty_where_nobody_says_otherwise() -> None:
    assert RealTimeMarket(MarketOptions(), started_s=0.0).capacity_at(1e6) == UNLIMITED_CAPACITY


def test_a_trace_is_told_faster_than_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"kind": "availability", "gap_seconds": 60, "data": [4, 0, 2]}))
    tide = RealTimeMarket(MarketOptions(trace=str(path), speed=60.0), started_s=100.0)
    assert [tide.capacity_at(now) for now in (100.0, 100.9, 101.5, 102.5, 999.0)] == [4, 4, 0, 2, 2]
    tide.max_machines = 1
    assert tide.capacity_at(102.5) == 1


def test_machines_are_left_for_ever_unless_there_are_reclaims() -> None:
    calm, rough = (
        RealTimeMarket(MarketOptions(reclaims_per_hour=n), started_s=0.0) for n in (0.0, 60.0)
    )
    assert calm.draw_lifetime_s(SeededStreams(1).stream("life")) is None
    lives = [rough.draw_lifetime_s(SeededStreams(n).stream("life")) for n in range(300)]
    assert 40 < sum(filter(None, lives)) / 300 < 80, "a minute on average"


def test_the_same_dice_give_the_same_machine() -> None:
    tide = RealTimeMarket(MarketOptions(boot_s=10.0), started_s=0.0)
    first, again = (tide.draw_boot_s(SeededStreams(3).stream("boot")) for _ in range(2))
    assert first == again
    assert 9.0 <= first <= 11.0


@pytest.mark.parametrize("wrong", [{"speed": 0.0}, {"speed": -1.0}, {"boot_s": -1.0}])
def test_a_market_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MarketOptions(**wrong)  # type: ignore[arg-type]  # that is what is tested
