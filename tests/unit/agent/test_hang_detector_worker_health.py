"""WorkerLiveness: silence counts only while the agent itself runs, and is reported once."""

from __future__ import annotations

import pytest

from spotfit.agent.hang_detector import WorkerLiveness, heartbeat_interval_s


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(600.0, 5.0), (2.0, 0.5), (0.0, 0.0)])
def test_the_heartbeat_interval_is_a_fraction_of_the_timeout(
    timeout_s: float, interval_s: float
) -> None:
    assert heartbeat_interval_s(timeout_s) == interval_s


def check_every_second(liveness: WorkerLiveness, start: float, until: float) -> dict[int, float]:
    """Check every second from `start` until `until`; return the unresponsive workers."""
    unresponsive: dict[int, float] = {}
    now = start
    while now < until:
        unresponsive |= liveness.find_unresponsive(now)
        now += 1.0
    return unresponsive


def test_a_worker_without_a_message_is_not_unresponsive() -> None:
    assert check_every_second(WorkerLiveness(10.0), 0.0, 1000.0) == {}


def test_a_silent_worker_is_reported_once() -> None:
    liveness = WorkerLiveness(10.0)
    for rank in (0, 1):
        liveness.record_heartbeat(rank)
    assert check_every_second(liveness, 0.0, 8.0) == {}
    assert not liveness.record_heartbeat(0)
    assert check_every_second(liveness, 8.0, 12.0) == {1: 11.0}
    assert check_every_second(liveness, 12.0, 15.0) == {}


def test_a_worker_that_recovers_can_become_unresponsive_again() -> None:
    liveness = WorkerLiveness(10.0)
    liveness.record_heartbeat(3)
    assert set(check_every_second(liveness, 0.0, 20.0)) == {3}
    assert liveness.record_heartbeat(3)
    assert not liveness.record_heartbeat(3)
    assert set(check_every_second(liveness, 20.0, 40.0)) == {3}


def test_time_in_which_the_node_was_suspended_does_not_count() -> None:
    liveness = WorkerLiveness(10.0)
    liveness.record_heartbeat(0)
    liveness.find_unresponsive(0.0)
    assert liveness.find_unresponsive(5000.0) == {}, "the node was suspended"
    assert liveness.find_unresponsive(5001.0) == {}
    assert set(check_every_second(liveness, 5002.0, 5010.0)) == {0}


def test_an_exited_worker_is_not_reported() -> None:
    liveness = WorkerLiveness(10.0)
    liveness.record_heartbeat(0)
    check_every_second(liveness, 0.0, 5.0)
    liveness.remove(0)
    liveness.remove(7)
    assert check_every_second(liveness, 5.0, 100.0) == {}
