"""Seeded random streams: one seed for a simulation, one independent stream for each component.

A component that draws more numbers does not change what other components draw.
"""

from __future__ import annotations

import random  # the only module that may use `random`


class SeededStreams:
    """The source of every random number of one simulation."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed

    def stream(self, name: str) -> RandomStream:
        """Return the stream of one component; equal seed and name give an equal stream."""
        return RandomStream(f"{self.seed}/{name}")


class RandomStream(random.Random):
    """A random number generator with the distributions that the simulators need."""

    def bernoulli(self, probability: float) -> bool:
        """Return True with the given probability."""
        return probability > 0 and self.random() < probability

    def uniform_in(self, bounds: tuple[float, float]) -> float:
        """Return a uniform value in `bounds`."""
        low, high = bounds
        # A constant draws no number: fixing a range must not change later draws.
        return low if low == high else low + (high - low) * self.random()

    def geometric(self, probability: float) -> int:
        """Return the number of trials up to the first success, or 0 for probability 0."""
        if probability <= 0:
            return 0
        return 1 + int(self.expovariate(probability))
