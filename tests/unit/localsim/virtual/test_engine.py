"""Virtual time, and processes that exit, freeze or crash at any simulated call."""

from collections.abc import Callable

import pytest

from spotfit.ledger import journal
from spotfit.store import transfer
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.engine import (
    Engine,
    LivelockError,
    SimBackgroundCalls,
    SimClock,
    SimProcess,
    simulation_patches,
)
from spotfit_localsim.virtual.faults import (
    NO_FAULTS,
    ActiveFaults,
    FaultConfig,
    ProcessFaultInjector,
)


class RecordedProcess:
    """A process with a given tick function that records its end."""

    def __init__(
        self, engine: Engine, faults: FaultConfig = NO_FAULTS, clock: SimClock | None = None
    ) -> None:
        self.ends: list[BaseException | None] = []
        fault_injector = ProcessFaultInjector(ActiveFaults(faults), SeededStreams(1).stream("body"))
        self.process = SimProcess(
            engine,
            "body",
            clock=clock or SimClock(),
            fault_injector=fault_injector,
            on_exit=self.ends.append,
        )


def test_events_run_in_time_order_and_simultaneous_events_in_scheduling_order() -> None:
    engine, seen = Engine(), []
    engine.schedule_after(2.0, lambda: seen.append("late"))
    engine.schedule_after(1.0, lambda: seen.append("first"))
    engine.schedule_after(1.0, lambda: seen.append("second"))
    engine.schedule_after(1.5, lambda: seen.append("never")).cancel()
    engine.run(until=10.0)
    assert seen == ["first", "second", "late"]
    assert engine.now == 2.0


def test_livelock_is_detected() -> None:
    engine = Engine(max_events=100)

    def again() -> None:
        engine.schedule_after(0.0, again)

    again()
    with pytest.raises(LivelockError):
        engine.run(until=1.0)


def test_tick_runs_at_the_requested_time_of_its_process_clock() -> None:
    engine, seen = Engine(), []
    recorded = RecordedProcess(engine, clock=SimClock(offset_s=1000.0, rate=2.0))

    def tick(now: float) -> float | None:
        seen.append((round(engine.now, 3), round(now, 3)))
        return now + 4.0 if len(seen) < 3 else None

    recorded.process.start(tick)
    engine.run(until=100.0)
    assert seen == [(0.0, 1000.0), (2.0, 1004.0), (4.0, 1008.0)]
    assert recorded.ends == [None]


def test_wake_during_a_tick_causes_another_tick() -> None:
    engine, seen = Engine(), []
    recorded = RecordedProcess(engine)

    def tick(now: float) -> float | None:
        recorded.process.simulate_call(1.0)
        seen.append(round(engine.now, 2))
        return now + 50.0

    recorded.process.start(tick)
    engine.schedule_after(0.5, recorded.process.wake)
    engine.run(until=10.0)
    assert seen == [1.0, 2.0]


def test_frozen_process_resumes_where_it_stopped() -> None:
    engine, seen = Engine(), []
    recorded = RecordedProcess(engine)

    def tick(_now: float) -> float | None:
        seen.append("before")
        recorded.process.simulate_call(1.0)
        seen.append(f"after {engine.now:.0f}")
        return None

    recorded.process.start(tick)
    engine.schedule_after(0.5, lambda: recorded.process.freeze(20.0))
    engine.run(until=100.0)
    assert seen == ["before", "after 20"] or seen == ["before", "after 21"]


def test_killed_process_has_no_effects_in_finally_blocks() -> None:
    engine, seen = Engine(), []
    recorded = RecordedProcess(engine)

    def tick(now: float) -> float | None:
        try:
            recorded.process.simulate_call(1.0)
            seen.append("continued")
        finally:
            recorded.process.simulate_call(1.0)
            seen.append("cleaned up")
        return now

    recorded.process.start(tick)
    engine.schedule_after(0.5, recorded.process.kill)
    engine.run(until=100.0)
    assert seen == []
    assert recorded.ends == [None]


def test_exception_in_a_tick_ends_the_process() -> None:
    engine = Engine()
    recorded = RecordedProcess(engine)
    recorded.process.start(lambda _: 1 / 0)
    engine.run(until=1.0)
    assert [type(end) for end in recorded.ends] == [ZeroDivisionError]


def test_faults_are_injected_between_any_two_calls() -> None:
    calls_before_crash = set()
    for seed in range(40):
        engine, calls = Engine(), list[int]()
        process = SimProcess(
            engine,
            "body",
            clock=SimClock(),
            fault_injector=ProcessFaultInjector(
                ActiveFaults(FaultConfig(crash_probability=0.1)), SeededStreams(seed).stream("x")
            ),
            on_exit=lambda _: None,
        )
        process.start(tick_that_counts(process, calls))
        engine.run(until=1000.0)
        calls_before_crash.add(len(calls))
    assert {1, 2, 3, 4, 5} <= calls_before_crash


def tick_that_counts(process: SimProcess, calls: list[int]) -> Callable[[float], float | None]:
    def tick(now: float) -> float | None:
        calls.append(1)
        process.simulate_call(0.1)
        return now + 0.1

    return tick


def test_background_call_runs_concurrently_and_wakes_the_process() -> None:
    engine, seen = Engine(), []
    recorded = RecordedProcess(engine)
    background_calls = SimBackgroundCalls(recorded.process)

    def slow() -> str:
        recorded.process.simulate_call(3.0)
        return "done"

    def tick(now: float) -> float | None:
        done = background_calls.run("slow", slow)
        seen.append((round(engine.now), done.value if done else None))
        return None if done else now + 2.0

    recorded.process.start(tick)
    engine.run(until=100.0)
    assert seen == [(0, None), (2, None), (3, "done")]


def test_background_calls_end_with_their_process() -> None:
    engine, seen = Engine(), []
    recorded = RecordedProcess(engine)
    background_calls = SimBackgroundCalls(recorded.process)

    def slow() -> None:
        recorded.process.simulate_call(3.0)
        seen.append("completed")

    def tick(now: float) -> float | None:
        background_calls.send("slow", slow)
        return now + 100.0

    recorded.process.start(tick)
    engine.schedule_after(1.0, recorded.process.kill)
    engine.run(until=100.0)
    assert seen == []


def test_simulation_patches_are_undone() -> None:
    before = vars(transfer)["ThreadPoolExecutor"], journal.VIEW_CACHE_INTERVAL
    with simulation_patches():
        with vars(transfer)["ThreadPoolExecutor"](2) as readers:
            assert list(readers.map(abs, [-1, -2])) == [1, 2]
        assert before[1] > journal.VIEW_CACHE_INTERVAL
    assert before == (vars(transfer)["ThreadPoolExecutor"], journal.VIEW_CACHE_INTERVAL)
