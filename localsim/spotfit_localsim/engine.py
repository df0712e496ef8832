"""Virtual time. Events in order; step machines that stop, freeze or die between any two calls.

A step machine runs in a greenlet of its own. Whenever it calls the world (a request to the bucket,
to the cloud, to the wire) the port says `touch`, and there the world may let time pass, freeze the
machine for long, or end its life, while everybody else goes on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import greenlet

from spotfit.control.errands import Done, Inline
from spotfit.host import log
from spotfit.ledger import snapshot
from spotfit.store import abreast
from spotfit_localsim.faults import Hazards

TICK_S = 0.0002
"""What one step costs at least: no world stands still because somebody spins."""
SNAPSHOT_EVERY = 24
"""Entries from one snapshot to the next, so that short runs have some."""


class LivelockError(AssertionError):
    """The world made too many steps without getting anywhere."""


class Timer:
    """Something planned; it can be called off."""

    __slots__ = ("do",)

    def __init__(self, do: Callable[[], None] | None) -> None:
        self.do = do

    def call_off(self) -> None:
        self.do = None


class Engine:
    """The clock of the world and everything that is still to happen."""

    def __init__(self, most_steps: int = 5_000_000) -> None:
        self.now = 0.0
        self.steps = 0
        self._most_steps = most_steps
        self._queue: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._halted = False

    def at(self, when: float, do: Callable[[], None]) -> Timer:
        """Plan something; a moment that has passed means now."""
        timer = Timer(do)
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), timer))
        return timer

    def after(self, seconds: float, do: Callable[[], None]) -> Timer:
        """Plan something for later."""
        return self.at(self.now + seconds, do)

    def halt(self) -> None:
        """The world has come to its end; `run` returns after this event."""
        self._halted = True

    def run(self, until: float) -> None:
        """Let time pass until that moment, until `halt`, or until nothing is left to happen."""
        while self._queue and not self._halted and self._queue[0][0] <= until:
            when, _, timer = heapq.heappop(self._queue)
            if timer.do is None:
                continue
            self.now = when
            self.steps += 1
            if self.steps > self._most_steps:
                raise LivelockError(f"{self.steps} steps by {self.now:.1f} s and no end")
            timer.do()


@dataclass(frozen=True, slots=True)
class Clock:
    """A machine's own monotonic clock: nobody else's, and a little wrong."""

    offset_s: float = 0.0
    rate: float = 1.0

    def read(self, world_s: float) -> float:
        """What it shows at that moment of the world."""
        return self.offset_s + world_s * self.rate

    def lasting(self, own_s: float) -> float:
        """How long the world waits while this clock counts so many seconds."""
        return own_s / self.rate


class Strand:
    """One line of thought of a process: its ticks, or an errand it sent out."""

    __slots__ = ("_do", "body", "timer", "world")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self.body: greenlet.greenlet | None = None
        self.world: greenlet.greenlet | None = None
        self.timer: Timer | None = None

    def go_on(self) -> None:
        """Continue until it lets time pass again. Called by the world only."""
        self.world = greenlet.getcurrent()
        if self.body is None:
            self.body = greenlet.greenlet(self._do)
        self.body.switch()

    def pause(self) -> None:
        """Let the world go on; returns when it says `go_on`."""
        assert self.world is not None
        self.world.switch()

    def call_off(self) -> None:
        """It will not go on."""
        if self.timer is not None:
            self.timer.call_off()

    def end(self) -> None:
        """Unwind it from wherever it stands. Called by the world only."""
        if self.body:
            self.world = greenlet.getcurrent()
            self.body.throw(greenlet.GreenletExit)


Tick = Callable[[float], float | None]
"""tick(now) says at which moment of the machine's own clock to be woken; None: it is done."""


class Process:
    """A step machine in the world."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        clock: Clock,
        hazards: Hazards,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """`ended` is told once: of the error that ended it, or None for the other ways to go."""
        self.name = name
        self.engine = engine
        self.alive = False
        self._clock = clock
        self._hazards = hazards
        self._ended = ended
        self._frozen_until = 0.0
        self._idle = False
        self._woken = False
        self._main: Strand | None = None
        self._strands: dict[Strand, None] = {}
        self._running: Strand | None = None

    @property
    def now(self) -> float:
        """What this machine's clock shows."""
        return self._clock.read(self.engine.now)

    def start(self, tick: Tick) -> None:
        """Begin to live; the first tick comes at once."""
        self.alive = True
        self._main = Strand(lambda: self._live(tick))
        self._begin(self._main)

    def send_out(self, errand: Callable[[], None]) -> None:
        """Do something beside the ticks, as a thread would."""
        self._begin(Strand(lambda: self._run_errand(errand)))

    def wake(self) -> None:
        """Something came: tick again, at once if idle, else right after this tick."""
        self._woken = True
        if self._idle and self._main is not None and self._main.timer is not None:
            self._idle = False
            self._main.timer.call_off()
            self._plan(self._main, TICK_S)

    def freeze(self, seconds: float) -> None:
        """Stop for so long, wherever it is; what is sent to it waits."""
        self._frozen_until = max(self._frozen_until, self.engine.now + seconds)

    def kill(self) -> None:
        """End its life wherever it is; all it knew is lost."""
        if self.alive:
            self._end(None)

    def abandon(self) -> None:
        """The world is over: forget it, and tell nobody."""
        self.alive = False
        for strand in self._strands:
            strand.end()
        self._strands = {}

    def touch(self, latency_s: float = 0.0) -> None:
        """A call to the world passes here: time goes by, or the process freezes or dies."""
        if not self.alive:
            raise greenlet.GreenletExit
        hazard = self._hazards.next()
        if hazard is not None:
            if hazard.kills:
                self.engine.after(0.0, self.kill)
                latency_s = max(latency_s, TICK_S)
            self.freeze(hazard.freezes_s)
            latency_s = max(latency_s, hazard.freezes_s)
        if latency_s > 0:
            strand = self._running
            assert strand is not None
            self._plan(strand, latency_s)
            strand.pause()

    def _live(self, tick: Tick) -> None:
        try:
            while True:
                self._woken = False
                again = tick(self.now)
                if again is None:
                    self._end(None)
                    return
                self._rest(again)
        except Exception as error:  # noqa: BLE001  # whatever a step machine raises is its end, and told
            self._end(error)

    def _rest(self, until: float) -> None:
        assert self._main is not None
        wait_s = 0.0 if self._woken else self._clock.lasting(until - self.now)
        self._idle = not self._woken
        self._plan(self._main, max(TICK_S, wait_s))
        self._main.pause()

    def _run_errand(self, errand: Callable[[], None]) -> None:
        errand()
        if self._running is not None:
            self._strands.pop(self._running)

    def _begin(self, strand: Strand) -> None:
        self._strands[strand] = None
        self._plan(strand, 0.0)

    def _plan(self, strand: Strand, wait_s: float) -> None:
        strand.timer = self.engine.after(wait_s, lambda: self._go_on(strand))

    def _go_on(self, strand: Strand) -> None:
        if self.engine.now < self._frozen_until:
            self._plan(strand, self._frozen_until - self.engine.now)
            return
        if strand is self._main:
            self._idle = False
        self._running = strand
        strand.go_on()

    def _end(self, error: BaseException | None) -> None:
        self.alive = False
        for strand in self._strands:
            strand.call_off()
        self.engine.after(0.0, lambda: self._bury(error))

    def _bury(self, error: BaseException | None) -> None:
        for strand in self._strands:
            strand.end()
        self._strands = {}
        self._ended(error)


class OneByOne:
    """Stands in for a pool of threads: a world has no threads, or it would not be repeatable."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> OneByOne:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, do: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Everything in order, at once."""
        return [do(item) for item in items]


@contextmanager
def swapped(module: ModuleType, name: str, stand_in: object) -> Iterator[None]:
    """The module has something else under that name meanwhile."""
    before = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def small_world() -> Iterator[None]:
    """Production code reads one by one, writes snapshots often, and logs nothing, meanwhile.

    The story tells what happened, by the world's clock.
    """
    with (
        swapped(abreast, "ThreadPoolExecutor", OneByOne),
        swapped(snapshot, "EVERY", SNAPSHOT_EVERY),
        swapped(log, "_tell", _nothing),
    ):
        yield


def _nothing(_level: str, _event: str, _facts: dict[str, Any]) -> None:
    return


class Sidelong:
    """Errands that run beside the ticks of their process, as they do on threads."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._under_way: dict[str, list[Done]] = {}

    def run(self, name: str, job: Callable[[], Any]) -> Done | None:
        answer = self._under_way.get(name)
        if answer is None:
            self._under_way[name] = []
            self._process.send_out(lambda: self._do(name, job))
            return None
        if not answer:
            return None
        return self._under_way.pop(name)[0]

    def send(self, name: str, job: Callable[[], Any]) -> None:
        answer = self._under_way.get(name)
        if answer is None or answer:
            self._under_way[name] = []
            self._process.send_out(lambda: self._do(name, job))

    def _do(self, name: str, job: Callable[[], Any]) -> None:
        done = Inline().run(name, job)
        assert done is not None, "whoever does it at once has an answer at once"
        self._under_way[name].append(done)
        self._process.wake()
