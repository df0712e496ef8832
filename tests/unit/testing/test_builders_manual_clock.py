"""`ManualClock` advances only by waiting."""

import pytest

from spotfit.core.clock import Clock
from spotfit.testing.builders import ManualClock


def test_time_advances_only_by_waiting() -> None:
    clock: Clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.wait(2.5)
    assert clock.now() == 7.5


def test_a_negative_wait_is_refused() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="negative"):
        clock.wait(-1)
    assert clock.now() == 0.0
