"""The market behind a simulated cloud: capacity by trace and limit, the rest by dice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.dice import Dice
from spotfit_localsim.wire.tide import PLENTY, MarketOptions, Tide


def test_there_is_plenty_where_nobody_says_otherwise() -> None:
    assert Tide(MarketOptions(), began_s=0.0).capacity(1e6) == PLENTY


def test_a_trace_is_told_faster_than_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"kind": "availability", "gap_seconds": 60, "data": [4, 0, 2]}))
    tide = Tide(MarketOptions(trace=str(path), speed=60.0), began_s=100.0)
    assert [tide.capacity(now) for now in (100.0, 100.9, 101.5, 102.5, 999.0)] == [4, 4, 0, 2, 2]
    tide.limit = 1
    assert tide.capacity(102.5) == 1


def test_machines_are_left_for_ever_unless_there_are_reclaims() -> None:
    calm, rough = (Tide(MarketOptions(reclaims_per_hour=n), began_s=0.0) for n in (0.0, 60.0))
    assert calm.life_s(Dice(1).stream("life")) is None
    lives = [rough.life_s(Dice(n).stream("life")) for n in range(300)]
    assert 40 < sum(filter(None, lives)) / 300 < 80, "a minute on average"


def test_the_same_dice_give_the_same_machine() -> None:
    tide = Tide(MarketOptions(boot_s=10.0), began_s=0.0)
    first, again = (tide.boot_s(Dice(3).stream("boot")) for _ in range(2))
    assert first == again
    assert 9.0 <= first <= 11.0


@pytest.mark.parametrize("wrong", [{"speed": 0.0}, {"speed": -1.0}, {"boot_s": -1.0}])
def test_a_market_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MarketOptions(**wrong)  # type: ignore[arg-type]  # that is what is tested
