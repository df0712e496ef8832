"""The CPU seconds of a process tree, including daemons with another parent.

Every process of a run inherits an environment variable with a unique tag. A thread scans /proc
every 40 ms: processes with the tag, and their descendants, belong to the run. The tag is read when
a process is new, because some overwrite their environment later.
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
SAMPLE_INTERVAL_S = 0.04
# A child has its parent's environment until it calls exec: young processes are checked again.
EXEC_GRACE_S = 1.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of /proc/<pid>/stat."""

    parent: int
    cpu_s: float
    age_from_boot_s: float
    is_dead: bool


def parse_stat(text: str, ticks_per_s: int = TICKS_PER_S) -> Stat:
    """Parse /proc/<pid>/stat; the process name may contain spaces and parentheses."""
    fields = text.rpartition(")")[2].split()
    return Stat(
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_per_s,
        age_from_boot_s=int(fields[19]) / ticks_per_s,
        is_dead=fields[0] in "ZX",
    )


def between(series: list[tuple[float, float]], since: float, until: float) -> float:
    """Return the CPU seconds between two times, from ordered (time, total) samples."""
    return total_at(series, until) - total_at(series, since)


def total_at(series: list[tuple[float, float]], moment: float) -> float:
    """Return the total at a time, by linear interpolation."""
    before = (moment, 0.0)
    for sample in series:
        if sample[0] >= moment:
            return _interpolate(before, sample, moment)
        before = sample
    return before[1]


def _interpolate(a: tuple[float, float], b: tuple[float, float], moment: float) -> float:
    if b[0] == a[0]:
        return b[1]
    return a[1] + (b[1] - a[1]) * (moment - a[0]) / (b[0] - a[0])


@dataclass
class ProcessTree:
    """Samples the processes of one run inside the context; kills them on an exception."""

    tag: str
    series: list[tuple[float, float]] = field(default_factory=list)
    _cpu_s_by_pid: dict[int, float] = field(default_factory=dict)
    _foreign: set[int] = field(default_factory=set)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "ProcessTree":
        self._thread = threading.Thread(target=self._sample_until_stopped, name="tree", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        if exception_type is not None:
            self.end(0.0)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s_by_pid.values())

    @property
    def processes(self) -> int:
        """Number of processes of the run so far."""
        return len(self._cpu_s_by_pid)

    def alive(self) -> list[int]:
        """Return the running processes of the run."""
        return sorted(pid for pid in _pids() if self._belongs(pid, _stat(pid)))

    def end(self, grace_s: float) -> int:
        """Wait for all processes to exit, then kill the others; return how many were killed."""
        _wait_until(lambda: not self.alive(), grace_s)
        left = self.alive()
        while remaining := self.alive():
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_until(lambda: not self.alive(), 1.0)
        return len(left)

    def _sample_until_stopped(self) -> None:
        while not self._stopped.wait(SAMPLE_INTERVAL_S):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        present = _pids()
        self._foreign &= present
        for pid in sorted(present - self._foreign):
            stat = _stat(pid)
            if self._belongs(pid, stat) and stat is not None:
                self._cpu_s_by_pid[pid] = max(stat.cpu_s, self._cpu_s_by_pid.get(pid, 0.0))
        self.series.append((time.time(), self.cpu_s))

    def _belongs(self, pid: int, stat: Stat | None) -> bool:
        if stat is None or stat.is_dead:
            return False
        if pid in self._cpu_s_by_pid or stat.parent in self._cpu_s_by_pid or self._carries_tag(pid):
            self._cpu_s_by_pid.setdefault(pid, 0.0)
            return True
        if _uptime_s() - stat.age_from_boot_s > EXEC_GRACE_S:
            self._foreign.add(pid)
        return False

    def _carries_tag(self, pid: int) -> bool:
        wanted = f"{TAG}={self.tag}".encode()
        try:
            return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _pids() -> set[int]:
    names = os.listdir("/proc")  # noqa: PTH208  # 25 times per second
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
        time.sleep(SAMPLE_INTERVAL_S)
