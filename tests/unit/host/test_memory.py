"""A kill for lack of memory is recognized from the kernel's counters, in containers and outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.host.memory import (
    MemoryMonitor,
    MemoryUsage,
    read_machine_memory,
    read_memory_usage,
    read_oom_kill_count,
)

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def machine(total_gib: int, available_gib: int) -> dict[str, str]:
    kib = [f"{gib * 2**20} kB" for gib in (total_gib, available_gib)]
    return {"proc/meminfo": f"MemTotal: {kib[0]}\nMemFree: 1 kB\nMemAvailable: {kib[1]}\n"}


def container(used_gib: float, limit: str) -> dict[str, str]:
    return {
        "sys/fs/cgroup/memory.current": f"{int(used_gib * GIB)}\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }


def test_the_limit_of_a_container_precedes_that_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, machine(64, 32) | container(21, str(32 * GIB)))
    assert read_memory_usage(tmp_path) == MemoryUsage(20 * GIB, 32 * GIB), "without cached files"


def test_the_memory_of_the_machine_includes_that_beyond_the_limit(tmp_path: Path) -> None:
    write(tmp_path, machine(64, 32) | container(21, str(32 * GIB)))
    assert read_machine_memory(tmp_path) == 64 * GIB
    assert read_machine_memory(tmp_path / "not-linux") is None


@pytest.mark.parametrize("limit", ["max", str(2**63)])
def test_a_container_without_limit_has_the_memory_of_the_machine(
    tmp_path: Path, limit: str
) -> None:
    write(tmp_path, machine(64, 24) | container(21, limit))
    assert read_memory_usage(tmp_path) == MemoryUsage(40 * GIB, 64 * GIB)


def test_a_container_of_version_1_is_read(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/"
    write(
        tmp_path,
        machine(64, 24)
        | {f"{folder}memory.usage_in_bytes": "7", f"{folder}memory.limit_in_bytes": "9"}
        | {f"{folder}memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"},
    )
    assert read_memory_usage(tmp_path) == MemoryUsage(7, 9)
    assert read_oom_kill_count(tmp_path) == 2


def test_an_unknown_system_has_no_values(tmp_path: Path) -> None:
    assert read_memory_usage(tmp_path) is None
    assert read_oom_kill_count(tmp_path) is None
    monitor = MemoryMonitor(tmp_path)
    monitor.sample()
    assert monitor.explain_kill() == ""


def test_a_kill_by_the_kernel_is_explained_with_the_highest_use(tmp_path: Path) -> None:
    monitor = MemoryMonitor(tmp_path)
    write(tmp_path, container(32.2, str(32 * GIB)) | {"sys/fs/cgroup/memory.events": "oom_kill 4"})
    monitor.sample()
    write(tmp_path, container(5, str(32 * GIB)) | {"sys/fs/cgroup/memory.events": "oom_kill 5"})
    expected = ", by the kernel for lack of memory: 31.2 of 32.0 GiB used"
    assert monitor.explain_kill() == expected
    assert monitor.explain_kill() == expected, "the kernel may have killed several processes"


def test_a_kill_while_memory_was_nearly_used_up_is_probably_explained(tmp_path: Path) -> None:
    monitor = MemoryMonitor(tmp_path)
    write(tmp_path, machine(32, 1))
    monitor.sample()
    write(tmp_path, machine(32, 30))
    monitor.sample()
    assert monitor.explain_kill() == ", probably for lack of memory: 31.0 of 32.0 GiB used"


def test_a_kill_with_free_memory_is_not_explained(tmp_path: Path) -> None:
    monitor = MemoryMonitor(tmp_path)
    write(tmp_path, machine(32, 16) | {"proc/vmstat": "oom_kill 7\n"})
    monitor.sample()
    assert monitor.explain_kill() == ""
