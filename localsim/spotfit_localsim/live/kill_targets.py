"""Find processes of a run on the local cloud from outside, and kill them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from spotfit.core.errors import SpotfitError
from spotfit.host import process
from spotfit.ledger.journal import Journal, Ledger
from spotfit.store.factory import open_store
from spotfit.store.retry import RetryPolicy
from spotfit_localsim.random_streams import RandomStream
from spotfit_provisioners.local import processes
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

TargetKind = Literal[
    "worker", "agent", "leader", "node", "fork_server", "driver", "uploader", "all_machines"
]
"""'all_machines': all machines at once, with everything in their memory."""
_WORKER, _FORK_SERVER, _UPLOADER = "spotfit-worker", "spotfit-forksrv", "spotfit-uploads"


class KillTargets:
    """The processes of the run at a URL, on the machines of a local cloud."""

    def __init__(self, cloud_dir: LocalCloudDir, url: str) -> None:
        self._cloud_dir = cloud_dir
        self._url = url
        self._journal: Journal | None = None

    @property
    def has_workers(self) -> bool:
        """Whether a worker process exists."""
        return bool(_processes_named(_WORKER, _machine_pids(self._nodes)))

    def kill(self, kind: TargetKind, stream: RandomStream) -> str | None:
        """Kill one process of that kind; return its description, or None if there is none.

        Machines of a run that has ended are spared: they still clean up.
        """
        nodes = self._nodes
        machines = _machine_pids(nodes)
        match kind:
            case "worker":
                return _kill_one(_processes_named(_WORKER, machines), kind, stream)
            case "fork_server":
                return _kill_one(_processes_named(_FORK_SERVER, machines), kind, stream)
            case "uploader":
                return _kill_one(_processes_named(_UPLOADER, machines), kind, stream)
            case "leader":
                leader = self._leader_pid()
                machines = [pid for pid in machines if pid == leader]
                return None if self._is_over() else _kill_one(machines, kind, stream)
            case "agent":
                return None if self._is_over() else _kill_one(machines, kind, stream)
            case "all_machines":
                if self._is_over():
                    return None
                killed = [text for node in nodes if (text := _reclaim_node(node))]
                return "; ".join(killed) or None
            case _:
                running = [node for node in nodes if _running_machine(node)]
                if not running or self._is_over():
                    return None
                return _reclaim_node(stream.choice(running))

    def latest_checkpoint(self, min_count: int) -> str | None:
        """Return the latest checkpoint of an active run with at least `min_count` checkpoints."""
        try:
            view = self._refreshed_journal().view
        except SpotfitError:
            return None
        # After the end nothing is restored any more.
        if view.fit_end is not None or len(view.checkpoints) < min_count:
            return None
        return view.checkpoints[-1].name

    @property
    def _nodes(self) -> list[LocalNode]:
        return [node for group in self._cloud_dir.groups() for node in group.nodes()]

    def _leader_pid(self) -> int | None:
        """Return the pid of the leader's machine; None if unknown or the store fails."""
        try:
            view = self._refreshed_journal().view
            if view.leader is None or view.run_id is None:
                return None
            leader = view.leader.leader
            # One attempt: a kill that waits for a stalled bucket would come too late.
            store = open_store(self._url, RetryPolicy(max_attempts=1))
            members = Ledger(store, view.run_id, leader).list_members()
            return next((member.pid for member in members if member.agent == leader), None)
        except SpotfitError:  # the store may have injected faults; the caller retries
            return None

    def _is_over(self) -> bool:
        """Return whether the run has ended; True as well if the store fails."""
        try:
            return self._refreshed_journal().view.fit_end is not None
        except SpotfitError:
            return True

    def _refreshed_journal(self) -> Journal:
        if self._journal is None:
            self._journal = Journal(open_store(self._url, RetryPolicy(max_attempts=1)))
        self._journal.catch_up()
        return self._journal


def processes_with_variable(name: str, value: str) -> list[str]:
    """Return processes with that environment variable, as 'pid name'."""
    marked = []
    for entry in Path("/proc").iterdir():
        # A process may exit at any time, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and f"{name}={value}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                marked.append(f"{entry.name} {_process_name(int(entry.name))}")
    return marked


def kill_processes(marked_processes: Iterable[str]) -> None:
    """Kill processes given as 'pid name'."""
    for text in marked_processes:
        process.kill(int(text.partition(" ")[0]))


def _running_machine(node: LocalNode) -> processes.ProcessIdentity | None:
    machine = node.machine()
    return machine if machine is not None and machine.is_alive else None


def _machine_pids(nodes: Iterable[LocalNode]) -> list[int]:
    return sorted(machine.pid for node in nodes if (machine := _running_machine(node)))


def _processes_named(name: str, machines: Iterable[int]) -> list[int]:
    pids = [pid for machine in machines for pid in processes.descendant_pids(machine)]
    return [pid for pid in pids if _process_name(pid) == name]


def _kill_one(pids: list[int], kind: str, stream: RandomStream) -> str | None:
    # Sorted: the choice depends on the seed and not on the order of /proc.
    running = sorted(pid for pid in pids if processes.find_process(pid) is not None)
    if not running:
        return None
    pid = stream.choice(running)
    process.kill(pid, signal.SIGKILL)
    return f"the {kind} {pid}"


def _reclaim_node(node: LocalNode) -> str | None:
    machine = _running_machine(node)
    if machine is None:
        return None
    # Marked first: the provisioner must not report the death as a failure of the agent.
    node.mark_reclaimed("chaos")
    processes.kill_process_tree(machine)
    return f"node {node.group.token}/{node.number} ({machine.pid})"


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "exited"
