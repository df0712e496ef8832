"""When to save: steps are counted, and of time all ranks hear from rank 0 alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from spotfit.model.cadence import Costs, Market, Odds, parse_cadence
from spotfit.policy.cadence import LOOK_S
from spotfit.testing.clock import ManualClock
from spotfit.worker.pace import Pace


class Ranks:
    """Two of them, in step; what rank 0 says the other hears, which takes `look_s`."""

    def __init__(self, every: Any, *, life_s: float = 3600.0, look_s: float = 0.0015) -> None:
        self.clock = ManualClock()
        self.looked: list[float] = []
        """When they did."""
        self._look_s = look_s
        self.left_s: float | None = None
        self.advice: tuple[float, str] | None = None
        self.replaced = False
        self.peer_bytes_per_s = 0.0
        self.told: list[str] = []
        self._said = b""
        self._paces = [self._pace(every, life_s, leads=leads) for leads in (True, False)]
        self._reports = itertools.count()

    def _pace(self, every: Any, life_s: float, *, leads: bool) -> Pace:
        return Pace(
            parse_cadence(every),
            agreed=self._agreed if leads else lambda _kind, _value: self._said,
            leads=leads,
            clock=self.clock,
            odds=Odds(Market(life_s)),
            notice=lambda: self.left_s,
            advice=lambda: self.advice,
            replaced=lambda: self.replaced,
            peer_bytes_per_s=lambda: self.peer_bytes_per_s,
        )

    def _agreed(self, kind: str, value: bytes) -> bytes:
        self.looked.append(self.clock.now())
        self.clock.wait(self._look_s)
        self._said = value
        return value

    @property
    def costs(self) -> Costs:
        """What a save costs, as far as rank 0 can tell."""
        found = self._paces[0].measured.costs
        assert found is not None
        return found

    @property
    def apart_s(self) -> list[float]:
        """How long after each look the next one was."""
        return [later - look for look, later in itertools.pairwise(self.looked)]

    def saves(
        self,
        steps: range,
        *,
        step_s: float | Callable[[int], float] = 0.0,
        epoch: int = 0,
        commits: bool = True,
        size_bytes: int = 10**6,
    ) -> list[int]:
        """After which steps they save, all alike; each is committed by the next, or never."""
        found = []
        report = None
        for step in steps:
            took_s = step_s(step) if callable(step_s) else step_s
            self.clock.wait(took_s)
            if self.left_s is not None:
                self.left_s -= took_s
            if commits and report is not None:
                self._paces[0].measured.note(report, "committed")
            ends = epoch > 0 and step % epoch == 0
            first, second = [pace.due(step, ends_epoch=ends) for pace in self._paces]
            assert first == second
            if first is not None:
                found.append(step)
                self.told.append(first)
                report = next(self._reports)
                for pace in self._paces:
                    pace.saved(step)
                    pace.given(report, 0.5, size_bytes)
        return found


def gaps(saves: list[int]) -> list[int]:
    return [later - step for step, later in itertools.pairwise([0, *saves])]


def test_so_many_steps_are_so_many() -> None:
    ranks = Ranks(4)
    assert ranks.saves(range(1, 11)) == [4, 8]
    assert ranks.told == ["4 steps since the last save"] * 2
    ranks = Ranks(1)
    ranks.saves(range(1, 2))
    assert ranks.told == ["1 step since the last save"]


def test_after_a_time_all_save_the_same_step() -> None:
    ranks = Ranks("10s")
    between = gaps(ranks.saves(range(1, 1000), step_s=0.1))
    assert all(98 <= gap <= 121 for gap in between), "10 s, and the time between two looks at most"
    assert "every 10 s" in ranks.told[0]


def test_between_looks_nobody_asks_anybody() -> None:
    ranks = Ranks("10m")
    ranks.saves(range(1, 10_000), step_s=0.01)
    assert sum(ranks.apart_s) > 99
    assert max(ranks.apart_s) <= LOOK_S
    assert len(ranks.looked) * 0.0015 < 0.002 * 100, "that takes two thousandths of the time"
    dear = Ranks("10m", look_s=0.02)
    dear.saves(range(1, 10_000), step_s=0.01)
    assert len(dear.looked) <= 100 / LOOK_S + 15


def an_evaluation_every(steps: int, *, of_s: float) -> Callable[[int], float]:
    """Steps of a millisecond, and after so many one with an evaluation."""
    return lambda step: of_s if step % steps == 0 else 0.001


@pytest.mark.parametrize("every", [20, 100, 2500, 100_000])
def test_a_slow_step_now_and_then_puts_a_look_off_by_itself_only(every: int) -> None:
    ranks = Ranks("10m")
    ranks.saves(range(1, 20_000), step_s=an_evaluation_every(every, of_s=4.0))
    assert max(ranks.apart_s) <= LOOK_S + 4.0
    in_all_s = ranks.looked[-1] - ranks.looked[0]
    assert len(ranks.looked) * 0.0015 < 0.01 * in_all_s


def test_times_are_kept_though_steps_are_slow_now_and_then() -> None:
    ranks = Ranks("5s")
    when = an_evaluation_every(50, of_s=1.0)
    saves = ranks.saves(range(1, 4000), step_s=when)
    begun_s = [sum(map(when, range(1, step + 1))) for step in [0, *saves]]
    assert max(two - one for one, two in itertools.pairwise(begun_s)) < 5 + LOOK_S + 1.0


def test_a_notice_is_seen_in_time_though_steps_are_slow_now_and_then() -> None:
    ranks = Ranks("at_notice")
    when = an_evaluation_every(100, of_s=4.0)
    assert ranks.saves(range(1, 650), step_s=when) == []
    ranks.left_s = 40.0
    assert ranks.saves(range(650, 1500), step_s=when), "no evaluation takes so long"


def test_where_steps_become_slower_a_look_or_two_come_late() -> None:
    """By as many times as steps are slower: after how many to look was agreed before."""
    ranks = Ranks("10m", look_s=0.0005)
    ranks.saves(range(1, 6100), step_s=lambda step: 0.01 if step < 6000 else 0.2)
    assert max(ranks.apart_s) <= 20 * 0.51
    assert 1 <= sum(apart_s > LOOK_S for apart_s in ranks.apart_s) <= 2


def test_left_to_itself_it_measures_one_and_saves_as_often_as_losses_want() -> None:
    rough, calm = Ranks("auto", life_s=600.0), Ranks("auto", life_s=40_000.0)
    often, rare = (len(one.saves(range(1, 4000), step_s=0.5)) for one in (rough, calm))
    assert rough.told[0].startswith("one every 30 s: the first save, to measure")
    assert "0.50 s standing still" in rough.told[-1]
    assert often > 2 * rare > 2


def test_after_each_commit_it_is_told_once_when_the_next_save_comes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = Ranks("auto", life_s=40_000.0)
    saves = ranks.saves(range(1, 4000), step_s=0.5)
    told = [line for line in capsys.readouterr().err.splitlines() if "checkpoint.next" in line]
    assert 1 < len(saves) <= len(told) + 1 <= len(saves) + 1
    assert all("in_s=" in line and "the group is lost every" in line for line in told)
    Ranks("10s").saves(range(1, 100), step_s=0.5)
    assert "checkpoint.next" not in capsys.readouterr().err, "that much the user knows"


def test_one_that_is_on_its_way_is_waited_for() -> None:
    ranks = Ranks("auto")
    assert len(ranks.saves(range(1, 2000), step_s=0.5, commits=False)) == 1


def test_a_slow_step_after_a_save_is_its_cost_unless_an_epoch_had_ended() -> None:
    """Ranks that save longer are waited for then; but after an epoch there is more to be done."""
    by_time, epochs = Ranks(["auto", "epoch"]), Ranks(["auto", "epoch"])
    first, *_ = by_time.saves(range(1, 35), step_s=lambda step: 5.0 if step == 31 else 1.0)
    assert first == 30
    assert epochs.saves(range(1, 110), step_s=lambda step: 5.0 if step == 101 else 0.2, epoch=100)
    assert by_time.costs.stall_s == pytest.approx(4.5, abs=0.01)
    assert epochs.costs.stall_s == 0.5


def test_several_wishes_hold_together() -> None:
    ranks = Ranks(["10s", "epoch"])
    saves = ranks.saves(range(1, 400), step_s=0.1, epoch=150)
    assert {150, 300} <= set(saves)
    assert len(saves) >= 4


@pytest.mark.parametrize("every", ["at_notice", 10_000])
def test_at_a_notice_one_is_saved_whatever_else_is_set(every: Any) -> None:
    ranks = Ranks(every)
    assert ranks.saves(range(1, 50), step_s=1.0) == []
    ranks.left_s = 30.0
    first, *_, last = ranks.saves(range(50, 80), step_s=1.0)
    assert "49 s of work should not wait" in ranks.told[0] or first < 55
    assert all(why.startswith("a machine is going: ") for why in ranks.told)
    assert last > 65, "as late as is safe"


@pytest.mark.parametrize("step_s", [0.003, 0.01, 0.05, 0.3])
def test_the_last_moment_is_not_slept_over(step_s: float) -> None:
    """It is looked the oftener, the nearer it comes."""
    ranks = Ranks("at_notice")
    begun = round(20 / step_s)
    assert ranks.saves(range(1, begun), step_s=step_s) == []
    ranks.left_s = 30.0
    saves = ranks.saves(range(begun, begun + round(30 / step_s)), step_s=step_s)
    last_left_s = 30 - (saves[-1] - begun + 1) * step_s
    assert 1.0 < last_left_s < 4.0, "a second for the entry, half a one for the snapshot"


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2, 0.5])
def test_whenever_a_notice_comes_little_is_lost_at_the_end(step_s: float) -> None:
    """A save is committed within a step. The last one is due once what it takes is left, with a
    fifth, a second and a step to spare, and is begun at most three steps before."""
    takes_s = 1.2 * step_s + 0.5 + 1.0 + step_s
    for phase in range(40):
        notice_s = 30 + 0.37 * phase
        begun, steps = round(20 / step_s) + phase, round(notice_s / step_s)
        ranks = Ranks("at_notice")
        assert ranks.saves(range(1, begun), step_s=step_s) == []
        ranks.left_s = notice_s
        *_, last = ranks.saves(range(begun, begun + steps), step_s=step_s)
        assert (begun + steps - 1 - last) * step_s <= takes_s + 3 * step_s, notice_s


@pytest.mark.parametrize("every", ["at_notice", "auto", "10s"])
def test_a_change_waits_for_a_peer_and_not_for_the_bucket(every: Any) -> None:
    """At the notice one save is on its way, and stays so. Another is begun soon after the
    replacement stands ready; no third one, for which the training would wait."""
    ranks = Ranks(every)
    ranks.peer_bytes_per_s = 1e6
    ranks.saves(range(1, 30), step_s=0.1)
    ranks.left_s = 60.0
    (one,) = ranks.saves(range(30, 100), step_s=0.1, commits=False)
    ranks.replaced = True
    (other,) = ranks.saves(range(100, 500), step_s=0.1, commits=False)
    assert one < 60
    assert other <= 100 + 10 * LOOK_S
    assert "one to the peer takes" in ranks.told[-1]


def test_a_step_as_slow_as_those_before_does_not_come_between() -> None:
    """An evaluation begins 6.5 s before the end and takes 6 s: behind it there is no time."""
    ranks = Ranks("at_notice")
    when = an_evaluation_every(1000, of_s=6.0)
    assert ranks.saves(range(1, 3101), step_s=when) == []
    ranks.left_s = sum(map(when, range(3101, 7001))) + 0.5
    *_, last = ranks.saves(range(3101, 7001), step_s=when)
    assert last > 6000


def test_in_danger_one_is_saved_soon_and_only_once() -> None:
    ranks = Ranks("at_notice")
    assert ranks.saves(range(1, 50), step_s=0.5) == []
    ranks.advice = (ranks.clock.now(), "higher risk")
    (saved,) = ranks.saves(range(50, 100), step_s=0.5)
    assert (saved - 49) * 0.5 <= LOOK_S + 0.5
    assert ranks.told == ["higher risk; saving soon is wise"]
    ranks.advice = (ranks.clock.now(), "higher risk, once more")
    assert len(ranks.saves(range(100, 150), step_s=0.5)) == 1


def test_too_late_is_no_time_to_save() -> None:
    ranks = Ranks("at_notice")
    ranks.saves(range(1, 10), step_s=1.0)
    ranks.left_s = 1.5
    assert ranks.saves(range(10, 12), step_s=0.5) == []
