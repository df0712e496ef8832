"""Tables and colours; the only place of the command line that prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from spotfit.client.handle import RunStatus
from spotfit.core.errors import SpotfitError

_console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False)
_COLOURS = {"running": "green", "finished": "green", "waiting": "yellow"}


def status(run: RunStatus, url: str) -> None:
    """A run at a glance."""
    table = Table(show_header=False, box=None)
    colour = _COLOURS.get(run.state, "red")
    table.add_row("run", f"{run.name}  [dim]{url}[/dim]")
    table.add_row("state", f"[{colour}]{run.state}[/{colour}] {run.why}")
    table.add_row("round", f"{run.round or '-'}, {run.workers} workers on {run.machines} machines")
    table.add_row("checkpoints", f"{len(run.checkpoints)}, latest {(run.checkpoints or ('none',))[-1]}")
    table.add_row("failures", ", ".join(f"{kind}: {n}" for kind, n in run.failures.items()) or "none")
    _console.print(table)


def lines(texts: Iterable[str]) -> None:
    """Plain lines, as they are."""
    for text in texts:
        _console.print(text, markup=False)


def good(text: str) -> None:
    """Something went well."""
    _console.print(f"[green]✓[/green] {text}")


def error(problem: SpotfitError) -> None:
    """What, why, and what to do."""
    _errors.print(f"[red]error:[/red] {problem.what}")
    if problem.do:
        _errors.print(f"[bold]What to do:[/bold] {problem.do}")
