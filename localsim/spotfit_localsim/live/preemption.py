"""Preempt nodes of a run on the local cloud, with or without notice, by a schedule or at random.

It acts from outside on processes and files, without help of an agent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from spotfit.agent.notices.local_sources import NoticeFileContent
from spotfit.core.codec import encode
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import RunId, Token
from spotfit.host import log
from spotfit.host.system import SystemClock, wall_ms
from spotfit.ledger.journal import Journal
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit_localsim.random_streams import RandomStream, SeededStreams
from spotfit_provisioners.local import processes
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

REPORTS_PREFIX = ".spotfit/reports"
_POLL_INTERVAL_S = 0.05
# Reports are read from the bucket less often: each read lists it.
_READ_INTERVAL_S = 0.25


class Reclaimer:
    """Preempts nodes of one run, or of all runs of a local cloud."""

    def __init__(self, cloud_dir: LocalCloudDir, run_id: RunId | None = None) -> None:
        self._cloud_dir = cloud_dir
        self._run_id = run_id

    def running_nodes(self) -> list[LocalNode]:
        """Return the running nodes without a preemption notice, in a stable order."""
        groups = (
            group for group in self._cloud_dir.groups() if self._run_id in (None, group.run_id)
        )
        # A node with a notice is lost already: preempting it again would test nothing.
        nodes = [node for group in groups for node in group.nodes()]
        return [
            node
            for node in nodes
            if (machine := node.machine()) is not None
            and machine.is_alive
            and not node.notice_path.exists()
        ]

    def notify(self, node: LocalNode, *, seconds_left: float, reason: str = "reclaimed") -> None:
        """Give the node a preemption notice. The caller must kill the node at the deadline."""
        node.write_notice(encode(NoticeFileContent(reason, seconds_left)))

    def kill(self, node: LocalNode, *, reason: str = "reclaimed without notice") -> None:
        """Kill the node with its agent, fork servers and workers at once."""
        machine = node.machine()
        if machine is not None:
            # Marked first: the provisioner must not report the death as a failure of the agent.
            node.mark_reclaimed(reason)
            processes.kill_process_tree(machine)
            # Its files would count as leftovers of the run.
            self._cloud_dir.remove_machine(machine)

    def set_capacity(self, nodes: int | None) -> None:
        """Set the number of nodes of the cloud; None for the value of its options."""
        self._cloud_dir.set_capacity(nodes)


# --- plans ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReclaim:
    """Preempt one node when the run reaches a step, or after a time."""

    step: int | None = None
    time_s: float | None = None
    node: int | None = None
    """Index among the running nodes; None for a random one."""
    notice: bool = False
    """Whether the node receives a notice."""
    notice_s: float | None = None
    """Time from the notice to the end; None for the value of the cloud's options."""
    capacity_outage_s: float = 0.0
    """For how long no new node is available afterwards."""

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Return whether the step or time is reached."""
        if self.step is not None:
            return step >= self.step
        return self.time_s is not None and elapsed_s >= self.time_s


def at_step(
    step: int,
    *,
    node: int | None = None,
    notice: bool = False,
    notice_s: float | None = None,
    capacity_outage_s: float = 0.0,
) -> PlannedReclaim:
    """Preempt when the run has reported `step` (metrics["step"], else the number of its reports).

    With `notice` the node is notified `notice_s` before, by default the value of the cloud's
    options.
    """
    has_notice = notice or notice_s is not None
    return PlannedReclaim(
        step=step,
        node=node,
        notice=has_notice,
        notice_s=notice_s,
        capacity_outage_s=capacity_outage_s,
    )


def at_time(
    seconds: float,
    *,
    node: int | None = None,
    notice: bool = False,
    notice_s: float | None = None,
    capacity_outage_s: float = 0.0,
) -> PlannedReclaim:
    """Preempt `seconds` after the start of the run; with a notice as in `at_step`."""
    has_notice = notice or notice_s is not None
    return PlannedReclaim(
        time_s=seconds,
        node=node,
        notice=has_notice,
        notice_s=notice_s,
        capacity_outage_s=capacity_outage_s,
    )


def at_random(
    seed: int,
    *,
    per_minute: float,
    duration_s: float,
    notice_probability: float = 0.5,
    notice_s: float | None = None,
) -> list[PlannedReclaim]:
    """Return preemptions at random times with the given mean rate; equal seeds give equal plans."""
    stream = SeededStreams(seed).stream("reclaims")
    reclaims: list[PlannedReclaim] = []
    time_s = stream.expovariate(per_minute / 60.0)
    while time_s < duration_s:
        # Drawn for every preemption, so that the times do not depend on the notices.
        has_notice = stream.bernoulli(notice_probability)
        reclaims.append(
            at_time(time_s, notice=has_notice, notice_s=notice_s if has_notice else None)
        )
        # Exponential distances give a constant rate.
        time_s += stream.expovariate(per_minute / 60.0)
    return reclaims


# --- execution --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReclaimRecord:
    """A preemption that was carried out; `at_ms` is milliseconds since 1970, for display."""

    token: Token
    node: int
    step: int
    notice: bool
    at_ms: int


class StepSource(Protocol):
    """Reports the progress of a run."""

    def current_step(self) -> int:
        """Return the highest reported step; 0 before the first report."""
        ...


@dataclass
class ReclaimSchedule:
    """Executes planned preemptions; call `tick` often."""

    reclaimer: Reclaimer
    step_source: StepSource
    pending: list[PlannedReclaim]
    stream: RandomStream
    started_at: float
    notice_s: float
    """Default time from the notice to the end."""
    completed: list[ReclaimRecord] = field(default_factory=list)
    _deadlines: list[tuple[float, LocalNode]] = field(default_factory=list)
    _capacity_outage_until: float | None = None

    def tick(self, now: float) -> None:
        """Execute what is due. A preemption without a running node waits for one."""
        for deadline, node in list(self._deadlines):
            if now >= deadline:
                self._deadlines.remove((deadline, node))
                self.reclaimer.kill(node, reason="reclaimed after its notice")
        if self._capacity_outage_until is not None and now >= self._capacity_outage_until:
            self.restore_capacity()
        # Reading the step costs requests to the bucket.
        if not self.pending:
            return
        step = self.step_source.current_step()
        for reclaim in list(self.pending):
            if reclaim.is_due(step, now - self.started_at) and (
                nodes := self.reclaimer.running_nodes()
            ):
                self.pending.remove(reclaim)
                node = (
                    self.stream.choice(nodes)
                    if reclaim.node is None
                    else nodes[reclaim.node % len(nodes)]
                )
                self._reclaim_node(reclaim, node, step, now)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not self.pending and not self._deadlines and self._capacity_outage_until is None

    def restore_capacity(self) -> None:
        """End a capacity outage."""
        if self._capacity_outage_until is not None:
            self.reclaimer.set_capacity(None)
            self._capacity_outage_until = None

    def _reclaim_node(
        self, reclaim: PlannedReclaim, node: LocalNode, step: int, now: float
    ) -> None:
        if reclaim.capacity_outage_s > 0:
            # Before the node is lost, or its replacement could start at once.
            self.reclaimer.set_capacity(0)
            self._capacity_outage_until = now + reclaim.capacity_outage_s
        if reclaim.notice:
            notice_s = self.notice_s if reclaim.notice_s is None else reclaim.notice_s
            self.reclaimer.notify(node, seconds_left=notice_s)
            self._deadlines.append((now + notice_s, node))
        else:
            self.reclaimer.kill(node)
        self.completed.append(
            ReclaimRecord(node.group.token, node.number, step, reclaim.notice, wall_ms())
        )


class _ReportLine(msgspec.Struct):
    metrics: dict[str, object] = {}


class ReportedStepSource:
    """Reads the reports of a run from its bucket, at most every `_READ_INTERVAL_S`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock = SystemClock()
        self._read_keys: set[str] = set()
        self._report_count = 0
        self._step = 0
        self._read_at = float("-inf")

    def current_step(self) -> int:
        if self._clock.now() - self._read_at < _READ_INTERVAL_S:
            return self._step
        try:
            new_keys = [
                info.key
                for info in self._store.list(REPORTS_PREFIX)
                if info.key not in self._read_keys
            ]
            for key in new_keys:
                for text in strip_mac(self._store.get(key)).splitlines():
                    line = msgspec.json.decode(text, type=_ReportLine)
                    self._report_count += 1
                    step = line.metrics.get("step", self._report_count)
                    if isinstance(step, int):
                        self._step = max(self._step, step)
                # Objects of reports are immutable: each is read once.
                self._read_keys.add(key)
        except SpotfitError as error:
            # The next read tries again; a test that needs the step waits for it.
            log.warning("reclaimer.reports_unreadable", reason=error.message)
        self._read_at = self._clock.now()
        return self._step


@contextlib.contextmanager
def scheduled_reclaims(
    run_url: str,
    plan: Sequence[PlannedReclaim],
    *,
    options: LocalOptions | None = None,
    seed: int = 0,
) -> Iterator[ReclaimSchedule]:
    """Execute the plan on the run at `run_url` in a thread, inside the context.

    The run may start later. `options` are those of its provisioner.
    """
    options = options or LocalOptions()
    root = LocalCloudDir(Path(options.root).absolute()) if options.root else LocalCloudDir.default()
    schedule = ReclaimSchedule(
        reclaimer=Reclaimer(root),
        step_source=ReportedStepSource(open_store(run_url)),
        pending=list(plan),
        stream=SeededStreams(seed).stream("nodes"),
        started_at=SystemClock().now(),
        notice_s=options.notice_s,
    )
    stop_event = threading.Event()
    thread = threading.Thread(
        target=_run_schedule, args=(schedule, run_url, root, stop_event), name="spotfit-reclaimer"
    )
    thread.start()
    try:
        yield schedule
    finally:
        stop_event.set()
        thread.join()
        schedule.restore_capacity()


def _run_schedule(
    schedule: ReclaimSchedule, run_url: str, root: LocalCloudDir, stop_event: threading.Event
) -> None:
    clock = SystemClock()
    journal = Journal(open_store(run_url))
    while not stop_event.wait(_POLL_INTERVAL_S) and not schedule.is_done:
        run = journal.view.run_id or journal.catch_up().run_id
        if run is None:
            # Times count from the start of the run, which may be later than that of the thread.
            schedule.started_at = clock.now()
            continue
        # Other runs of the same local cloud are spared.
        schedule.reclaimer = Reclaimer(root, run)
        schedule.tick(clock.now())
