"""Tables and colours; the only place of the command line that prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from spotfit.client.handle import RunStatus
from spotfit.core.errors import SpotfitError
from spotfit.provision.checkup import Finding

_console = Console(highlight=False, soft_wrap=True)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)
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
    _row("failures", failures or "none")


def lines(texts: Iterable[str]) -> None:
    """Plain lines, to the letter: no colours, and tabs stay tabs."""
    for text in texts:
        _console.file.write(f"{text}\n")


def findings(found: Iterable[Finding]) -> None:
    """What a check-up found: a line each, and below what is wrong how to mend it."""
    for one in found:
        mark = "[green]✓[/green]" if one.well else "[red]✗[/red]"
        _console.print(f"{mark} {escape(one.what)}  [dim]{escape(one.found)}[/dim]")
        if not one.well and one.do:
            _console.print(f"  [bold]What to do:[/bold] {escape(one.do)}")


def good(text: str) -> None:
    """Something went well."""
    _console.print(f"[green]✓[/green] {escape(text)}")


def error(problem: SpotfitError) -> None:
    """What, why, and what to do."""
    _errors.print(f"[red]error:[/red] {escape(problem.what)}")
    if problem.do:
        _errors.print(f"[bold]What to do:[/bold] {escape(problem.do)}")


def _row(label: str, value: str) -> None:
    _console.print(f"{label:<12} {value.rstrip()}")
