"""The pulse: silence counts in time that we ourselves were awake, and is told once."""

from __future__ import annotations

import pytest

from spotfit.agent.pulse import Pulse, beat_s


@pytest.mark.parametrize(("patience_s", "beat"), [(600.0, 5.0), (2.0, 0.5), (0.0, 0.0)])
def test_a_worker_beats_several_times_before_it_is_missed(patience_s: float, beat: float) -> None:
    assert beat_s(patience_s) == beat


def looked(pulse: Pulse, start: float, until: float) -> dict[int, float]:
    """Every second from start to before until; who came to be missed."""
    missed: dict[int, float] = {}
    now = start
    while now < until:
        missed |= pulse.look(now)
        now += 1.0
    return missed


def test_who_was_never_heard_is_not_missed() -> None:
    assert looked(Pulse(10.0), 0.0, 1000.0) == {}


def test_who_falls_silent_is_missed_once() -> None:
    pulse = Pulse(10.0)
    for rank in (0, 1):
        pulse.heard(rank)
    assert looked(pulse, 0.0, 8.0) == {}
    assert not pulse.heard(0)
    assert looked(pulse, 8.0, 12.0) == {1: 11.0}
    assert looked(pulse, 12.0, 15.0) == {}


def test_who_is_heard_again_may_be_missed_again() -> None:
    pulse = Pulse(10.0)
    pulse.heard(3)
    assert set(looked(pulse, 0.0, 20.0)) == {3}
    assert pulse.heard(3)
    assert not pulse.heard(3)
    assert set(looked(pulse, 20.0, 40.0)) == {3}


def test_time_in_which_we_slept_ourselves_does_not_count() -> None:
    pulse = Pulse(10.0)
    pulse.heard(0)
    pulse.look(0.0)
    assert pulse.look(5000.0) == {}, "the whole machine was away"
    assert pulse.look(5001.0) == {}
    assert set(looked(pulse, 5002.0, 5010.0)) == {0}


def test_who_has_ended_is_not_missed() -> None:
    pulse = Pulse(10.0)
    pulse.heard(0)
    looked(pulse, 0.0, 5.0)
    pulse.gone(0)
    pulse.gone(7)
    assert looked(pulse, 5.0, 100.0) == {}
