"""Crash points: kill a process, or fill its disk, at the n-th call of a chosen method.

Random kills hit short windows rarely; a crash point hits one exactly, for example between the
writing of a snapshot and its publication.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from spotfit.host import env
from spotfit.host.system import wall_ms

CHAOS_DIR_ENV = "SPOTFIT_CHAOS"
"""Environment variable of every process of a chaos run: its directory."""

ProcessKind = Literal["worker", "agent"]
CrashEffect = Literal["kill", "disk_full"]


class CrashPoint(NamedTuple):
    """A place in the code where a process can be killed."""

    process: ProcessKind
    target: str
    """module:Class.method"""
    when: Literal["before", "after"] = "before"
    argument_filter: str = ""
    """Only calls with this text in an argument count."""
    can_fill_disk: bool = False
    """Whether the method writes, so that it can fail with ENOSPC."""


_COMMIT = '"checkpoint_committed"'

CRASH_POINTS: Mapping[str, CrashPoint] = {
    "segment_create": CrashPoint(
        "worker", "spotfit.checkpoint.shm_segment:ShmSegment.create", can_fill_disk=True
    ),
    "snapshot_started": CrashPoint(
        "worker", "spotfit.checkpoint.shm_segment:ShmSegment.invalidate", "after"
    ),
    "snapshot_publish": CrashPoint(
        "worker", "spotfit.checkpoint.shm_segment:ShmSegment.publish", can_fill_disk=True
    ),
    "snapshot_published": CrashPoint(
        "worker", "spotfit.checkpoint.shm_segment:ShmSegment.publish", "after"
    ),
    "snapshot_submitted": CrashPoint(
        "worker", "spotfit.worker.agent_snapshots:AgentSnapshotChannel.submit", "after"
    ),
    "snapshot_message": CrashPoint(
        "worker", "spotfit.worker.agent_snapshots:AgentSnapshotChannel.on_message"
    ),
    "open_in_memory": CrashPoint(
        "worker", "spotfit.worker.agent_snapshots:AgentSnapshotChannel.open_in_memory"
    ),
    "memory_read": CrashPoint(
        "worker", "spotfit.checkpoint.reader:MemoryShardReader.fetch", "after"
    ),
    "peer_read": CrashPoint("worker", "spotfit.checkpoint.peer_store:PeerShardReader.fetch"),
    "peer_read_done": CrashPoint(
        "worker", "spotfit.checkpoint.peer_store:PeerShardReader.fetch", "after"
    ),
    "checkpoint_read": CrashPoint(
        "worker", "spotfit.checkpoint.reader:StoreShardReader.fetch", "after"
    ),
    "snapshot_registered": CrashPoint(
        "agent", "spotfit.agent.snapshot_registry:SnapshotRegistry.add"
    ),
    "upload_created": CrashPoint(
        "agent", "spotfit.agent.snapshot_registry:SnapshotRegistry.make_upload"
    ),
    "upload_created_done": CrashPoint(
        "agent", "spotfit.agent.snapshot_registry:SnapshotRegistry.make_upload", "after"
    ),
    "old_snapshots_deleted": CrashPoint(
        "agent", "spotfit.agent.snapshot_registry:SnapshotRegistry._delete_other_rounds"
    ),
    "replica_send": CrashPoint("agent", "spotfit.checkpoint.peer_store:PeerStore._send_replica"),
    "replica_sent": CrashPoint(
        "agent", "spotfit.checkpoint.peer_store:PeerStore._send_replica", "after"
    ),
    "replica_store": CrashPoint(
        "agent", "spotfit.checkpoint.peer_store:PeerStore._store_replica", can_fill_disk=True
    ),
    "replica_stored": CrashPoint(
        "agent", "spotfit.checkpoint.peer_store:PeerStore._store_replica", "after"
    ),
    "shard_requested": CrashPoint(
        "agent", "spotfit.checkpoint.peer_store:PeerStore._read_bytes", "after"
    ),
    "memory_scanned": CrashPoint(
        "agent", "spotfit.agent.snapshot_registry:SnapshotRegistry.scan_shards", "after"
    ),
    "upload_finished": CrashPoint(
        "agent", "spotfit.agent.worker_pool:ProcessWorkerPool._on_upload_finished"
    ),
    "commit_decided": CrashPoint(
        "agent", "spotfit.ledger.journal:Ledger.create_entry", "before", _COMMIT
    ),
    "commit_written": CrashPoint(
        "agent", "spotfit.ledger.journal:Ledger.create_entry", "after", _COMMIT
    ),
}


_armed_processes: set[ProcessKind] = set()
"""Process kinds that were armed: a process may serve several nodes, but methods are wrapped once.
"""


class InjectedCrash(msgspec.Struct, frozen=True):
    """A crash at the n-th call of a crash point, in the first process that reaches it."""

    crash_point: str
    nth: int = 1
    effect: CrashEffect = "kill"


def arm(process: ProcessKind) -> None:
    """Wrap the crash points of this process kind, if this process belongs to a chaos run."""
    folder = env.lookup(CHAOS_DIR_ENV)
    # Outside of a chaos run nothing is wrapped.
    if process in _armed_processes or folder is None:
        return
    _armed_processes.add(process)
    # In a fixed order: two crashes of one method are wrapped around each other.
    for path in sorted(Path(folder, "crashes").glob("*.crash")):
        crash = msgspec.json.decode(path.read_bytes(), type=InjectedCrash)
        crash_point = CRASH_POINTS[crash.crash_point]
        if crash_point.process == process:
            _wrap(crash_point, functools.partial(_trigger, crash, path.with_suffix(".triggered")))


def write_injected_crashes(crashes: tuple[InjectedCrash, ...], folder: Path) -> None:
    """Write the crashes into the run's directory, where its processes find them."""
    (folder / "crashes").mkdir()
    for index, crash in enumerate(crashes):
        (folder / "crashes" / f"{index}.crash").write_bytes(msgspec.json.encode(crash))


def triggered_crashes(folder: Path) -> list[tuple[int, str]]:
    """Return the triggered crashes: milliseconds since 1970, and a description."""
    triggered = []
    for path in sorted((folder / "crashes").glob("*.triggered")):
        crash = msgspec.json.decode(path.with_suffix(".crash").read_bytes(), type=InjectedCrash)
        time_ms, _, pid = path.read_text().partition(" ")
        triggered.append((int(time_ms or 0), f"{crash.effect} at {crash.crash_point}: pid {pid}"))
    return triggered


def resolve_target(crash_point: CrashPoint) -> tuple[Any, str]:
    """Return the class and the method name. Raises `AttributeError` if there is none."""
    module, _, name = crash_point.target.partition(":")
    owner, _, method = name.partition(".")
    cls = getattr(importlib.import_module(module), owner)
    # Raises for a renamed method, which would otherwise never crash.
    getattr(cls, method)
    return cls, method


def _wrap(crash_point: CrashPoint, trigger: Callable[[int], None]) -> None:
    owner, name = resolve_target(crash_point)
    # Not getattr: it would bind a class method to its class.
    original = owner.__dict__[name]
    function = original.__func__ if isinstance(original, classmethod) else original
    calls = 0

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        # Only bytes are searched: the filter selects encoded journal entries.
        texts = [one.decode(errors="replace") for one in args if isinstance(one, bytes)]
        counts = crash_point.argument_filter in " ".join(texts)
        calls += counts
        if counts and crash_point.when == "before":
            trigger(calls)
        result = function(*args, **kwargs)
        if counts and crash_point.when == "after":
            trigger(calls)
        return result

    setattr(owner, name, classmethod(wrapper) if isinstance(original, classmethod) else wrapper)


def _trigger(crash: InjectedCrash, triggered_path: Path, calls: int) -> None:
    if calls != crash.nth:
        return
    # O_EXCL: of several processes that reach the crash point, one crashes.
    try:
        fd = os.open(triggered_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return  # another process triggered it
    os.write(fd, f"{wall_ms()} {os.getpid()}".encode())
    os.close(fd)
    if crash.effect == "disk_full":
        raise OSError(errno.ENOSPC, "No space left on device (injected)")
    # SIGKILL instead of os._exit: nothing of the process may run any more, as in a preemption.
    os.kill(os.getpid(), signal.SIGKILL)
