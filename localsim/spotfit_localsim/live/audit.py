"""What must hold when a run is over, read from its bucket and from what it left on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from spotfit.checkpoint.saved import open_saved
from spotfit.core.errors import IntegrityError, SpotfitError
from spotfit.ledger.journal import Journal
from spotfit.model.events import Entry, FitEnded, Intended, RoundOpened, Submitted
from spotfit.model.view import View
from spotfit.model.world import Round
from spotfit.store.api import Store
from spotfit.store.opening import open_store
from spotfit_localsim.live.reclaimer import REPORTS


class _Report(msgspec.Struct, frozen=True):
    round: int
    n: int
    metrics: dict[str, int]


@dataclass
class Audit:
    """A run that is over, and what is suspicious about it."""

    result: str | None
    paid: list[str]
    """A line for every start of a machine's agent: token, node, pid."""
    left: list[str]
    """Processes and directories that are still there."""
    view: View = field(default_factory=View)
    suspicions: list[str] = field(default_factory=list)
    ordered: set[str] = field(default_factory=set)
    """Tokens that stand in the journal."""
    reports: list[_Report] = field(default_factory=list)
    ended_ms: int | None = None
    """When the end was."""
    harmed: AbstractSet[str] = frozenset()
    """Checkpoints of which files were damaged on purpose."""

    def active_at(self, ms: int) -> bool:
        """Whether the run had not ended then."""
        return self.ended_ms is None or ms < self.ended_ms

    @classmethod
    def of(
        cls,
        *,
        url: str,
        result: str | None,
        paid: list[str],
        left: list[str],
        harmed: AbstractSet[str] = frozenset(),
    ) -> Audit:
        """Read the run at that address."""
        audit = cls(result, paid, left, harmed=harmed)
        try:
            store = open_store(url)
            audit._read_journal(store)
            audit._read_reports(store)
            audit._look_into_checkpoints(store)
        except SpotfitError as unreadable:
            audit.suspicions.append(f"the run cannot be read: {unreadable.what}")
        return audit

    def wrong(self, expected: str, *, steps: int) -> list[str]:
        """All that does not hold."""
        return [
            *self.suspicions,
            *self._wrong_end(expected, steps),
            *self._wrong_payments(),
            *self._wrong_reports(),
            *(f"left behind: {one}" for one in self.left),
        ]

    # --- reading -------------------------------------------------------------------------------

    def _read_journal(self, store: Store) -> None:
        journal = Journal(store, whole=True)
        before = journal.view

        def heard(slot: int, _: bytes, entry: Entry) -> None:
            nonlocal before
            self._hear(slot, entry, before)
            before = journal.view

        journal.heard = heard
        self.view = journal.catch_up()

    def _hear(self, slot: int, entry: Entry, before: View) -> None:
        match entry.event:
            case FitEnded():
                self.ended_ms = entry.at_ms
            case RoundOpened(round=opened):
                latest = before.latest_checkpoint
                newest = latest.name if latest else None
                if opened.checkpoint != newest:
                    self.suspicions.append(
                        f"entry {slot}: round {opened.number} starts from {opened.checkpoint}, "
                        f"and {newest} was committed"
                    )
                self._look_at_memory(slot, opened, before)
            case Intended(plan=plan):
                if plan.token in self.ordered:
                    self.suspicions.append(f"entry {slot}: token {plan.token} is intended twice")
                self.ordered.add(plan.token)
            case Submitted(token=token):
                if token not in self.ordered:
                    self.suspicions.append(f"entry {slot}: {token} was submitted, never intended")

    def _look_at_memory(self, slot: int, opened: Round, before: View) -> None:
        """Memory may only ever be ahead of what is committed."""
        latest = before.latest_checkpoint
        if opened.memory is None or latest is None or latest.name in self.harmed:
            return
        if opened.memory.step < latest.metrics.get("step", 0):
            self.suspicions.append(
                f"entry {slot}: round {opened.number} begins from step {opened.memory.step} in "
                f"memory, and step {latest.metrics['step']} was committed"
            )

    def _read_reports(self, store: Store) -> None:
        for found in store.list(REPORTS):
            for line in store.get(found.key).splitlines():
                self.reports.append(msgspec.json.decode(line, type=_Report))

    def _look_into_checkpoints(self, store: Store) -> None:
        for kept in self.view.checkpoints:
            if kept.snapshot:
                self._read_snapshot(store, kept.name)
                continue
            present = {found.key for found in store.list(kept.name)}
            missing = [r for r in kept.ranks if f"{kept.name}/rank-{r}" not in present]
            if missing:
                self.suspicions.append(f"checkpoint {kept.name} has no files of ranks {missing}")
        for kept in self.view.checkpoints:
            if kept.metrics.get("step") != kept.metrics.get("steps"):
                self.suspicions.append(
                    f"checkpoint {kept.name} counts a step twice: {kept.metrics}"
                )

    def _read_snapshot(self, store: Store, name: str) -> None:
        """To the last byte: an acknowledged checkpoint is never lost."""
        if name in self.harmed:
            return
        try:
            saved = open_saved(store, name)
            for part in saved.parts.values() if saved else ():
                for chunk in part.index.chunks:
                    part.fetch(chunk)
        except IntegrityError as broken:
            self.suspicions.append(f"checkpoint {name} is lost: {broken.what}")

    # --- judging -------------------------------------------------------------------------------

    def _wrong_end(self, expected: str, steps: int) -> list[str]:
        ended = self.view.ended
        if not isinstance(ended, FitEnded) or ended.outcome != "finished":
            return [f"the run has not finished: {ended}"]
        wrong = []
        if self.result != expected:
            wrong.append(f"the result is {self.result}, and not {expected}")
        if ended.metrics is not None and ended.metrics != {"step": steps, "steps": steps}:
            wrong.append(f"the last metrics are {ended.metrics}")
        return wrong

    def _wrong_payments(self) -> list[str]:
        machines = [tuple(line.split()[:2]) for line in self.paid]
        twice = [told for told, times in Counter(machines).items() if times > 1]
        strangers = {token for token, _ in machines} - self.ordered
        return [f"machine {token}/{node} was paid twice" for token, node in twice] + [
            f"machines of {token} were paid, and nobody ordered them" for token in strangers
        ]

    def _wrong_reports(self) -> list[str]:
        times = Counter((report.round, report.n) for report in self.reports)
        wrong = [f"report {which} was told twice" for which, count in times.items() if count > 1]
        for report in self.reports:
            if report.metrics["step"] != report.metrics["steps"]:
                wrong.append(f"a step was counted twice: {report}")
        return wrong
