"""When to save: steps are counted, and of time all ranks hear from rank 0 alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spotfit.testing.clock import ManualClock
from spotfit.worker.pace import LOOK_S, Pace


class Ranks:
    """Two of them, in step; what rank 0 says the other hears."""

    def __init__(self, every: Any) -> None:
        self.clock = ManualClock()
        self.looks = 0
        self._said = b""
        self._paces = [
            Pace(every, None, agreed=self._agreed, leads=leads, clock=self.clock)
            for leads in (True, False)
        ]

    def _agreed(self, kind: str, value: bytes) -> bytes:
        self.looks += 1
        self._said = value or self._said
        return self._said

    def saves(self, steps: int, *, step_s: float = 0.0, epoch: int = 0) -> list[int]:
        """After which steps they save, all alike."""
        found = []
        for step in range(1, steps + 1):
            self.clock.wait(step_s)
            ends = epoch > 0 and step % epoch == 0
            first, second = [pace.due(step, ends_epoch=ends) for pace in self._paces]
            assert first == second
            if first is not None:
                found.append(step)
                for pace in self._paces:
                    pace.saved(step, 0.01)
        return found


def test_so_many_steps_are_so_many() -> None:
    ranks = Ranks(4)
    assert ranks.saves(10) == [4, 8]
    assert ranks.looks == 0


def test_after_a_time_all_save_the_same_step() -> None:
    ranks = Ranks("10s")
    saves = ranks.saves(1000, step_s=0.1)
    gaps = [later - step for step, later in itertools.pairwise([0, *saves])]
    assert all(100 <= gap <= 121 for gap in gaps), "10 s, and the time between two looks at most"


def test_between_looks_nobody_asks_anybody() -> None:
    ranks = Ranks("10m")
    ranks.saves(1000, step_s=0.01)
    assert ranks.looks <= 2 * (10 / LOOK_S + 5)


def test_the_end_of_an_epoch_is_one_for_all() -> None:
    assert Ranks("epoch").saves(10, epoch=5) == [5, 10]


@pytest.mark.parametrize("every", ["at_notice"])
def test_some_never_save_by_themselves(every: str) -> None:
    assert Ranks(every).saves(50, step_s=100.0) == []
