"""Properties that are computed once."""

from __future__ import annotations

from threading import Thread

from spotfit.core.cached import cached_property

TIMEOUT_S = 30.0


class Sum:
    def __init__(self, *parts: Sum) -> None:
        self._parts = parts
        self.computed = 0

    @cached_property
    def value(self) -> int:
        """1 and the values of the parts, each of which is computed in a thread."""
        self.computed += 1
        # Daemons: a deadlock must fail the test, and not hang its process.
        threads = [Thread(target=lambda part=part: part.value, daemon=True) for part in self._parts]
        for thread in threads:
            thread.start()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        return 1 + sum(part.value for part in self._parts)


def test_threads_of_a_computation_may_compute_the_attribute_of_other_instances() -> None:
    total = Sum(Sum(), Sum(Sum()))
    assert (total.value, total.computed) == (4, 1)


def test_a_value_is_computed_once() -> None:
    total = Sum()
    assert (total.value, total.value, total.computed) == (1, 1, 1)
