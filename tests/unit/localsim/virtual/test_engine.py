"""Virtual time, and step machines that stop, freeze or die wherever they call the world."""

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


class Body:
    """A process whose tick is given, and what became of it."""

    def __init__(
        self, engine: Engine, faults: FaultConfig = NO_FAULTS, clock: SimClock | None = None
    ) -> None:
        self.ends: list[BaseException | None] = []
        hazards = ProcessFaultInjector(ActiveFaults(faults), SeededStreams(1).stream("body"))
        self.process = SimProcess(
            engine,
            "body",
            clock=clock or SimClock(),
            fault_injector=hazards,
            on_exit=self.ends.append,
        )


def test_events_come_in_order_and_those_of_one_moment_as_they_were_planned() -> None:
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


def test_a_tick_is_woken_when_it_asked_to_be_by_its_own_clock() -> None:
    engine, seen = Engine(), []
    body = Body(engine, clock=SimClock(offset_s=1000.0, rate=2.0))

    def tick(now: float) -> float | None:
        seen.append((round(engine.now, 3), round(now, 3)))
        return now + 4.0 if len(seen) < 3 else None

    body.process.start(tick)
    engine.run(until=100.0)
    assert seen == [(0.0, 1000.0), (2.0, 1004.0), (4.0, 1008.0)]
    assert body.ends == [None]


def test_time_passes_within_a_tick_and_a_wake_meanwhile_is_not_lost() -> None:
    engine, seen = Engine(), []
    body = Body(engine)

    def tick(now: float) -> float | None:
        body.process.simulate_call(1.0)
        seen.append(round(engine.now, 2))
        return now + 50.0

    body.process.start(tick)
    engine.schedule_after(0.5, body.process.wake)
    engine.run(until=10.0)
    assert seen == [1.0, 2.0]


def test_frozen_process_resumes_where_it_stopped() -> None:
    engine, seen = Engine(), []
    body = Body(engine)

    def tick(_now: float) -> float | None:
        seen.append("before")
        body.process.simulate_call(1.0)
        seen.append(f"after {engine.now:.0f}")
        return None

    body.process.start(tick)
    engine.schedule_after(0.5, lambda: body.process.freeze(20.0))
    engine.run(until=100.0)
    assert seen == ["before", "after 20"] or seen == ["before", "after 21"]


def test_a_killed_process_does_nothing_more_not_even_while_it_unwinds() -> None:
    engine, seen = Engine(), []
    body = Body(engine)

    def tick(now: float) -> float | None:
        try:
            body.process.simulate_call(1.0)
            seen.append("went on")
        finally:
            body.process.simulate_call(1.0)
            seen.append("cleaned up in the bucket")
        return now

    body.process.start(tick)
    engine.schedule_after(0.5, body.process.kill)
    engine.run(until=100.0)
    assert seen == []
    assert body.ends == [None]


def test_exception_in_a_tick_ends_the_process() -> None:
    engine = Engine()
    body = Body(engine)
    body.process.start(lambda _: 1 / 0)
    engine.run(until=1.0)
    assert [type(end) for end in body.ends] == [ZeroDivisionError]


def test_faults_are_injected_between_any_two_calls() -> None:
    deaths = set()
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
        process.start(calling(process, calls))
        engine.run(until=1000.0)
        deaths.add(len(calls))
    assert {1, 2, 3, 4, 5} <= deaths


def calling(process: SimProcess, calls: list[int]) -> Callable[[float], float | None]:
    def tick(now: float) -> float | None:
        calls.append(1)
        process.simulate_call(0.1)
        return now + 0.1

    return tick


def test_background_call_runs_concurrently_and_wakes_the_process() -> None:
    engine, seen = Engine(), []
    body = Body(engine)
    errands = SimBackgroundCalls(body.process)

    def slow() -> str:
        body.process.simulate_call(3.0)
        return "done"

    def tick(now: float) -> float | None:
        done = errands.run("slow", slow)
        seen.append((round(engine.now), done.value if done else None))
        return None if done else now + 2.0

    body.process.start(tick)
    engine.run(until=100.0)
    assert seen == [(0, None), (2, None), (3, "done")]


def test_background_calls_end_with_their_process() -> None:
    engine, seen = Engine(), []
    body = Body(engine)
    errands = SimBackgroundCalls(body.process)

    def slow() -> None:
        body.process.simulate_call(3.0)
        seen.append("errand")

    def tick(now: float) -> float | None:
        errands.send("slow", slow)
        return now + 100.0

    body.process.start(tick)
    engine.schedule_after(1.0, body.process.kill)
    engine.run(until=100.0)
    assert seen == []


def test_simulation_patches_are_undone() -> None:
    before = vars(transfer)["ThreadPoolExecutor"], journal.VIEW_CACHE_INTERVAL
    with simulation_patches():
        with vars(transfer)["ThreadPoolExecutor"](2) as readers:
            assert list(readers.map(abs, [-1, -2])) == [1, 2]
        assert before[1] > journal.VIEW_CACHE_INTERVAL
    assert before == (vars(transfer)["ThreadPoolExecutor"], journal.VIEW_CACHE_INTERVAL)
