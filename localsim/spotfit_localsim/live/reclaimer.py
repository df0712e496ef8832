"""Takes nodes of a run away, as a spot market would: with notice or without, by plan or by dice.

It works from outside, on processes and files: no agent helps it, and none is asked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from spotfit.agent.notices.file import Announcement
from spotfit.core.codec import encode
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import RunId, Token
from spotfit.host import log
from spotfit.host.clocks import SystemClock, wall_ms
from spotfit.ledger.journal import Journal
from spotfit.store.api import Store
from spotfit.store.opening import open_store
from spotfit_localsim.dice import Dice, Stream
from spotfit_localsim.live import processes
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.places import Node, Root

REPORTS = ".spotfit/reports"
_LOOK_EVERY_S = 0.05
_READ_EVERY_S = 0.25


class Reclaimer:
    """The hand of the market, on the nodes of one run, or of all runs of a local cloud."""

    def __init__(self, root: Root, run: RunId | None = None) -> None:
        self._root = root
        self._run = run

    def nodes(self) -> list[Node]:
        """Those that run at present and know nothing of their end, always in the same order."""
        mine = (group for group in self._root.groups() if self._run in (None, group.run))
        nodes = [node for group in mine for node in group.nodes()]
        return [node for node in nodes if _runs(node) and not node.notice.exists()]

    def notify(self, node: Node, *, seconds_left: float, reason: str = "reclaimed") -> None:
        """Tell the node that it will be taken away. Whoever tells it must do it, too."""
        node.announce(encode(Announcement(reason, seconds_left)))

    def kill(self, node: Node, *, reason: str = "reclaimed without notice") -> None:
        """Take the node away: its agent, zygotes and workers are gone at once."""
        machine = node.machine()
        if machine is not None:
            node.reclaimed(reason)
            processes.kill(machine)
            self._root.forget(machine)

    def limit(self, nodes: int | None) -> None:
        """How many nodes this cloud has from now on; None: as many as its options say."""
        self._root.limit(nodes)


# --- plans ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One node to be taken away, once the run is so far or the time has come."""

    step: int | None = None
    time_s: float | None = None
    node: int | None = None
    """Which of the nodes there are then; None leaves it to the dice."""
    announced: bool = False
    """Whether it is told before its end."""
    notice_s: float | None = None
    """How long before, for one that is told; None: as long as the cloud's options say."""
    drought_s: float = 0.0
    """How long no new node can be had afterwards."""

    def due(self, step: int, elapsed_s: float) -> bool:
        """Whether it is time."""
        if self.step is not None:
            return step >= self.step
        return self.time_s is not None and elapsed_s >= self.time_s


def at_step(
    step: int,
    *,
    node: int | None = None,
    announced: bool = False,
    notice_s: float | None = None,
    drought_s: float = 0.0,
) -> Strike:
    """When the run has reported that step (metrics["step"], else the number of its reports).

    It is `announced` as long before as the cloud's options say, or `notice_s`.
    """
    told = announced or notice_s is not None
    return Strike(step=step, node=node, announced=told, notice_s=notice_s, drought_s=drought_s)


def at_time(
    seconds: float,
    *,
    node: int | None = None,
    announced: bool = False,
    notice_s: float | None = None,
    drought_s: float = 0.0,
) -> Strike:
    """So many seconds after the plan began; announced as with `at_step`."""
    told = announced or notice_s is not None
    return Strike(time_s=seconds, node=node, announced=told, notice_s=notice_s, drought_s=drought_s)


def at_random(
    seed: int,
    *,
    per_minute: float,
    within_s: float,
    announced: float = 0.5,
    notice_s: float | None = None,
) -> list[Strike]:
    """As often as that on average, for so long; a share of them announced. Same seed, same plan."""
    stream = Dice(seed).stream("reclaims")
    strikes: list[Strike] = []
    at = stream.expovariate(per_minute / 60.0)
    while at < within_s:
        told = stream.chance(announced)
        strikes.append(at_time(at, announced=told, notice_s=notice_s if told else None))
        at += stream.expovariate(per_minute / 60.0)
    return strikes


# --- carrying a plan out ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Struck:
    """What was done to whom. `at_ms` is for people."""

    token: Token
    node: int
    step: int
    announced: bool
    at_ms: int


class Progress(Protocol):
    """How far a run is."""

    def step(self) -> int:
        """The greatest step reported so far; 0 before the first."""
        ...


@dataclass
class Reclamation:
    """A plan being carried out, tick by tick."""

    reclaimer: Reclaimer
    progress: Progress
    waiting: list[Strike]
    stream: Stream
    began: float
    notice_s: float
    """How long before its end a node is told, if a strike does not say."""
    done: list[Struck] = field(default_factory=list)
    _deadlines: list[tuple[float, Node]] = field(default_factory=list)
    _drought_until: float | None = None

    def tick(self, now: float) -> None:
        """Do what is due. A strike that finds no node waits for one."""
        self._end_the_noticed(now)
        self._end_the_drought(now)
        if not self.waiting:
            return
        step = self.progress.step()
        for strike in list(self.waiting):
            if strike.due(step, now - self.began) and (nodes := self.reclaimer.nodes()):
                self.waiting.remove(strike)
                self._strike(strike, self._chosen(strike, nodes), step, now)

    @property
    def over(self) -> bool:
        """Whether nothing of the plan is left to do."""
        return not self.waiting and not self._deadlines and self._drought_until is None

    def lift(self) -> None:
        """Let the cloud have nodes again, whatever the plan says."""
        if self._drought_until is not None:
            self.reclaimer.limit(None)
            self._drought_until = None

    def _chosen(self, strike: Strike, nodes: list[Node]) -> Node:
        return self.stream.choice(nodes) if strike.node is None else nodes[strike.node % len(nodes)]

    def _strike(self, strike: Strike, node: Node, step: int, now: float) -> None:
        if strike.drought_s > 0:
            self.reclaimer.limit(0)
            self._drought_until = now + strike.drought_s
        if strike.announced:
            notice_s = self.notice_s if strike.notice_s is None else strike.notice_s
            self.reclaimer.notify(node, seconds_left=notice_s)
            self._deadlines.append((now + notice_s, node))
        else:
            self.reclaimer.kill(node)
        self.done.append(Struck(node.group.token, node.number, step, strike.announced, wall_ms()))

    def _end_the_noticed(self, now: float) -> None:
        for deadline, node in list(self._deadlines):
            if now >= deadline:
                self._deadlines.remove((deadline, node))
                self.reclaimer.kill(node, reason="reclaimed after its notice")

    def _end_the_drought(self, now: float) -> None:
        if self._drought_until is not None and now >= self._drought_until:
            self.lift()


class _Line(msgspec.Struct):
    metrics: dict[str, object] = {}


class ReportedProgress:
    """Reads the reports of a run in its bucket, now and then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock = SystemClock()
        self._seen: set[str] = set()
        self._reports = 0
        self._step = 0
        self._read_at = float("-inf")

    def step(self) -> int:
        if self._clock.now() - self._read_at >= _READ_EVERY_S:
            self._read()
            self._read_at = self._clock.now()
        return self._step

    def _read(self) -> None:
        try:
            new = [found.key for found in self._store.list(REPORTS) if found.key not in self._seen]
            for key in new:
                for line in self._store.get(key).splitlines():
                    self._take(msgspec.json.decode(line, type=_Line))
                self._seen.add(key)
        except SpotfitError as trouble:
            log.warning("reclaimer.reports", why=trouble.what)

    def _take(self, line: _Line) -> None:
        self._reports += 1
        told = line.metrics.get("step", self._reports)
        if isinstance(told, int):
            self._step = max(self._step, told)


@contextlib.contextmanager
def reclaiming(
    run_url: str, plan: Sequence[Strike], *, options: LocalOptions | None = None, seed: int = 0
) -> Iterator[Reclamation]:
    """Carry the plan out on the run at that address, in a thread, until the block is left.

    The run may begin later. `options` are those of its provisioner.
    """
    options = options or LocalOptions()
    root = Root(Path(options.root).absolute()) if options.root else Root.default()
    reclamation = Reclamation(
        Reclaimer(root),
        ReportedProgress(open_store(run_url)),
        list(plan),
        Dice(seed).stream("nodes"),
        SystemClock().now(),
        options.notice_s,
    )
    leave = threading.Event()
    thread = threading.Thread(
        target=_drive, args=(reclamation, run_url, root, leave), name="spotfit-reclaimer"
    )
    thread.start()
    try:
        yield reclamation
    finally:
        leave.set()
        thread.join()
        reclamation.lift()


def _drive(reclamation: Reclamation, run_url: str, root: Root, leave: threading.Event) -> None:
    clock = SystemClock()
    journal = Journal(open_store(run_url))
    while not leave.wait(_LOOK_EVERY_S) and not reclamation.over:
        run = journal.view.run_id or journal.catch_up().run_id
        if run is None:
            reclamation.began = clock.now()
            continue
        reclamation.reclaimer = Reclaimer(root, run)
        reclamation.tick(clock.now())


def _runs(node: Node) -> bool:
    machine = node.machine()
    return machine is not None and machine.alive
