"""What the market gives, and for how long."""

from spotfit_localsim.dice import Dice
from spotfit_localsim.market import PLENTY, Market, Tide
from spotfit_localsim.traces import Trace


def tide(market: Market) -> Tide:
    return Tide(market, Dice(1).stream("market"))


def test_capacity_follows_the_history_until_the_storm_is_over() -> None:
    moving = tide(Market(capacity=Trace("t", ((0.0, 4), (10.0, 0), (20.0, 2)))))
    assert [moving.capacity(moment) for moment in (0.0, 9.9, 10.0, 25.0)] == [4, 4, 0, 2]
    assert moving.turns() == (0.0, 10.0, 20.0)
    moving.calm()
    assert moving.capacity(10.0) == PLENTY


def test_machines_live_as_long_as_the_market_says_on_average() -> None:
    moving = tide(Market(reclaims_per_hour=60.0))
    lives = [moving.life_s() or 0.0 for _ in range(3000)]
    assert 55 < sum(lives) / len(lives) < 65
    assert tide(Market()).life_s() is None


def test_after_the_storm_nobody_is_refused_reclaimed_or_left_without_answer() -> None:
    moving = tide(Market(reclaims_per_hour=1.0, refusals=1.0, lost_answers=1.0, dead_boots=1.0))
    assert moving.refused()
    assert moving.answer_lost()
    assert moving.boots_dead()
    moving.calm()
    assert not moving.refused()
    assert not moving.answer_lost()
    assert not moving.boots_dead()
    assert moving.life_s() is None
