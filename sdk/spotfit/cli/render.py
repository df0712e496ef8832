"""Formatting of the command line's output. No other module of the SDK prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from spotfit.client.run_handle import RunStatus
from spotfit.client.stored_checkpoints import CheckpointInfo
from spotfit.core.errors import SpotfitError
from spotfit.core.units import format_bytes
from spotfit.provision.api import AccountCheck

# soft_wrap: copied and piped lines must not contain line breaks at the width of the terminal.
# highlight: rich would colour numbers and paths within the texts of users.
_console = Console(highlight=False, soft_wrap=True)
_error_console = Console(stderr=True, highlight=False, soft_wrap=True)
# Longer names and values of metrics are truncated: they would fill the screen.
_MAX_TEXT_CHARS = 40
_STATE_COLORS = {
    "running": "green",
    "validating": "green",
    "finished": "green",
    "waiting": "yellow",
}


def status(run: RunStatus, url: str) -> None:
    """Print the state of a run on standard output, for `spotfit status`.

    `url` is the run's directory.
    """
    colour = _STATE_COLORS.get(run.state, "red")
    latest = f", latest {run.checkpoints[-1]}" if run.checkpoints else ""
    failures = ", ".join(f"{kind}: {count}" for kind, count in run.failures.items())
    _print_row("run", f"{escape(run.name)}  [dim]{escape(url)}[/dim]")
    _print_row("state", f"[{colour}]{run.state}[/{colour}] {escape(run.reason)}")
    # Numbers start at 1; '-' while no round is open.
    _print_row("round", f"{run.round or '-'}, {run.workers} workers on {run.machines} machines")
    _print_row("checkpoints", escape(f"{len(run.checkpoints)}{latest}"))
    if run.save_reason:
        _print_row("", f"[dim]saved: {escape(run.save_reason)}[/dim]")
    _print_row("failures", failures or "none")
    if not run.is_verified:
        _print_row("", "[yellow]not verified: this machine does not have the run's key[/yellow]")


def lines(texts: Iterable[str]) -> None:
    """Print lines unchanged on standard output, without wrapping or markup."""
    for text in texts:
        _console.file.write(f"{text}\n")  # not print(): rich would wrap lines and expand tabs


def findings(results: Iterable[AccountCheck]) -> None:
    """Print the results of checks, with the remedy of those that failed or are inconclusive.

    For `spotfit doctor`. Each result is printed as soon as the iterable yields it.
    """
    for check in results:
        mark = "[green]✓[/green]" if check.passed else "[red]✗[/red]"
        # An inconclusive check counts as passed, but was not carried out.
        mark = mark if check.conclusive else "[yellow]?[/yellow]"
        _console.print(f"{mark} {escape(check.name)}  [dim]{escape(check.detail)}[/dim]")
        if check.do and not (check.passed and check.conclusive):
            _console.print(f"  [bold]What to do:[/bold] {escape(check.do)}")


def success(text: str) -> None:
    """Print one line that reports success on standard output, after a check mark."""
    _console.print(f"[green]✓[/green] {escape(text)}")


def error(failure: SpotfitError) -> None:
    """Print message, remedy and notes of an error on standard error; does not exit."""
    _error_console.print(f"[red]error:[/red] {escape(failure.message)}")
    if failure.do:
        _error_console.print(f"[bold]What to do:[/bold] {escape(failure.do)}")
    for note in getattr(failure, "__notes__", ()):
        _error_console.print(escape(note))


def checkpoints(infos: Iterable[CheckpointInfo]) -> None:
    """Print one line per checkpoint: name, step, size and metrics.

    The step is "files" for a checkpoint that no Checkpointer saved, and "corrupt" after a read
    error.
    """
    for info in infos:
        step = "files" if info.step is None else f"step {info.step}"
        step = "[red]corrupt[/red]" if info.read_error else step
        metrics = escape(_format_metrics(info))
        _console.print(f"{escape(info.name)}  {step}  {format_bytes(info.size_bytes)}  {metrics}")


def checkpoint(info: CheckpointInfo) -> None:
    """Print all properties of a checkpoint, for `spotfit checkpoints show`.

    Without content, the error of reading it is printed, or that it holds files of the user.
    """
    _print_row("checkpoint", escape(info.name))
    _print_row("size", format_bytes(info.size_bytes))
    _print_row("metrics", escape(_format_metrics(info)))
    if info.reason:
        _print_row("reason", escape(info.reason))
    if info.content is None:
        _print_row("content", escape(info.read_error) or "files reported by the training function")
        return
    content = info.content
    _print_row("content", f"{content.tensors} tensors, {content.parameters:,} model parameters")
    _print_row(
        "saved at", f"step {content.step}, epoch {content.epoch}, by {content.world_size} workers"
    )
    _print_row("shared", f"{format_bytes(content.shared_bytes)} with earlier checkpoints")


def _format_metrics(info: CheckpointInfo) -> str:
    return ", ".join(
        f"{_truncate(name)}={_truncate(str(value))}" for name, value in info.metrics.items()
    )


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"


def _print_row(label: str, value: str) -> None:
    _console.print(f"{label:<12} {value.rstrip()}")
