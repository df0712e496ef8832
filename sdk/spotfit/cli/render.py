"""Tables and colours; the only place of the command line that prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from spotfit.client.handle import RunStatus
from spotfit.client.kept import Kept
from spotfit.core.errors import SpotfitError
from spotfit.core.units import told_bytes
from spotfit.provision.checkup import Finding

_console = Console(highlight=False, soft_wrap=True)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)
_LONGEST = 40
"""So many characters of a metric's name or value are shown."""
_COLOURS = {
    "running": "green",
    "validating": "green",
    "finished": "green",
    "waiting": "yellow",
}


def status(run: RunStatus, url: str) -> None:
    """A run at a glance."""
    colour = _COLOURS.get(run.state, "red")
    latest = f", latest {run.checkpoints[-1]}" if run.checkpoints else ""
    failures = ", ".join(f"{kind}: {count}" for kind, count in run.failures.items())
    _row("run", f"{escape(run.name)}  [dim]{escape(url)}[/dim]")
    _row("state", f"[{colour}]{run.state}[/{colour}] {escape(run.why)}")
    _row("round", f"{run.round or '-'}, {run.workers} workers on {run.machines} machines")
    _row("checkpoints", escape(f"{len(run.checkpoints)}{latest}"))
    if run.saved_why:
        _row("", f"[dim]{escape(run.saved_why)}[/dim]")
    _row("failures", failures or "none")


def lines(texts: Iterable[str]) -> None:
    """Plain lines, to the letter: no colours, and tabs stay tabs."""
    for text in texts:
        _console.file.write(f"{text}\n")


def findings(found: Iterable[Finding]) -> None:
    """What a check-up found: a line each, and below what is wrong, or unknown, what to do."""
    for one in found:
        mark = "[green]✓[/green]" if one.well else "[red]✗[/red]"
        mark = mark if one.seen else "[yellow]?[/yellow]"
        _console.print(f"{mark} {escape(one.what)}  [dim]{escape(one.found)}[/dim]")
        if one.do and not (one.well and one.seen):
            _console.print(f"  [bold]What to do:[/bold] {escape(one.do)}")


def good(text: str) -> None:
    """Something went well."""
    _console.print(f"[green]✓[/green] {escape(text)}")


def error(problem: SpotfitError) -> None:
    """What, why, and what to do."""
    _errors.print(f"[red]error:[/red] {escape(problem.what)}")
    if problem.do:
        _errors.print(f"[bold]What to do:[/bold] {escape(problem.do)}")
    for note in getattr(problem, "__notes__", ()):
        _errors.print(escape(note))


def checkpoints(kept: Iterable[Kept]) -> None:
    """One a line, with its step and metrics."""
    for one in kept:
        step = "files" if one.step is None else f"step {one.step}"
        step = "[red]broken[/red]" if one.broken else step
        told = escape(_metrics(one))
        _console.print(f"{escape(one.name)}  {step}  {told_bytes(one.size_bytes)}  {told}")


def checkpoint(one: Kept) -> None:
    """All that is known of one."""
    _row("checkpoint", escape(one.name))
    _row("size", told_bytes(one.size_bytes))
    _row("metrics", escape(_metrics(one)))
    if one.why:
        _row("why then", escape(one.why))
    if one.content is None:
        _row("content", escape(one.broken) or "files of a report")
        return
    content = one.content
    _row("content", f"{content.tensors} tensors, {content.parameters:,} parameters of the model")
    _row("saved at", f"step {content.step}, epoch {content.epoch}, by {content.world_size} workers")
    _row("shared", f"{told_bytes(content.shared_bytes)} with earlier checkpoints")


def _metrics(one: Kept) -> str:
    """Texts that would fill the screen are cut."""
    return ", ".join(f"{_short(name)}={_short(str(value))}" for name, value in one.metrics.items())


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _row(label: str, value: str) -> None:
    _console.print(f"{label:<12} {value.rstrip()}")
