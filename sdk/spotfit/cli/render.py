"""Formatting of the command line's output. No other module of the SDK prints."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich import markup
from rich.console import Console

from spotfit.client.bill_text import (
    format_bill,
    format_machine_hours,
    format_share,
    format_short_cost,
    format_unpriced_hours,
    is_bill_shown,
    list_offer_lines,
    sum_known_usd,
)
from spotfit.client.console import format_local_time
from spotfit.client.deadline_status import DeadlineStatus, format_slack
from spotfit.client.metrics_history import ReportedMetrics, format_metrics, format_progress
from spotfit.client.run_costs import RunCosts
from spotfit.client.run_handle import RunStatus
from spotfit.client.run_list import ListedRun
from spotfit.client.stored_checkpoints import CheckpointInfo
from spotfit.core.errors import SpotfitError
from spotfit.core.units import (
    format_bytes,
    format_count,
    format_seconds,
    format_usd,
    strip_control_characters,
)
from spotfit.host import system
from spotfit.provision.api import AccountCheck

# soft_wrap: copied and piped lines must not contain line breaks at the width of the terminal.
# highlight: rich would colour numbers and paths within the texts of users.
_console = Console(highlight=False, soft_wrap=True)
_error_console = Console(stderr=True, highlight=False, soft_wrap=True)

_STATE_COLORS = {
    "running": "green",
    "validating": "green",
    "finished": "green",
    "waiting": "yellow",
}


_RUN_COLUMNS = ("state", 10), ("started", 19), ("duration", 8), ("step", 7), ("cost", 9)
_COST_COLUMNS = (
    ("state", 10),
    ("cost", 10),
    ("at most", 10),
    ("on demand", 10),
    ("saved", 6),
    ("machine time", 18),
)


def runs(listed: Iterable[ListedRun], root: str) -> None:
    """Print one line per run as soon as the iterable yields it, for `spotfit ls`.

    `root` is the storage path, for the text without runs.
    """
    is_empty = True
    for run in listed:
        if is_empty:
            _print_header(_RUN_COLUMNS)
        is_empty = False
        colour = _STATE_COLORS.get(run.state, "red")
        started = format_local_time(run.started_at_ms) if run.started_at_ms else "-"
        step = "-" if run.step is None else str(run.step)
        error = run.reason.partition("\n")[0] if run.state == "unreadable" else ""
        detail = f"  [dim]{_escape(text)}[/dim]" if (text := run.checkpoint or error) else ""
        _console.print(
            f"[{colour}]{run.state:<10}[/{colour}]  {started:<19}  {_duration(run):<8}  {step:<7}  "
            f"{_short_cost(run):<9}  {_escape(run.url)}{detail}"
        )
    if is_empty:
        lines([f"There are no runs below {root}."])


def costs(found: RunCosts) -> None:
    """Print one line per run as soon as it is read, then the sum by offer, for `spotfit cost`."""
    for index, run in enumerate(found):
        if not index:
            _print_header(_COST_COLUMNS)
        colour = _STATE_COLORS.get(run.state, "red")
        cells = (f"{text:<{_COST_COLUMNS[n + 1][1]}}" for n, text in enumerate(_cost_cells(run)))
        error = run.reason.partition("\n")[0] if run.state == "unreadable" else ""
        detail = f"  [dim]{_escape(text)}[/dim]" if (text := error or _unpriced_hours(run)) else ""
        shown = f"[{colour}]{run.state:<10}[/{colour}]  {'  '.join(cells)}"
        _console.print(f"{shown}  {_escape(run.url)}{detail}")
    lines(f"There are no runs below {root}." for root in found.empty_roots)
    total = found.total
    if total.runs:
        text = format_bill(total.bill) or "no rented machines"
        _console.print(f"[bold]total of {format_count(total.runs, 'run')}:[/bold] {_escape(text)}")
        lines(f"  {line}" for line in list_offer_lines(total.bill))
    if total.unreadable:
        lines([f"not included: {format_count(total.unreadable, 'run')} that cannot be read"])


def _cost_cells(run: ListedRun) -> tuple[str, ...]:
    bill = run.cost
    if not is_bill_shown(bill, run.provisioner):
        return ("-",) * (len(_COST_COLUMNS) - 1)
    on_demand, share = bill.on_demand_usd, bill.saved_share
    maximum = sum_known_usd(bill, maximum=True)
    return (
        format_short_cost(bill),
        "unknown" if maximum is None else format_usd(maximum),
        "-" if on_demand is None else format_usd(on_demand),
        "-" if share is None else format_share(share),
        format_machine_hours(bill.machine_s, bill.max_machine_s),
    )


def _unpriced_hours(run: ListedRun) -> str:
    return format_unpriced_hours(run.cost) if is_bill_shown(run.cost, run.provisioner) else ""


def _short_cost(run: ListedRun) -> str:
    if not is_bill_shown(run.cost, run.provisioner):
        return "-"
    return "unknown" if run.cost.usd is None else format_short_cost(run.cost)


def _print_header(columns: Sequence[tuple[str, int]]) -> None:
    header = "  ".join(f"{name:<{width}}" for name, width in columns)
    _console.print(f"[dim]{header}  run[/dim]")


def json_lines(records: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object per line; NaN and infinities become null."""
    lines(msgspec.json.encode(record).decode() for record in records)


def status(run: RunStatus, url: str) -> None:
    """Print the state of a run on standard output, for `spotfit status`.

    `url` is the run's directory.
    """
    colour = _STATE_COLORS.get(run.state, "red")
    latest = f", latest {run.checkpoints[-1]}" if run.checkpoints else ""
    failures = ", ".join(f"{kind}: {count}" for kind, count in run.failures.items())
    _print_row("run", f"{_escape(run.name)}  [dim]{_escape(url)}[/dim]")
    _print_row("state", f"[{colour}]{run.state}[/{colour}] {_escape(run.reason)}")
    # Numbers start at 1; '-' while no round is open.
    _print_row("started", _format_duration(run))
    startup = ", starting: training function not called yet" if run.is_starting else ""
    if run.startup_s is not None:
        startup = f", training function called after {format_seconds(run.startup_s)}"
    workers = f"{run.workers} workers on {run.machines} machines{startup}"
    _print_row("round", f"{run.round or '-'}, {workers}")
    _print_row("progress", _escape(format_progress(run.progress)))
    _print_row("checkpoints", _escape(f"{len(run.checkpoints)}{latest}"))
    if run.save_reason:
        _print_row("", f"[dim]saved: {_escape(run.save_reason)}[/dim]")
    _print_row("failures", failures or "none")
    if run.feeders_stopped:
        reason = _escape(run.feeders_stopped)
        _print_row("feeders", f"[yellow]no further machines:[/yellow] {reason}")
    if run.deadline is not None:
        _print_row("deadline", _format_deadline(run.deadline))
        for risk in run.deadline.risks:
            _print_row("", f"[yellow]{_escape(risk)}[/yellow]")
    if is_bill_shown(run.cost, run.provisioner):
        _print_row("cost", _escape(format_bill(run.cost)))
        for line in list_offer_lines(run.cost):
            _print_row("", f"[dim]{_escape(line)}[/dim]")
    if not run.is_verified:
        _print_row("", "[yellow]not verified: this machine does not have the run's key[/yellow]")


def _format_deadline(deadline: DeadlineStatus) -> str:
    shown = format_local_time(deadline.at_ms)
    if not deadline.is_final:
        left_s = (deadline.at_ms - system.wall_ms()) / 1000
        until = f"in {format_seconds(left_s)}"
        shown += f", {until if left_s >= 0 else f'{format_seconds(-left_s)} ago'}"
    slack = format_slack(deadline) or ("" if deadline.is_final else "slack unknown")
    return f"{shown}, {slack}" if slack else shown


def _format_duration(run: RunStatus) -> str:
    if not run.started_at_ms:
        return "unknown"
    verb = "took" if run.ended_at_ms else "running for"
    return f"{format_local_time(run.started_at_ms)}, {verb} {_duration(run)}"


def _duration(run: RunStatus | ListedRun) -> str:
    if not run.started_at_ms:
        return "-"
    duration_s = ((run.ended_at_ms or system.wall_ms()) - run.started_at_ms) / 1000
    return format_seconds(max(0.0, duration_s))


def metrics(reports: Iterable[ReportedMetrics]) -> None:
    """Print one line per report: round, index of the report, checkpoint and metrics."""
    lines(
        f"round {report.round}  report {report.report_index}  {format_metrics(report.metrics)}"
        f"{f'  {report.checkpoint}' if report.checkpoint else ''}"
        for report in reports
    )


def metrics_as_csv(reports: Sequence[ReportedMetrics]) -> None:
    """Print the reports as comma-separated values with a header.

    The columns are round, report_index, time (in seconds since 1970), checkpoint, and one for each
    metric; 'a/b' for the item 'b' of a dictionary 'a'.
    """
    rows = [_flatten(report.metrics) for report in reports]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(_console.file, lineterminator="\n")
    writer.writerow(["round", "report_index", "time", "checkpoint", *map(_plain, names)])
    for report, row in zip(reports, rows, strict=True):
        position = report.round, report.report_index, report.reported_at_ms / 1000
        values = (row.get(name) for name in names)
        writer.writerow([_plain(value) for value in (*position, report.checkpoint, *values)])


def _plain(value: Any) -> Any:
    return strip_control_characters(value) if isinstance(value, str) else value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flatten(value, f"{prefix}{name}/") if nested else {f"{prefix}{name}": value}
    return flat


def lines(texts: Iterable[str]) -> None:
    """Print lines on standard output, without wrapping or markup.

    Control characters are removed, and colours unless standard output is a terminal.
    """
    for text in texts:
        shown = strip_control_characters(text, keep_colors=_console.file.isatty())
        _console.file.write(f"{shown}\n")  # not print(): rich would wrap lines and expand tabs
        _console.file.flush()  # lines that are followed must not wait in a buffer


def findings(results: Iterable[AccountCheck]) -> None:
    """Print the results of checks, with the remedy of those that failed or are inconclusive.

    For `spotfit doctor`. Each result is printed as soon as the iterable yields it.
    """
    for check in results:
        mark = "[green]✓[/green]" if check.passed else "[red]✗[/red]"
        # An inconclusive check counts as passed, but was not carried out.
        mark = mark if check.conclusive else "[yellow]?[/yellow]"
        _console.print(f"{mark} {_escape(check.name)}  [dim]{_escape(check.detail)}[/dim]")
        if check.do and not (check.passed and check.conclusive):
            _console.print(f"  [bold]What to do:[/bold] {_escape(check.do)}")


def success(text: str) -> None:
    """Print one line that reports success on standard output, after a check mark."""
    _console.print(f"[green]✓[/green] {_escape(text)}")


def error(failure: SpotfitError) -> None:
    """Print message, remedy and notes of an error on standard error; does not exit."""
    _error_console.print(f"[red]error:[/red] {_escape(failure.message)}")
    if failure.do:
        _error_console.print(f"[bold]What to do:[/bold] {_escape(failure.do)}")
    for note in getattr(failure, "__notes__", ()):
        _error_console.print(_escape(note))


def checkpoints(infos: Iterable[CheckpointInfo]) -> None:
    """Print one line per checkpoint: name, step, size and metrics.

    The step is "files" for a checkpoint that no Checkpointer saved, and "corrupt" after a read
    error.
    """
    for info in infos:
        step = "files" if info.step is None else f"step {info.step}"
        step = "[red]corrupt[/red]" if info.read_error else step
        shown = _escape(format_metrics(info.metrics))
        _console.print(f"{_escape(info.name)}  {step}  {format_bytes(info.size_bytes)}  {shown}")


def checkpoint(info: CheckpointInfo) -> None:
    """Print all properties of a checkpoint, for `spotfit checkpoints show`.

    Without content, the error of reading it is printed, or that it holds files of the user.
    """
    _print_row("checkpoint", _escape(info.name))
    _print_row("size", format_bytes(info.size_bytes))
    _print_row("metrics", _escape(format_metrics(info.metrics)))
    if info.reason:
        _print_row("reason", _escape(info.reason))
    if info.content is None:
        _print_row("content", _escape(info.read_error) or "files reported by the training function")
        return
    content = info.content
    _print_row("content", f"{content.tensors} tensors, {content.parameters:,} model parameters")
    _print_row(
        "saved at", f"step {content.step}, epoch {content.epoch}, by {content.world_size} workers"
    )
    _print_row("shared", f"{format_bytes(content.shared_bytes)} with earlier checkpoints")


def _escape(text: str) -> str:
    """Return text of a run or a user without control characters and markup."""
    return markup.escape(strip_control_characters(text))


def _print_row(label: str, value: str) -> None:
    _console.print(f"{label:<12} {value.rstrip()}")
