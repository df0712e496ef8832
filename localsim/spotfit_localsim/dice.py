"""One seed, many streams: what one part draws does not change what another one sees."""

from __future__ import annotations

import random  # seeded streams are what this file is for


class Dice:
    """Every random number of one simulated world comes from its seed."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed

    def stream(self, name: str) -> Stream:
        """Numbers of one part of the world; the same for the same seed and name."""
        return Stream(f"{self.seed}/{name}")


class Stream(random.Random):
    """A source of numbers, with the questions that a world asks."""

    def chance(self, share: float) -> bool:
        """Whether something happens that happens in so large a share of the cases."""
        return share > 0 and self.random() < share

    def between(self, span: tuple[float, float]) -> float:
        """Somewhere in the span."""
        low, high = span
        return low if low == high else low + (high - low) * self.random()

    def gap(self, share: float) -> int:
        """How many tries until something that happens with this chance does; 0 for never."""
        if share <= 0:
            return 0
        return 1 + int(self.expovariate(share))
