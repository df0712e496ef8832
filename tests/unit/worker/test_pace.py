"""When to save: steps are counted, and of time all ranks hear from rank 0 alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spotfit.model.cadence import Costs, Market, Odds, parse_cadence
from spotfit.testing.clock import ManualClock
from spotfit.worker.pace import LOOK_S, Measured, Pace


class Ranks:
    """Two of them, in step; what rank 0 says the other hears."""

    def __init__(self, every: Any, *, life_s: float = 3600.0) -> None:
        self.clock = ManualClock()
        self.looks = 0
        self.left_s: float | None = None
        self.advice: tuple[float, str] | None = None
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
        )

    def _agreed(self, kind: str, value: bytes) -> bytes:
        self.looks += 1
        self._said = value
        return value

    def saves(
        self,
        steps: range,
        *,
        step_s: float = 0.0,
        epoch: int = 0,
        commits: bool = True,
        size_bytes: int = 10**6,
    ) -> list[int]:
        """After which steps they save, all alike; each is committed at once, or not at all."""
        found = []
        measured = self._paces[0].measured
        for step in steps:
            self.clock.wait(step_s)
            if self.left_s is not None:
                self.left_s -= step_s
            ends = epoch > 0 and step % epoch == 0
            first, second = [pace.due(step, ends_epoch=ends) for pace in self._paces]
            assert first == second
            if first is not None:
                found.append(step)
                self.told.append(first)
                for pace in self._paces:
                    pace.saved(step)
                report = next(self._reports)
                measured.saved(report, 0.5, size_bytes)
                if commits:
                    self.clock.wait(0.1)
                    measured.note(report, "carried")
                    measured.note(report, "committed")
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
    ranks.saves(range(1, 1000), step_s=0.01)
    assert ranks.looks <= 10 / LOOK_S + 5


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
    first, last = ranks.saves(range(50, 80), step_s=1.0)
    assert "49 s of work should not wait" in ranks.told[0] or first < 55
    assert all(why.startswith("a machine is going: ") for why in ranks.told)
    assert last > 65, "as late as is safe"


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


def test_costs_are_known_once_one_is_committed() -> None:
    clock = ManualClock()
    measured = Measured(clock)
    for _ in range(10):
        clock.wait(1.0)
        measured.step()
    measured.saved(0, 0.25, 1000)
    for _ in range(5):
        clock.wait(2.0)
        measured.step()
    measured.note(0, "carried")
    measured.note(0, "committed")
    costs = measured.costs
    assert costs == Costs(stall_s=0.25, slowdown=0.5, commit_s=10.0)
    assert (measured.in_flight, measured.bytes_per_s) == (0, 100)


def test_a_lost_one_is_on_its_way_no_more() -> None:
    measured = Measured(ManualClock())
    measured.saved(0, 0.25, 1000)
    measured.note(0, "lost")
    assert measured.in_flight == 0
    assert measured.costs is None
