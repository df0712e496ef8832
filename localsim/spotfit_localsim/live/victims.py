"""Who can be killed: the processes of a run, found from outside."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from spotfit.core.errors import SpotfitError
from spotfit.host import process
from spotfit.ledger.journal import Journal
from spotfit.ledger.run import Ledger
from spotfit.store.budget import Budget
from spotfit.store.opening import open_store
from spotfit_localsim.dice import Stream
from spotfit_localsim.live import processes
from spotfit_localsim.live.places import Node, Root

Kind = Literal["worker", "agent", "leader", "node", "zygote", "driver", "carrier", "everybody"]
"""Everybody: all machines at once, and what they had in memory."""
_WORKER, _ZYGOTE, _CARRIER = "spotfit-worker", "spotfit-zygote", "spotfit-carrier"


class Victims:
    """The processes of the run at that address, on the machines below that root."""

    def __init__(self, root: Root, url: str, mark: str) -> None:
        self._root = root
        self._url = url
        self._mark = mark
        self._journal: Journal | None = None

    @property
    def at_work(self) -> bool:
        """Whether any worker lives."""
        return bool(_called(_WORKER, _pids(self._nodes)))

    def strike(self, kind: Kind, stream: Stream) -> str | None:
        """Kill one of that kind; who it was, or None if there is none.

        The last machine of a run that is over is spared: nobody would tidy up after it.
        """
        nodes = self._nodes
        machines = _pids(nodes)
        match kind:
            case "worker":
                return _kill_one(_called(_WORKER, machines), kind, stream)
            case "zygote":
                return _kill_one(_called(_ZYGOTE, machines), kind, stream)
            case "carrier":
                return _kill_one(_called(_CARRIER, machines), kind, stream)
            case "leader":
                leader = self._leader()
                machines = [pid for pid in machines if pid == leader]
                return None if self._is_over() else _kill_one(machines, kind, stream)
            case "agent":
                return None if self._is_over() else _kill_one(machines, kind, stream)
            case "everybody":
                return None if self._is_over() else _kill_all(nodes)
            case _:
                return None if self._is_over() else _kill_node(nodes, stream)

    def newest_of(self, count: int) -> str | None:
        """The latest checkpoint, once so many are kept in a run that goes on."""
        try:
            view = self._journal_now().view
        except SpotfitError:
            return None
        if view.ended is not None or len(view.checkpoints) < count:
            return None
        return view.checkpoints[-1].name

    @property
    def _nodes(self) -> list[Node]:
        return [node for group in self._root.groups() for node in group.nodes()]

    def _leader(self) -> int | None:
        """The pid of the machine whose agent leads, as far as the store can be asked."""
        try:
            view = self._journal_now().view
            if view.leader is None or view.run_id is None:
                return None
            leader = view.leader.leader
            store = open_store(self._url, Budget(attempts=1))
            offers = Ledger(store, view.run_id, leader).offers()
            return next((one.pid for one in offers if one.agent == leader), None)
        except SpotfitError:  # the store has its own troubles; ask again later
            return None

    def _is_over(self) -> bool:
        """Whether the run has ended, or nobody can tell."""
        try:
            return self._journal_now().view.ended is not None
        except SpotfitError:
            return True

    def _journal_now(self) -> Journal:
        if self._journal is None:
            self._journal = Journal(open_store(self._url, Budget(attempts=1)))
        self._journal.catch_up()
        return self._journal


def with_mark(name: str, value: str) -> list[str]:
    """Living processes in whose environment that stands, by pid and name."""
    marked = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _has(entry, f"{name}={value}"):
            marked.append(f"{entry.name} {_name(int(entry.name))}")
    return marked


def mourned(marked: Iterable[str]) -> None:
    """Kill what is left of a story."""
    for told in marked:
        process.kill(int(told.partition(" ")[0]))


def _machine(node: Node) -> processes.Process | None:
    machine = node.machine()
    return machine if machine is not None and machine.alive else None


def _pids(nodes: Iterable[Node]) -> list[int]:
    return sorted(found.pid for node in nodes if (found := _machine(node)))


def _called(name: str, machines: Iterable[int]) -> list[int]:
    """Processes of that name on these machines."""
    family = [pid for one in machines for pid in processes.descendants(one)]
    return [pid for pid in family if _name(pid) == name]


def _kill_one(pids: list[int], kind: str, stream: Stream) -> str | None:
    living = sorted(pid for pid in pids if processes.find(pid) is not None)
    if not living:
        return None
    pid = stream.choice(living)
    process.kill(pid, signal.SIGKILL)
    return f"the {kind} {pid}"


def _kill_node(nodes: list[Node], stream: Stream) -> str | None:
    living = [node for node in nodes if _machine(node)]
    if not living:
        return None
    return _take_away(stream.choice(living))


def _kill_all(nodes: list[Node]) -> str | None:
    taken = [told for node in nodes if (told := _take_away(node))]
    return "; ".join(taken) or None


def _take_away(node: Node) -> str | None:
    machine = _machine(node)
    if machine is None:
        return None
    node.reclaimed("chaos")
    processes.kill(machine)
    return f"node {node.group.token}/{node.number} with all it had ({machine.pid})"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def _has(entry: Path, told: str) -> bool:
    try:
        return told.encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
