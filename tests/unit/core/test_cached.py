"""Properties that are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from spotfit.core.cached import cached_property


class Sum:
    def __init__(self, *parts: Sum) -> None:
        self._parts = parts
        self.computed = 0

    @cached_property
    def value(self) -> int:
        self.computed += 1
        with ThreadPoolExecutor(1) as executor:
            values: Iterator[int] = executor.map(lambda part: part.value, self._parts, timeout=30)
            return 1 + sum(values)


def test_threads_of_a_computation_may_compute_the_attribute_of_other_instances() -> None:
    assert Sum(Sum(), Sum(Sum())).value == 4


def test_a_value_is_computed_once() -> None:
    total = Sum()
    assert (total.value, total.value, total.computed) == (1, 1, 1)
