"""ManualClock: time passes when it is told to, and never backwards."""

import pytest

from spotfit.core.clock import Clock
from spotfit.testing.clock import ManualClock


def test_time_stands_still_until_somebody_waits() -> None:
    clock: Clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.wait(2.5)
    assert clock.now() == 7.5


def test_time_does_not_run_backwards() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="backwards"):
        clock.wait(-1)
    assert clock.now() == 0.0
