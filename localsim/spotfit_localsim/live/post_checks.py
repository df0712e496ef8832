"""Invariants of a finished run, checked on its bucket and on what it left on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from spotfit.checkpoint.reader import open_committed_snapshot
from spotfit.core.errors import IntegrityError, SpotfitError
from spotfit.ledger.journal import Journal
from spotfit.model.events import FitEnded, GroupPlanned, GroupSubmitted, JournalEntry, RoundOpened
from spotfit.model.view import JournalView
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit_localsim.live.preemption import REPORTS_PREFIX


class _ReportEntry(msgspec.Struct, frozen=True):
    round: int
    report_index: int
    metrics: dict[str, int]


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
    intended_tokens: set[str] = field(default_factory=set)
    """Tokens planned in the journal."""
    reports: list[_ReportEntry] = field(default_factory=list)
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
                for line in store.get(info.key).splitlines():
                    audit.reports.append(msgspec.json.decode(line, type=_ReportEntry))
            audit._check_checkpoints(store)
        except SpotfitError as error:
            audit.violations.append(f"the run cannot be read: {error.message}")
        return audit

    def find_violations(self, expected: str, *, steps: int) -> list[str]:
        """Return all violations."""
        machines = [tuple(line.split()[:2]) for line in self.machine_starts]
        repeated = [machine for machine, times in Counter(machines).items() if times > 1]
        unplanned = {token for token, _ in machines} - self.intended_tokens
        # An index occurs once per round; a repeated round has another number.
        times = Counter((report.round, report.report_index) for report in self.reports)
        return [
            *self.violations,
            *self._check_end(expected, steps),
            *(f"machine {token}/{node} was started twice" for token, node in repeated),
            *(f"machines of {token} were started but not planned" for token in unplanned),
            *(f"report {one} was stored twice" for one, count in times.items() if count > 1),
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

    # --- checks --------------------------------------------------------------------------------

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
