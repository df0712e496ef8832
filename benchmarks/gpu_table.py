"""The table of `make gpu`: what each row measured, its goal, and whether it passed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tables import markdown

HEAD = ("row", "figure", "goal", "result")
_MAX_REASON_CHARS = 160


@dataclass(frozen=True, slots=True)
class GpuFigure:
    """A measured value with its goal: the value must be at most `at_most`, if that is set."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the value reaches its goal; a NaN does not."""
        return self.at_most is None or self.value <= self.at_most

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g} {self.unit}".rstrip()

    @property
    def goal(self) -> str:
        return "" if self.at_most is None else f"≤ {self.at_most:.3g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One test and its outcome: "passed", "failed" or "skipped" with the reason."""

    title: str
    outcome: str
    reason: str = ""
    figures: Sequence[GpuFigure] = field(default=())


def figure_of(properties: Mapping[str, Any]) -> GpuFigure:
    """Return the figure that a test has recorded as plain values."""
    return GpuFigure(**properties)


def title_of(node_id: str) -> str:
    """Return a test's name as words: "a save of ddp blocks briefly [cuda]"."""
    name, bracket, parameters = node_id.rpartition("::")[2].partition("[")
    return name.removeprefix("test_").replace("_", " ") + (bracket and f" [{parameters}")


def line_of(row: GpuRow) -> str:
    """Return the row as one line, without goals."""
    details = [_short(row.reason)] if row.reason else [str(figure) for figure in row.figures]
    return f"{row.outcome}: {row.title}" + "".join(f"; {detail}" for detail in details)


def of_rows(rows: Sequence[GpuRow]) -> str:
    """Return the Markdown table: one line per figure, and one for a row without figures."""
    lines = []
    for row in rows:
        result = row.outcome if not row.reason else f"{row.outcome}: {_short(row.reason)}"
        for number, figure in enumerate(row.figures or (None,)):
            first = number == 0
            lines.append(
                (
                    row.title if first else "",
                    str(figure) if figure else "",
                    figure.goal if figure else "",
                    result if first else "",
                )
            )
    return markdown(HEAD, lines)


def summary(rows: Sequence[GpuRow]) -> str:
    """Return the number of rows of each outcome: "12 passed, 0 failed, 3 skipped"."""
    return ", ".join(
        f"{sum(row.outcome == outcome for row in rows)} {outcome}"
        for outcome in ("passed", "failed", "skipped")
    )


def exit_status(rows: Sequence[GpuRow]) -> int:
    """Return 0 if a row passed and none failed, else 1: a run that measured nothing has failed."""
    outcomes = {row.outcome for row in rows}
    return 0 if "passed" in outcomes and "failed" not in outcomes else 1


def _short(reason: str) -> str:
    line = " ".join(reason.split()).replace("|", "/")
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[:_MAX_REASON_CHARS]}…"
