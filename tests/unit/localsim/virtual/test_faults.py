"""What may go wrong, and how often."""

import pytest

from spotfit.core.errors import TransientStoreError
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.faults import (
    ActiveFaults,
    FaultConfig,
    FaultyConnection,
    ProcessFaultInjector,
)


def test_requests_and_responses_are_lost_as_configured() -> None:
    line = FaultyConnection(
        ActiveFaults(FaultConfig(lost_request_probability=1.0, lost_response_probability=0.0)),
        SeededStreams(1).stream("x"),
    )
    with pytest.raises(TransientStoreError, match="not sent"):
        line.maybe_lose_request()
    line.maybe_lose_response()
    line = FaultyConnection(
        ActiveFaults(FaultConfig(lost_request_probability=0.0, lost_response_probability=1.0)),
        SeededStreams(1).stream("x"),
    )
    line.maybe_lose_request()
    with pytest.raises(TransientStoreError, match="lost"):
        line.maybe_lose_response()


def test_a_slow_request_takes_its_time() -> None:
    line = FaultyConnection(
        ActiveFaults(FaultConfig(slow_request_probability=1.0, slow_latency_s=(7.0, 7.0))),
        SeededStreams(1).stream("x"),
    )
    assert line.draw_latency_s() == 7.0


def test_stopped_faults_inject_nothing() -> None:
    season = ActiveFaults(
        FaultConfig(lost_request_probability=1.0, freeze_probability=1.0, crash_probability=1.0)
    )
    hazards = ProcessFaultInjector(season, SeededStreams(1).stream("x"))
    line = FaultyConnection(season, SeededStreams(1).stream("y"))
    assert hazards.next_fault() is not None
    season.stop_faults()
    assert hazards.next_fault() is None
    line.maybe_lose_request()


def test_requests_hang_one_by_one_or_all_at_once() -> None:
    season = ActiveFaults(FaultConfig(stall_probability=0.5, stall_s=(5.0, 60.0)))
    line = FaultyConnection(season, SeededStreams(1).stream("x"))
    own = [line.draw_stall_s(0.0) for _ in range(100)]
    assert 0 < own.count(0.0) < 100
    assert all(5.0 <= seconds <= 60.0 for seconds in own if seconds)
    season.stall_until(1000.0)
    assert all(line.draw_stall_s(900.0) >= 100.0 for _ in range(20))
    season.stop_faults()
    assert FaultyConnection(season, SeededStreams(1).stream("x")).draw_stall_s(900.0) == 0.0


def test_process_that_cannot_crash_only_freezes() -> None:
    faults = FaultConfig(freeze_probability=0.5, freeze_s=(1.0, 2.0), crash_probability=0.5)
    hazards = ProcessFaultInjector(
        ActiveFaults(faults), SeededStreams(1).stream("x"), can_crash=False
    )
    met = [hazard for hazard in (hazards.next_fault() for _ in range(100)) if hazard]
    assert met
    assert not any(hazard.is_fatal for hazard in met)
    assert all(1.0 <= hazard.freeze_s <= 2.0 for hazard in met)
