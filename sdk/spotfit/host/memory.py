"""Memory of this container or machine: use, limit and processes killed by the kernel. Linux only.

In a container the limit is that of its control group; cgroups of version 1 and 2 are read.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - there is no other name for it

# Above this share of the limit, a SIGKILL that spotfit has not sent is probably due to memory.
_NEARLY_FULL = 0.9


class MemoryUsage(NamedTuple):
    """Memory that cannot be reclaimed, and the limit of the container or machine."""

    used_bytes: int
    limit_bytes: int


def read_memory_usage(root: Path = Path("/")) -> MemoryUsage | None:
    """Return the memory in use and the limit; None if the system does not tell it.

    Without a limit of its own, a container shares the memory of the machine. `root` is for tests.
    """
    machine = _read_machine_usage(root)
    cgroup = root / "sys/fs/cgroup"
    # Of version 2 or 1, as a container sees its own group.
    for folder, used, limit in (
        (cgroup, "memory.current", "memory.max"),
        (cgroup / "memory", "memory.usage_in_bytes", "memory.limit_in_bytes"),
    ):
        used_bytes, limit_bytes = _read_number(folder / used), _read_number(folder / limit)
        if used_bytes is None or limit_bytes is None:
            continue
        # Version 1 has a huge number in place of "max".
        if machine is None or limit_bytes < machine.limit_bytes:
            cache_bytes = _read_fields(folder / "memory.stat").get("inactive_file", 0)
            return MemoryUsage(max(0, used_bytes - cache_bytes), limit_bytes)
    return machine


def read_machine_memory(root: Path = Path("/")) -> int | None:
    """Return the memory of the machine in bytes, beyond the limit of a container; None if unknown.

    `root` is for tests.
    """
    machine = _read_machine_usage(root)
    return None if machine is None else machine.limit_bytes


def read_oom_kill_count(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory; None if unknown.

    Counts those of this container, else of the machine. `root` is for tests.
    """
    for path in (
        "sys/fs/cgroup/memory.events",
        "sys/fs/cgroup/memory/memory.oom_control",
        "proc/vmstat",
    ):
        count = _read_fields(root / path).get("oom_kill")
        if count is not None:
            return count
    return None


class MemoryMonitor:
    """Remembers the memory use of the last seconds, to explain why a process was killed."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        # The kernel has freed the memory when a kill is noticed, hence the earlier samples.
        self._samples: deque[tuple[MemoryUsage | None, int | None]] = deque(maxlen=10)

    def sample(self) -> None:
        """Record the present use; called about once a second while processes run."""
        self._samples.append((read_memory_usage(self._root), read_oom_kill_count(self._root)))

    def explain_kill(self) -> str:
        """Return why a process was probably killed that spotfit has not killed; '' if unknown.

        For example ", probably for lack of memory: 31.2 of 32.0 GiB used".
        """
        usages = [usage for usage, _ in self._samples if usage is not None]
        peak = max(usages, key=lambda usage: usage.used_bytes / usage.limit_bytes, default=None)
        before = self._samples[0][1] if self._samples else None
        now = read_oom_kill_count(self._root)
        was_oom = before is not None and now is not None and now > before
        is_full = peak is not None and peak.used_bytes > _NEARLY_FULL * peak.limit_bytes
        if not was_oom and not is_full:
            return ""
        cause = "by the kernel for lack of memory" if was_oom else "probably for lack of memory"
        if peak is None:
            return f", {cause}"
        used_gib, limit_gib = (size_bytes / 2**30 for size_bytes in peak)
        return f", {cause}: {used_gib:.1f} of {limit_gib:.1f} GiB used"


def _read_machine_usage(root: Path) -> MemoryUsage | None:
    fields = _read_fields(root / "proc/meminfo")
    if not {"MemTotal:", "MemAvailable:"} <= fields.keys():
        return None
    total_bytes, free_bytes = fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024
    return MemoryUsage(total_bytes - free_bytes, total_bytes)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def _read_fields(path: Path) -> dict[str, int]:
    """Parse lines such as "oom_kill 3" or "MemTotal: 16 kB"; {} for a file that does not exist."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split()[:2] for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
