"""Injected faults of requests and processes."""

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
    connection = FaultyConnection(
        ActiveFaults(FaultConfig(lost_request_probability=1.0, lost_response_probability=0.0)),
        SeededStreams(1).stream("x"),
    )
    with pytest.raises(TransientStoreError, match="not sent"):
        connection.maybe_lose_request()
    connection.maybe_lose_response()
    connection = FaultyConnection(
        ActiveFaults(FaultConfig(lost_request_probability=0.0, lost_response_probability=1.0)),
        SeededStreams(1).stream("x"),
    )
    connection.maybe_lose_request()
    with pytest.raises(TransientStoreError, match="lost"):
        connection.maybe_lose_response()


def test_slow_request_has_the_configured_latency() -> None:
    connection = FaultyConnection(
        ActiveFaults(FaultConfig(slow_request_probability=1.0, slow_latency_s=(7.0, 7.0))),
        SeededStreams(1).stream("x"),
    )
    assert connection.draw_latency_s() == 7.0


def test_stopped_faults_inject_nothing() -> None:
    active_faults = ActiveFaults(
        FaultConfig(lost_request_probability=1.0, freeze_probability=1.0, crash_probability=1.0)
    )
    fault_injector = ProcessFaultInjector(active_faults, SeededStreams(1).stream("x"))
    connection = FaultyConnection(active_faults, SeededStreams(1).stream("y"))
    assert fault_injector.next_fault() is not None
    active_faults.stop_faults()
    assert fault_injector.next_fault() is None
    connection.maybe_lose_request()


def test_stalls_affect_single_requests_or_all_requests() -> None:
    active_faults = ActiveFaults(FaultConfig(stall_probability=0.5, stall_s=(5.0, 60.0)))
    connection = FaultyConnection(active_faults, SeededStreams(1).stream("x"))
    stalls_s = [connection.draw_stall_s(0.0) for _ in range(100)]
    assert 0 < stalls_s.count(0.0) < 100
    assert all(5.0 <= seconds <= 60.0 for seconds in stalls_s if seconds)
    active_faults.stall_until(1000.0)
    assert all(connection.draw_stall_s(900.0) >= 100.0 for _ in range(20))
    active_faults.stop_faults()
    assert FaultyConnection(active_faults, SeededStreams(1).stream("x")).draw_stall_s(900.0) == 0.0


def test_process_that_cannot_crash_only_freezes() -> None:
    faults = FaultConfig(freeze_probability=0.5, freeze_s=(1.0, 2.0), crash_probability=0.5)
    fault_injector = ProcessFaultInjector(
        ActiveFaults(faults), SeededStreams(1).stream("x"), can_crash=False
    )
    injected = [fault for fault in (fault_injector.next_fault() for _ in range(100)) if fault]
    assert injected
    assert not any(fault.is_fatal for fault in injected)
    assert all(1.0 <= fault.freeze_s <= 2.0 for fault in injected)
