"""The CPU seconds of a whole tree of processes, daemons that left their parents included.

Every process of a run inherits one environment variable with a value of its own. A thread looks
through /proc every 40 ms: what carries the tag, or descends from one that does, belongs to the run.
A process is asked for its tag when it is new, because some overwrite their environment later.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TAG = "SPOTFIT_BENCH_RUN"
EVERY_S = 0.04
# A child carries its parent's environment until it calls exec: ask strangers again while young.
YOUNG_S = 1.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/<pid>/stat says of one process."""

    parent: int
    cpu_s: float
    age_from_boot_s: float
    is_dead: bool


def parse_stat(text: str, ticks_per_s: int = TICKS_PER_S) -> Stat:
    """Read one line of /proc/<pid>/stat; the name in it may hold blanks and brackets."""
    fields = text.rpartition(")")[2].split()
    return Stat(
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_per_s,
        age_from_boot_s=int(fields[19]) / ticks_per_s,
        is_dead=fields[0] in "ZX",
    )


def between(series: list[tuple[float, float]], since: float, until: float) -> float:
    """CPU seconds spent between two moments, from (moment, total) samples in order."""
    return total_at(series, until) - total_at(series, since)


def total_at(series: list[tuple[float, float]], moment: float) -> float:
    """The total at a moment, on the straight line between the samples around it."""
    before = (moment, 0.0)
    for sample in series:
        if sample[0] >= moment:
            return _on_the_line(before, sample, moment)
        before = sample
    return before[1]


def _on_the_line(a: tuple[float, float], b: tuple[float, float], moment: float) -> float:
    if b[0] == a[0]:
        return b[1]
    return a[1] + (b[1] - a[1]) * (moment - a[0]) / (b[0] - a[0])


@dataclass
class Tree:
    """Watches one run from `with Tree(tag)` to its end; ends it if the watch is broken off."""

    tag: str
    series: list[tuple[float, float]] = field(default_factory=list)
    _spent: dict[int, float] = field(default_factory=dict)
    _strangers: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Tree":
        self._thread = threading.Thread(target=self._watch, name="tree", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, broken_off: object, *_: object) -> None:
        if broken_off is not None:
            self.end(0.0)
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def cpu_s(self) -> float:
        return sum(self._spent.values())

    @property
    def processes(self) -> int:
        """How many processes the run has had so far."""
        return len(self._spent)

    def alive(self) -> list[int]:
        """The run's processes that are still there."""
        return sorted(pid for pid in _pids() if self._is_ours(pid, _stat(pid)))

    def end(self, grace_s: float) -> int:
        """Wait for the rest to go by itself, then kill it; say how many had to be killed."""
        _wait_until(lambda: not self.alive(), grace_s)
        left = self.alive()
        while stubborn := self.alive():
            for pid in stubborn:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_until(lambda: not self.alive(), 1.0)
        return len(left)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._look()
        self._look()

    def _look(self) -> None:
        present = _pids()
        self._strangers &= present
        for pid in sorted(present - self._strangers):
            stat = _stat(pid)
            if self._is_ours(pid, stat) and stat is not None:
                self._spent[pid] = max(stat.cpu_s, self._spent.get(pid, 0.0))
        self.series.append((time.time(), self.cpu_s))

    def _is_ours(self, pid: int, stat: Stat | None) -> bool:
        if stat is None or stat.is_dead:
            return False
        if pid in self._spent or stat.parent in self._spent or self._carries_tag(pid):
            self._spent.setdefault(pid, 0.0)
            return True
        if _uptime_s() - stat.age_from_boot_s > YOUNG_S:
            self._strangers.add(pid)
        return False

    def _carries_tag(self, pid: int) -> bool:
        wanted = f"{TAG}={self.tag}".encode()
        try:
            return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _pids() -> set[int]:
    names = os.listdir("/proc")  # noqa: PTH208  # 25 times a second: no Path for each
    return {int(name) for name in names if name.isdigit()} - {os.getpid()}


def _stat(pid: int) -> Stat | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, IndexError):
        return None


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _wait_until(done: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not done() and time.monotonic() < deadline:
        time.sleep(EVERY_S)
