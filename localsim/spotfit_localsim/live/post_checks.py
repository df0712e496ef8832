"""Invariants of a finished run, checked on its bucket and on what it left on this machine."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from spotfit.checkpoint.reader import open_committed_snapshot
from spotfit.core.errors import IntegrityError, SpotfitError
from spotfit.core.ids import AgentId
from spotfit.host import memory
from spotfit.ledger import keys
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    GroupPlanned,
    GroupSubmitted,
    JournalEntry,
    NodeLost,
    RoundOpened,
)
from spotfit.model.view import JournalView
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit_localsim.live.preemption import REPORTS_PREFIX

_LOGS_PREFIX = ".spotfit/logs"
_PRINTED_STEP = re.compile(r"step (\d+)")
"""What the reference trainings print at every step."""


class _ReportEntry(msgspec.Struct, frozen=True):
    round: int
    report_index: int
    metrics: dict[str, int]


class _LogLine(msgspec.Struct, frozen=True):
    rank: int = keys.RUN_RANK
    round: int = -1
    text: str = ""
    end: bool = False


@dataclass
class _NodeLog:
    chunks: list[str] = field(default_factory=list)
    lines: list[_LogLine] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether the agent has stored all its output and exited."""
        return bool(self.lines) and self.lines[-1].end

    def printed_steps(self) -> dict[tuple[int, int], list[int]]:
        """Return the steps that each rank has printed, by round and rank."""
        steps: dict[tuple[int, int], list[int]] = {}
        for line in self.lines:
            if match := _PRINTED_STEP.fullmatch(line.text):
                steps.setdefault((line.round, line.rank), []).append(int(match[1]))
        return steps


@dataclass
class RunAudit:
    """A finished run, and the violations found so far."""

    result: str | None
    machine_starts: list[str]
    """A line for each start of a machine's agent: token, node, pid."""
    leftovers: list[str]
    """Processes and directories that still exist."""
    view: JournalView = field(default_factory=JournalView)
    violations: list[str] = field(default_factory=list)
    _stored_reports: set[tuple[str, tuple[int, int]]] = field(default_factory=set)
    intended_tokens: set[str] = field(default_factory=set)
    """Tokens planned in the journal."""
    reports: list[_ReportEntry] = field(default_factory=list)
    logs: dict[str, _NodeLog] = field(default_factory=dict)
    """By agent: what it has stored of the output of its node."""
    awaited_reports: dict[int, int] = field(default_factory=dict)
    """By round: the number of the last report that must be stored, with all before it."""
    replaced_agents: set[str] = field(default_factory=set)
    """Agents of healthy machines that were released during the run."""
    ended_ms: int | None = None
    """The time of the end of the run."""
    corrupted_checkpoints: AbstractSet[str] = frozenset()
    """Checkpoints that were corrupted on purpose."""

    def was_active_at(self, ms: int) -> bool:
        """Return whether the run had not ended at that time."""
        return self.ended_ms is None or ms < self.ended_ms

    @classmethod
    def read(
        cls,
        *,
        url: str,
        result: str | None,
        machine_starts: list[str],
        leftovers: list[str],
        corrupted_checkpoints: AbstractSet[str] = frozenset(),
    ) -> RunAudit:
        """Read the run at `url`; an unreadable run is a violation."""
        audit = cls(result, machine_starts, leftovers, corrupted_checkpoints=corrupted_checkpoints)
        try:
            store = open_store(url)
            audit._read_journal(store)
            for info in store.list(REPORTS_PREFIX):
                chunk = strip_mac(store.get(info.key)).splitlines()
                lines = [msgspec.json.decode(line, type=_ReportEntry) for line in chunk]
                audit._add_reports(info.key.split("/")[-2], lines)
            audit._read_logs(store)
            audit._check_checkpoints(store)
            audit._find_shared_memory(store)
        except SpotfitError as error:
            audit.violations.append(f"the run cannot be read: {error.message}")
        return audit

    def find_violations(self, expected: str, *, steps: int) -> list[str]:
        """Return all violations."""
        machines = [tuple(line.split()[:2]) for line in self.machine_starts]
        repeated = [machine for machine, times in Counter(machines).items() if times > 1]
        unplanned = {token for token, _ in machines} - self.intended_tokens
        return [
            *self.violations,
            *self._check_end(expected, steps),
            *(f"machine {token}/{node} was started twice" for token, node in repeated),
            *(f"machines of {token} were started but not planned" for token in unplanned),
            *self._check_reports(),
            *self._check_logs(steps),
            *(
                f"a step was counted twice: {report}"
                for report in self.reports
                if report.metrics["step"] != report.metrics["steps"]
            ),
            *(f"leftover: {one}" for one in self.leftovers),
        ]

    # --- reading -------------------------------------------------------------------------------

    def _read_journal(self, store: Store) -> None:
        # Every entry is checked, which a cached view would skip.
        journal = Journal(store, ignore_view_cache=True)
        before = journal.view

        def on_entry(slot: int, _: bytes, entry: JournalEntry) -> None:
            # The listener runs after the fold: the check needs the view before the entry.
            nonlocal before
            self._check_entry(slot, entry, before)
            before = journal.view

        journal.on_entry = on_entry
        self.view = journal.catch_up()

    def _check_entry(self, slot: int, entry: JournalEntry, before: JournalView) -> None:
        match entry.event:
            case FitEnded():
                self.ended_ms = entry.written_at_ms
            case RoundOpened(round=opened):
                latest = before.latest_checkpoint
                newest = latest.name if latest else None
                if opened.checkpoint_name != newest:
                    self.violations.append(
                        f"entry {slot}: round {opened.number} starts from "
                        f"{opened.checkpoint_name}, "
                        f"but {newest} was committed"
                    )
                # A snapshot in memory must not be older than the latest checkpoint, unless that one
                # was corrupted: the run then had to fall back.
                memory = opened.memory_snapshot
                if memory is None or latest is None or newest in self.corrupted_checkpoints:
                    return
                if memory.step < latest.metrics.get("step", 0):
                    self.violations.append(
                        f"entry {slot}: round {opened.number} starts from step {memory.step} in "
                        f"memory, but step {latest.metrics['step']} was committed"
                    )
            case CheckpointCommitted(round=number, report_index=index):
                # Of a closed round another leader may have committed it, without its reports.
                if before.round is not None and before.round.number == number:
                    self.awaited_reports[number] = max(index, self.awaited_reports.get(number, -1))
            # An unused machine may have been lost before it was released.
            case NodeLost(agent=str(agent), cause=None, is_unused=False):
                self.replaced_agents.add(agent)
            case GroupPlanned(plan=plan):
                if plan.token in self.intended_tokens:
                    self.violations.append(f"entry {slot}: token {plan.token} was planned twice")
                self.intended_tokens.add(plan.token)
            case GroupSubmitted(token=token):
                if token not in self.intended_tokens:
                    self.violations.append(f"entry {slot}: {token} was submitted but not planned")

    def _check_checkpoints(self, store: Store) -> None:
        for checkpoint in self.view.checkpoints:
            if checkpoint.is_snapshot:
                self._read_snapshot(store, checkpoint.name)
                continue
            # Every rank must have a file: a partial checkpoint cannot be restored.
            present = {info.key for info in store.list(checkpoint.name)}
            missing = [
                rank for rank in checkpoint.ranks if f"{checkpoint.name}/rank-{rank}" not in present
            ]
            if missing:
                self.violations.append(
                    f"checkpoint {checkpoint.name} has no files of ranks {missing}"
                )
        for checkpoint in self.view.checkpoints:
            # `steps` is part of the restored state: it differs from `step` if a step ran twice.
            if checkpoint.metrics.get("step") != checkpoint.metrics.get("steps"):
                self.violations.append(
                    f"checkpoint {checkpoint.name} counts a step twice: {checkpoint.metrics}"
                )

    def _read_snapshot(self, store: Store, name: str) -> None:
        """Read every chunk: a committed checkpoint must never be lost."""
        if name in self.corrupted_checkpoints:
            return
        try:
            saved = open_committed_snapshot(store, name)
            for reader in saved.readers.values() if saved else ():
                for chunk in reader.index.chunks:
                    reader.fetch(chunk)
        except IntegrityError as error:
            self.violations.append(f"checkpoint {name} is lost: {error.message}")

    def _add_reports(self, agent: str, reports: list[_ReportEntry]) -> None:
        known = {(one.round, one.report_index): one for one in self.reports}
        for report in reports:
            position = (report.round, report.report_index)
            # The leader that commits a checkpoint of a lost one stores its report again.
            is_same = known.setdefault(position, report).metrics == report.metrics
            if not is_same or (agent, position) in self._stored_reports:
                self.violations.append(f"report {position} was stored twice")
            self._stored_reports.add((agent, position))
        self.reports = list(known.values())

    def _read_logs(self, store: Store) -> None:
        for info in store.list(_LOGS_PREFIX):
            log = self.logs.setdefault(info.key.split("/")[-2], _NodeLog())
            log.chunks.append(info.key)
            log.lines += [
                msgspec.json.decode(line, type=_LogLine)
                for line in store.get(info.key).splitlines()
            ]

    def _find_shared_memory(self, store: Store) -> None:
        """Add the shared memory of the run's agents on this machine to the leftovers."""
        for info in store.list(keys.MEMBERS.rstrip("/")):
            agent = info.key.rpartition("/")[2].removesuffix(".json")
            folder = memory.SHARED_MEMORY_DIR / f"spotfit-{os.getuid()}-{agent}"
            if folder.exists():
                self.leftovers.append(str(folder))

    # --- checks --------------------------------------------------------------------------------

    def _check_reports(self) -> Iterator[str]:
        """The reports up to a checkpoint are stored before its commit."""
        stored = {(one.round, one.report_index) for one in self.reports}
        for number, last in self.awaited_reports.items():
            missing = [index for index in range(last + 1) if (number, index) not in stored]
            if missing:
                yield f"reports {missing} of round {number} are missing, but {last} was committed"

    def _check_logs(self, steps: int) -> Iterator[str]:
        """No line is lost between two others; agents that exited have stored the last one."""
        last_round = self.view.last_round.number if self.view.last_round else 0
        for agent, log in self.logs.items():
            expected = [keys.logs(AgentId(agent), number) for number in range(len(log.chunks))]
            if log.chunks != expected:
                yield f"chunks of the log of {agent} are missing: {log.chunks}"
            if agent in self.replaced_agents and not log.has_ended:
                yield f"{agent} was replaced, and its last output is not stored"
            for (number, rank), printed in log.printed_steps().items():
                if printed != list(range(printed[0], printed[0] + len(printed))):
                    yield f"round {number}: lines of rank {rank} are missing: {printed}"
                if number == last_round and log.has_ended and printed[-1] != steps:
                    yield f"the last line of rank {rank} is of step {printed[-1]} of {steps}"

    def _check_end(self, expected: str, steps: int) -> list[str]:
        ended = self.view.fit_end
        if not isinstance(ended, FitEnded) or ended.outcome != "finished":
            return [f"the run has not finished: {ended}"]
        violations = []
        # The result depends on every step: lost or repeated ones change it.
        if self.result != expected:
            violations.append(f"the result is {self.result}, expected {expected}")
        if ended.metrics is not None and ended.metrics != {"step": steps, "steps": steps}:
            violations.append(f"the last metrics are {ended.metrics}")
        return violations
