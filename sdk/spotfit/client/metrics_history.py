"""The metrics that the training function of a run has reported, as stored by the leaders.

Each leader writes the reports that it has matched in numbered chunks of JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec

from spotfit.core.codec import DECODE_ERRORS, decoder
from spotfit.core.errors import IntegrityError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.model.reporting import metrics_from_json
from spotfit.model.view import View
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import Store
from spotfit.store.transfer import concurrent_map

# A status is read often; the speed needs some reports.
_PROGRESS_CHUNKS = 8
# Longer names and values of metrics are truncated: they would fill the screen.
_MAX_TEXT_CHARS = 40


@dataclass(frozen=True)
class ReportedMetrics:
    """The metrics of one report, as reported by rank 0."""

    round: int
    """Number of the round, from 1. A round after a failure repeats the steps since its
    checkpoint."""
    report_index: int
    """Index of the report in its round, from 0."""
    checkpoint: str | None
    """Name of the checkpoint that was reported with the metrics; None without one."""
    metrics: dict[str, Any]
    reported_at_ms: int = 0
    """Milliseconds since 1970 by the clock of the leader; 0 if unknown. For display only."""


class _StoredReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chunk, as `agent.report_matching.ReportSink` writes it."""

    round: int
    report_index: int
    checkpoint: str | None
    metrics: dict[str, Any]
    t: Annotated[int, msgspec.Meta(ge=0, le=2**42)] = 0


_report_decoder = decoder(_StoredReport)


def read_metrics_history(store: Store) -> list[ReportedMetrics]:
    """Return all reports of the run, in the order of rounds and report indices.

    Reads every stored chunk. Reports whose training state was lost with their round are included.
    `store` is rooted at the run's directory. Raises `StoreError`, and `IntegrityError` for a chunk
    that cannot be decoded.
    """
    return _read_chunks(store, [info.key for info in store.list(keys.REPORTS.rstrip("/"))])


@dataclass(frozen=True)
class ReportedProgress:
    """How far the training is, from the latest stored reports and checkpoints."""

    step: int | None = None
    """The metric "step" of the last report, or the step that a Checkpointer saved; None if the run
    has neither."""
    steps_per_s: float | None = None
    """The speed over the latest reports with a step of the last round; None if unknown."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The metrics of the last report."""


class ProgressReader:
    """Reads how far a run is, repeatedly. `store` is rooted at the run's directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._chunks: dict[AgentId, list[str]] = {}
        """The latest chunks of the leader. A run of a week writes 600,000, so that later reads list
        only those after them."""

    def read(self, view: View) -> ReportedProgress:
        """Return the progress of the run with that view, from the reports of its latest leader.

        Reads at most 8 objects, each with the reports of about a second; corrupt ones are ignored.
        Raises `StoreError`.
        """
        steps = {one.name: one.step for one in view.checkpoints if one.step is not None}
        reports = self._read_latest_reports(view.leader.leader) if view.leader else []
        samples: list[tuple[int, int]] = []
        for report in reports:
            step = report.metrics.get("step", steps.get(report.checkpoint or ""))
            if isinstance(step, int) and report.round == reports[-1].round:
                samples.append((step, report.reported_at_ms))
        last_saved = next(reversed(steps.values()), None)
        return ReportedProgress(
            step=samples[-1][0] if samples else last_saved,
            steps_per_s=_steps_per_second(samples),
            metrics=reports[-1].metrics if reports else {},
        )

    def _read_latest_reports(self, leader: AgentId) -> list[ReportedMetrics]:
        known = self._chunks.get(leader, [])
        listed = self._store.list(f"{keys.REPORTS}{leader}", after=known[-1] if known else "")
        chunks = [*known, *(info.key for info in listed)][-_PROGRESS_CHUNKS:]
        self._chunks = {leader: chunks}
        try:
            return _read_chunks(self._store, chunks)
        except IntegrityError:  # raised again by `read_metrics_history`, with its remedy
            return []


def format_metrics(values: Mapping[str, Any]) -> str:
    """Return metrics as "loss=0.5, step=120"; names and values are cut to 40 characters."""
    return ", ".join(f"{_truncate(name)}={_truncate(str(value))}" for name, value in values.items())


def format_progress(progress: ReportedProgress) -> str:
    """Return "step 120, 3.1 steps/s, loss=0.5", or "no report yet"."""
    parts = [] if progress.step is None else [f"step {progress.step}"]
    if progress.steps_per_s is not None:
        parts.append(f"{progress.steps_per_s:.3g} steps/s")
    others = {name: value for name, value in progress.metrics.items() if name != "step"}
    if others:
        parts.append(format_metrics(others))
    return ", ".join(parts) or "no report yet"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"


def _steps_per_second(samples: Sequence[tuple[int, int]]) -> float | None:
    if not samples:
        return None
    steps, duration_ms = samples[-1][0] - samples[0][0], samples[-1][1] - samples[0][1]
    return steps * 1000.0 / duration_ms if steps > 0 and duration_ms > 0 else None


def _read_chunks(store: Store, chunk_keys: Iterable[str]) -> list[ReportedMetrics]:
    # A replaced leader may have stored a report that its successor stored, too.
    reports = {
        (report.round, report.report_index): report
        for chunk in concurrent_map(partial(_read_chunk, store), chunk_keys)
        for report in chunk
    }
    return [reports[position] for position in sorted(reports)]


def _read_chunk(store: Store, key: str) -> list[ReportedMetrics]:
    try:
        lines = [_report_decoder.decode(line) for line in strip_mac(store.get(key)).splitlines()]
        return [
            ReportedMetrics(
                round=line.round,
                report_index=line.report_index,
                checkpoint=line.checkpoint,
                metrics=metrics_from_json(line.metrics),
                reported_at_ms=line.t,
            )
            for line in lines
        ]
    except DECODE_ERRORS as error:
        raise IntegrityError(
            f"The stored metrics in {store.url}/{key} cannot be decoded: {error}",
            do="Delete this object to read the other metrics; its metrics are lost.",
        ) from error
